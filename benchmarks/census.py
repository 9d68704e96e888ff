"""What a census costs: `python benchmarks/census.py [--objects 700000] [--censuses 3]`.

A process with 700,000 gc-tracked Python objects, among them a list of 250,000, trains on the CPU. Each census runs in
slices to its end (including modules of installed packages). Measured: the training thread's CPU time of all agent work
per slice; for a suspicion, the time of one step.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from statistics import median, quantiles

from common import options


class Entry:
    def __init__(self, number: int) -> None:
        self.number = number
        self.tags = [str(number), number]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--objects", type=int, default=700_000, help="that the collector knows (700,000)")
    parser.add_argument("--censuses", type=int, default=3, help="complete ones (3)")
    args = parser.parse_args()
    os.environ["GPUMON_GOVERNOR"] = "off"
    for what, figure in measure(args):
        print(f"{what:<40}{figure:>14}")
    print(f"{'load at the end':<40}{os.getloadavg()[0]:>14.1f}")


def measure(args: argparse.Namespace) -> list[tuple[str, str]]:
    import torch

    from gpumon_agent import agent as agents
    from gpumon_agent.leaks.growth_trigger import GrowthTrigger

    samples = [{"x": [number, str(number)], "y": number} for number in range(250_000)]
    entries: list[Entry] = []
    while len(gc.get_objects()) < args.objects:
        entries += [Entry(number) for number in range(10_000)]
    leaked = [torch.zeros(8) for _ in range(1_000)]
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    agent = agents.Agent("benchmark", publish=False)
    agents.REGISTRY.agent = agent
    agent.adopt(model, optimizer)
    census = agent.leaks.census
    times: list[int] = []
    original = agent.leaks._take

    def timed(*arguments: object) -> None:
        began = time.thread_time_ns()
        original(*arguments)
        times.append(time.thread_time_ns() - began)

    agent.leaks._take = timed

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        agent.recorder.drain()

    step()
    slices: list[int] = []
    rows = []
    for number in range(args.censuses):
        times.clear()
        census._begin(agent.phases.step, "asked", ())
        while census._taking is not None:
            step()
        slices += times
        newest = census.newest
        assert newest is not None
        if not number:
            held = next(group for group in newest.groups if group.shape == (8,))
            assert held.count == len(leaked), held
            rows += [("objects that the collector knows", f"{len(gc.get_objects()):,}")]
        rows.append((f"census {number + 1}: objects looked at", f"{newest.objects:,}"))
        rows.append((f"census {number + 1}: thread CPU time", f"{newest.spent_ns / 1e9:.2f} s"))
    cuts = quantiles(slices, n=1000)
    rows += [
        ("slices", f"{len(slices):,}"),
        ("slice, p50", f"{median(slices) / 1000:.0f} µs"),
        ("slice, p99", f"{cuts[989] / 1000:.0f} µs"),
        ("slice, p99.9", f"{cuts[998] / 1000:.0f} µs"),
        ("slice, longest", f"{max(slices) / 1000:.0f} µs"),
    ]
    suspicion = GrowthTrigger()
    began = time.thread_time_ns()
    for number in range(100_000):
        suspicion.step_closed(number, ((0, 1 << 30, 1000 + number % 7),))
    rows.append(("suspicion, a step and device", f"{(time.thread_time_ns() - began) / 100_000 / 1000:.2f} µs"))
    agent.leave("stopped")
    del samples, entries
    return rows


if __name__ == "__main__":
    main()
