"""A training run to be forecast: several models, batch plans, leaks, occasional phases.

    python benchmarks/forecasting/run.py --model attention --sizes random --steps 200 [--leak 2 --noise 1] …

It trains until the steps are done or memory runs out, and exits normally either way.
Used by benchmarks/forecast.py, which records it on the virtual GPU.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 4096
WIDTH = 128


class Attention(nn.Module):
    """Attention blocks that keep a weight for every pair of positions."""

    def __init__(self, layers: int = 3, heads: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, heads, batch_first=True) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + block(x, x, x, need_weights=True)[0]
        return self.head(x).mean(1)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class Bag(nn.Module):
    """Embeddings summed: mostly the table's bytes; activations follow the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(60_000, WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, 512), nn.GELU(), nn.Linear(512, 64))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.words(tokens)).mean(1)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention, "convolutions": Convolutions, "bag": Bag, "perceptron": Perceptron
}  # fmt: skip


def sizes(kind: str, steps: int, least: int, most: int, rng: random.Random) -> list[int]:
    """A size per step: a length, an image edge, or a batch."""
    if kind == "same":
        return [most] * steps
    if kind == "bucketed":
        buckets = [least + (most - least) * i // 5 for i in range(6)]
        return [rng.choice(buckets) for _ in range(steps)]
    if kind == "curriculum":
        return [least + (most - least) * (step // 20) * 20 // steps for step in range(steps)]
    if kind == "growing":
        return [least + (most - least) * step // steps for step in range(steps)]
    if kind == "outlier":
        return [round(most * 40) if step == steps // 2 else rng.randint(least, most) for step in range(steps)]
    return [rng.randint(least, most) for _ in range(steps)]


def batch(model: str, size: int, rows: int) -> Tensor:
    if model in ("attention", "bag"):
        return torch.randint(4096, (rows, size)).cuda()
    if model == "convolutions":
        return torch.randn(rows, 3, size, size).cuda()
    return torch.randn(size * rows, 256).cuda()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="perceptron")
    parser.add_argument("--sizes", default="same", help="same, random, bucketed, curriculum, growing, outlier")
    parser.add_argument("--least", type=int, default=16)
    parser.add_argument("--most", type=int, default=128)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--leak", type=float, default=0.0, metavar="MIB", help="kept of every step")
    parser.add_argument("--noise", type=float, default=0.0, metavar="MIB", help="the leak's, to each side")
    parser.add_argument("--evaluate", type=int, default=0, metavar="N", help="every N steps, twice the batch")
    parser.add_argument("--save", type=int, default=0, metavar="N", help="every N steps a copy of the weights")
    parser.add_argument("--alternate", action="store_true", help="two optimizers in turn, one with state")
    parser.add_argument("--unfreeze", type=int, default=0, metavar="STEP", help="until then only the last layer learns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=0.02)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    model = MODELS[args.model]().cuda()
    parameters = list(model.parameters())
    if args.unfreeze:
        for parameter in parameters[:-2]:
            parameter.requires_grad_(False)
    half = len(parameters) // 2
    optimizers = (
        [torch.optim.SGD(parameters[:half], 1e-3), torch.optim.AdamW(parameters[half:], foreach=True)]
        if args.alternate
        else [torch.optim.AdamW(parameters)]
    )
    kept: list[Tensor] = []
    time.sleep(0.5)
    try:
        for step, size in enumerate(sizes(args.sizes, args.steps, args.least, args.most, rng)):
            if args.unfreeze and step == args.unfreeze:
                for parameter in parameters:
                    parameter.requires_grad_(True)
            for micro in range(args.accumulate):
                if micro:
                    size = rng.randint(args.least, args.most) if args.sizes == "random" else size
                x = batch(args.model, size, args.rows)
                output = model(x)
                loss = F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device="cuda"))
                loss.backward()
                del x, output, loss
            optimizers[step % len(optimizers)].step()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if args.leak:
                mib = max(0.0, args.leak + args.noise * rng.uniform(-1, 1))
                kept.append(torch.empty(round(mib * (1 << 20)), dtype=torch.uint8, device="cuda"))
            if args.evaluate and step % args.evaluate == args.evaluate - 1:
                model.eval()
                with torch.no_grad():
                    model(batch(args.model, args.most, 2 * args.rows))
                model.train()
            if args.save and step % args.save == args.save - 1:
                copies = {name: value.clone() for name, value in model.state_dict().items()}
                del copies
            time.sleep(args.sleep)
    except torch.OutOfMemoryError:
        print("out of memory at step", step)
    time.sleep(0.3)


if __name__ == "__main__":
    main()
