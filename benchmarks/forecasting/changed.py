"""A training run with one thing changed at a time, to check what `gpumon whatif` predicts for the change.

    python benchmarks/forecasting/changed.py --model blocks [--bf16] [--checkpointing] [--fused] [--zero 2] …

benchmarks/forecast.py records it on the virtual GPU, first unchanged, then changed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WORDS, LENGTH = 4000, 128


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.three = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        b, n, w = x.shape
        q, k, v = self.three(self.norms[0](x)).view(b, n, 3, 4, w // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, w))
        return x + self.inner(self.norms[1](x))


class Blocks(nn.Module):
    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.checkpointing = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(x).flatten(0, 1)


class Stages(nn.Module):
    def __init__(self, width: int = 48, layers: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, 2, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x))
        return self.head(x.mean((2, 3)))


class Wide(nn.Module):
    """Large layers, few rows: mostly weights, gradients and optimizer state."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(6))
        self.checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x


MODELS: dict[str, Callable[[], Any]] = {"blocks": Blocks, "stages": Stages, "wide": Wide}


def batch(model: str, rows: int, length: int, device: torch.device) -> Tensor:
    if model == "blocks":
        return torch.randint(WORDS, (rows, length)).to(device)
    if model == "stages":
        return torch.randn(rows, 3, 64, 64).to(device)
    return torch.randn(rows, 2048).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="blocks")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--vary", action="store_true", help="lengths, or rows, from half to all")
    parser.add_argument("--grow", type=float, default=1.0, help="so many times the rows")
    parser.add_argument("--lengthen", type=float, default=1.0)
    parser.add_argument("--accumulate", type=int, default=1, help="the same batch in so many parts")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--bucket-views", action="store_true")
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    rng = random.Random(4)
    torch.manual_seed(4)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    model = MODELS[args.model]().to(device)
    model.checkpointing = args.checkpointing
    called: nn.Module = model
    if "RANK" in os.environ:
        dist.init_process_group("nccl")
    if args.ddp or args.zero == 1:
        called = nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index], gradient_as_bucket_view=args.bucket_views
        )
    elif args.zero:
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block, reshard_after_forward=args.zero == 3)
        fully_shard(model, reshard_after_forward=args.zero == 3)
    fused = True if args.fused else None
    if args.zero == 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=fused)
    for _ in range(args.steps):
        rows, length = round(args.rows * args.grow), round(args.length * args.lengthen)
        if args.vary:
            share = rng.uniform(0.5, 1.0)
            rows, length = (rows, round(length * share)) if args.model == "blocks" else (round(rows * share), length)
        for _ in range(args.accumulate):
            inputs = batch(args.model, max(1, rows // args.accumulate), length, device)
            with torch.autocast("cuda", torch.bfloat16) if args.bf16 else contextlib.nullcontext():
                output = called(inputs)
                loss = output.float().square().mean()
            loss.backward()
            del inputs, output, loss
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.01)
    if "RANK" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
