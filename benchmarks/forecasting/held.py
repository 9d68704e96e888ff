"""Held-out training runs to score forecasts: models and batch plans not used for tuning.

    python benchmarks/forecasting/held.py --model pairs --plan sorted --steps 160 --seed 3 [--leak 2 --noise 1] …

Used by benchmarks/forecast.py. Like run.py, it exits normally on OOM.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WORDS = 3000


class Pairs(nn.Module):
    """Encoder and decoder: two inputs of different lengths."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.both = nn.Transformer(width, 4, 2, 2, 4 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.both(self.words(source), self.words(target))).flatten(0, 1)


class Padded(nn.Module):
    """Tokens with a padding mask, through fused attention."""

    def __init__(self, width: int = 128, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        block = nn.TransformerEncoderLayer(width, 4, 3 * width, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens), src_key_padding_mask=mask)[:, 0])


class Hourglass(nn.Module):
    """A U-Net, which keeps every level for later: images of several sizes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        widths = [3, width, 2 * width, 4 * width]
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.Conv2d(b + a, a, 3, padding=1) for a, b in reversed(list(pairwise(widths[1:]))))
        self.head = nn.Conv2d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = F.gelu(layer(x))
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = F.interpolate(x, scale_factor=2)
        for layer, before in zip(self.up, kept[:-1][::-1], strict=True):
            x = F.interpolate(x, size=before.shape[-2:])
            x = F.gelu(layer(torch.cat([x, before], 1)))
        return self.head(x).mean((2, 3))


class Heavy(nn.Module):
    """Mostly weights: the optimizer peaks with small batches, backward with large ones."""

    def __init__(self, width: int = 1536) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


class Patches(nn.Module):
    """Images cut into patches, with attention."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 8, 8)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 3, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.cut(x).flatten(2).transpose(1, 2)).mean(1))


class Boxes(nn.Module):
    """A varying number of boxes: activations do not follow from input shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU(), nn.Conv2d(24, 48, 3, 2, 1), nn.ReLU())
        self.per_box = nn.Sequential(nn.Linear(48 * 16, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, x: Tensor, boxes: int = 64) -> Tensor:
        features = F.adaptive_avg_pool2d(self.body(x), 4).flatten(1)
        return self.per_box(features[torch.arange(boxes, device=x.device) % len(features)])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pairs": Pairs, "padded": Padded, "hourglass": Hourglass, "heavy": Heavy, "patches": Patches, "boxes": Boxes
}  # fmt: skip


def plan(name: str, steps: int, least: int, most: int, rng: random.Random) -> Iterator[int]:
    if name == "sorted":  # by length, the same epoch repeatedly
        epoch = sorted(rng.randint(least, most) for _ in range(40))
        yield from (epoch[step % 40] for step in range(steps))
    elif name == "pooled":  # sorted within pools, pools shuffled
        while True:
            pool = sorted(rng.randint(least, most) for _ in range(100))
            yield from rng.sample(pool[::10], 10)
    elif name == "noisy":  # a nearly constant batch size
        middle, spread = (least + most) / 2, (most - least) / 8
        yield from (max(least, min(most, round(rng.gauss(middle, spread)))) for _ in range(steps))
    elif name == "last":  # every epoch's last batch is smaller
        yield from (least if step % 25 == 24 else most for step in range(steps))
    elif name == "resolution":  # grows twice
        yield from (least + (most - least) * (3 * step // steps) // 2 for step in range(steps))
    elif name == "multiscale":  # another one every ten steps
        scales = [least + (most - least) * i // 6 // 8 * 8 for i in range(7)]
        for _ in range(0, steps, 10):
            yield from [rng.choice(scales)] * 10
    elif name == "heavy-tail":
        yield from (min(most, least + int(rng.paretovariate(1.6) * (most - least) / 12)) for _ in range(steps))
    elif name == "monster":  # one late batch, 40 times as large
        yield from (most * 40 if step == 3 * steps // 5 else rng.randint(least, most) for step in range(steps))
    elif name == "same":
        yield from (most for _ in range(steps))
    else:
        yield from (rng.randint(least, most) for _ in range(steps))


def batch(model: str, size: int, rows: int, rng: random.Random, budget: int) -> tuple[Any, ...]:
    if model == "pairs":
        other = max(2, round(size * rng.uniform(0.6, 1.4)))
        return tuple(torch.randint(WORDS, (rows, length)).cuda() for length in (size, other))
    if model == "padded":
        count = max(1, budget // size) if budget else rows
        return torch.randint(WORDS, (count, size)).cuda(), (torch.rand(count, size) < 0.1).cuda()
    if model == "heavy":
        return (torch.randn(size, 1536).cuda(),)
    if model == "boxes":
        return torch.randn(rows, 3, size, size).cuda(), rng.randint(32, 2048)
    return (torch.randn(rows, 3, size, size).cuda(),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="padded")
    parser.add_argument("--plan", default="random")
    parser.add_argument("--least", type=int, default=16)
    parser.add_argument("--most", type=int, default=160)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--budget", type=int, default=0, help="tokens a batch: rows follow the length")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--sgd", action="store_true")
    parser.add_argument("--leak", type=float, default=0.0, metavar="MIB")
    parser.add_argument("--noise", type=float, default=0.0, metavar="MIB", help="standard deviation")
    parser.add_argument("--leak-from", type=int, default=0, metavar="STEP")
    parser.add_argument("--evaluate", type=int, default=0, metavar="N")
    parser.add_argument("--save", type=int, default=0, metavar="N")
    parser.add_argument("--unfreeze", type=int, default=0, metavar="STEP")
    parser.add_argument("--average", type=int, default=0, metavar="STEP", help="from here on an average of the weights")
    parser.add_argument("--log", type=int, default=0, metavar="N", help="every N steps a histogram of the weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=0.01)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    model = MODELS[args.model]().cuda()
    parameters = list(model.parameters())
    if args.unfreeze:
        for parameter in parameters[: len(parameters) // 2]:
            parameter.requires_grad_(False)
    optimizer: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, 1e-3, momentum=0.9) if args.sgd else torch.optim.AdamW(parameters, 1e-4)
    )
    kept: list[Tensor] = []
    average: list[Tensor] = []
    sizes = plan(args.plan, args.steps, args.least, args.most, rng)
    step = 0
    try:
        for step, size in zip(range(args.steps), sizes, strict=False):
            if args.unfreeze and step == args.unfreeze:
                for parameter in parameters:
                    parameter.requires_grad_(True)
            for micro in range(args.accumulate):
                rows = args.rows if micro < args.accumulate - 1 or step % 7 else max(1, args.rows // 2)
                inputs = batch(args.model, size, rows, rng, args.budget)
                output = model(*inputs)
                loss = F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device="cuda"))
                loss.backward()
                del inputs, output, loss
            optimizer.step()
            optimizer.zero_grad()
            if args.average and step >= args.average:
                average = average or [p.detach().clone() for p in parameters]
                torch._foreach_lerp_(average, [p.detach() for p in parameters], 0.01)
            if args.leak and step >= args.leak_from:
                mib = max(0.05, rng.gauss(args.leak, args.noise))
                kept.append(torch.empty(round(mib * (1 << 20)), dtype=torch.uint8, device="cuda"))
            if args.evaluate and step % args.evaluate == args.evaluate - 1:
                model.eval()
                with torch.no_grad():
                    model(*batch(args.model, args.most, 3 * args.rows, rng, 3 * args.budget))
                model.train()
            if args.save and step % args.save == args.save - 1:
                copies = [value.clone() for value in model.state_dict().values()]
                del copies
            if args.log and step % args.log == 0:
                everything = torch.cat([p.detach().flatten() for p in parameters])
                del everything
            time.sleep(args.sleep)
    except torch.OutOfMemoryError:
        print("out of memory at step", step)
    time.sleep(0.1)


if __name__ == "__main__":
    main()
