"""Trains on a virtual GPU, step by step as told on standard input: what a viewer asks is asked from outside.

Each line is a command; one line of JSON answers it. `gpumon_agent` watches as it would any script.
"""

from __future__ import annotations

import gc
import json
import sys

import torch
from torch import nn

import gpumon_agent
from gpumon_agent import agent as agents
from gpumon_agent import wire
from gpumon_agent.transport import blocks


class Trainer:
    def __init__(self) -> None:
        torch.cuda.set_per_process_memory_fraction(0.5)
        self.model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.kept: list[torch.Tensor] = []
        gpumon_agent.watch(self.model, self.optimizer)

    def steps(self, count: int) -> int:
        for _ in range(count):
            self.model(torch.randn(64, 256, device="cuda")).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return agents.REGISTRY.agent.phases.step

    def accumulate(self) -> int:
        """A forward and backward whose gradients stay until the next step."""
        self.model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        return sum(each.grad is not None for each in self.model.parameters())

    def keep(self, count: int) -> None:
        """Many small blocks, with gaps between them."""
        self.kept = [torch.empty(64, device="cuda") for _ in range(2 * count)][::2] if count else []

    def oom(self) -> str:
        try:
            torch.empty(1 << 40, device="cuda")
        except torch.OutOfMemoryError:
            return "caught"
        return ""

    def record(self, on: int) -> None:
        torch.cuda.memory._record_memory_history("all" if on else None, stacks="python")
        if on:
            self.kept.append(torch.empty(64, device="cuda"))

    def capture(self) -> list[str]:
        """What still waits after boundaries within a capture."""
        x = torch.randn(64, 256, device="cuda")
        agents.REGISTRY.agent.requests.take(wire.Request(wire.BLOCKS))
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            self.model(x)
        return list(agents.REGISTRY.agent.requests._wanted)

    def collects(self) -> list[object]:
        """Collections set off by reading many blocks; whether the collector is on, as it was, afterwards."""
        ran: list[str] = []
        before = gc.get_threshold()
        gc.callbacks.append(lambda phase, info: ran.append(phase))
        gc.set_threshold(10, 5, 5)
        count = len(ran)
        raw = blocks.read()
        made = len(ran) - count
        on = gc.isenabled()
        gc.disable()
        blocks.read()
        off = gc.isenabled()
        gc.enable()
        gc.callbacks.clear()
        gc.set_threshold(*before)
        return [made, on, off, sum(len(segment["blocks"]) for segment in raw.segments)]

    def budget(self) -> dict[int, int]:
        return agents.REGISTRY.agent.budget

    def failures(self) -> list[str]:
        return [part for part, count in agents.REGISTRY.agent.guard.failures.items() if count]


def main() -> None:
    trainer = Trainer()
    print(json.dumps(trainer.steps(5)), flush=True)
    for line in sys.stdin:
        verb, *numbers = line.split()
        print(json.dumps(getattr(trainer, verb)(*map(int, numbers))), flush=True)


if __name__ == "__main__":
    main()
