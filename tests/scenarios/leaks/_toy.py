"""What the leak scripts train: a small perceptron on random batches, and how one of them is chosen and run."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

STEPS = int(os.environ.get("LEAK_STEPS", "60"))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)).to(DEVICE)


def batches(steps: int = STEPS, size: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(steps):
        yield torch.randn(size, 64).to(DEVICE), torch.randn(size, 16).to(DEVICE)


def setup() -> tuple[nn.Sequential, torch.optim.Optimizer, Iterator[tuple[Tensor, Tensor]]]:
    model = perceptron()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = (model(inputs) - targets).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def run(scripts: dict[str, Callable[[bool], None]]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("script", choices=[name for name in scripts if not name.startswith("_")])
    parser.add_argument("--clean", action="store_true", help="the same without the leak")
    args = parser.parse_args()
    torch.manual_seed(0)
    scripts[args.script](args.clean)
