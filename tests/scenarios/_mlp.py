"""The small perceptron that the leak scenarios train: sizes chosen so that what is kept can be counted by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH, INPUTS, HIDDEN, OUTPUTS = 128, 256, 1024, 64


def perceptron(hidden: int = HIDDEN) -> nn.Sequential:
    """Two linear layers and a ReLU."""
    return nn.Sequential(nn.Linear(INPUTS, hidden), nn.ReLU(), nn.Linear(hidden, OUTPUTS))


def batch(device: torch.device | str, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Random inputs and targets, made on the host and copied as a loader's would be."""
    return torch.randn(size, INPUTS).to(device), torch.randn(size, OUTPUTS).to(device)
