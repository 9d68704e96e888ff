"""A user's own loop that reads torch at every boundary and writes the figures down; it knows nothing of gpumon.

own_readings.py FIGURES [--steps N] [--micro-batches N] [--reset never|boundary|sometimes] [--pause S]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("figures", type=Path)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--micro-batches", type=int, default=1)
parser.add_argument("--reset", choices=("never", "boundary", "sometimes"), default="boundary")
parser.add_argument("--pause", type=float, default=0.0)
options = parser.parse_args()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


torch.cuda.init()
torch.cuda.reset_peak_memory_stats()
model = nn.Sequential(nn.Embedding(1000, 256), *(Block(256) for _ in range(4)), nn.Linear(256, 1000)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
chance = random.Random(7)

with options.figures.open("w") as figures:

    def read(phase: str) -> None:
        stats = torch.cuda.memory_stats()
        line = {
            "step": step,
            "phase": phase,
            "allocated": torch.cuda.memory_allocated(),
            "allocated_peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "reserved_peak": torch.cuda.max_memory_reserved(),
            "active": stats["active_bytes.all.current"],
            "inactive_split": stats["inactive_split_bytes.all.current"],
            "requested": stats["requested_bytes.all.current"],
        }
        figures.write(json.dumps(line) + "\n")
        if options.reset == "boundary" or (options.reset == "sometimes" and chance.random() < 0.3):
            torch.cuda.reset_peak_memory_stats()

    for step in range(options.steps):
        optimizer.zero_grad()
        for micro_batch in range(options.micro_batches):
            tokens = torch.zeros((16 if step % 3 else 8, 64 + 8 * (step % 5)), dtype=torch.long).to("cuda")
            read("between" if step or micro_batch else "load")
            logits = model(tokens)
            read("forward")
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            del logits  # or the next assignment would free it between the forward's return and the reading
            loss.backward()
            read("backward")
        optimizer.step()
        read("optimizer")
        time.sleep(options.pause)
