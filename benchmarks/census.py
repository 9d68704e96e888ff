"""What a census costs: `python benchmarks/census.py [--write FILE]`.

A process with 700,000 Python objects that the collector knows, a list of 250,000 objects among them, trains on the CPU.
Censuses are asked for and taken in slices to the very end (installed packages' modules too). Of each slice the training
thread's own time is measured around everything that the agent does for it; of a suspicion, the time of one step.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from pathlib import Path
from statistics import median, quantiles

ROW = "| {:<62} | {:>14} |"


class Entry:
    """One of very many small objects of the user's."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tags = [str(number), number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=700_000, help="that the collector knows (700,000)")
    parser.add_argument("--censuses", type=int, default=3, help="complete ones (3)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, with this command")
    args = parser.parse_args()
    os.environ["GPUMON_GOVERNOR"] = "off"
    text = "\n".join(measure(args)) + "\n"
    command = " ".join(["python", "benchmarks/census.py", *sys.argv[1:]])
    head = f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} at the end, by\n\n"
    print(f"{head}    {command}\n\n{text}")
    if args.write:
        args.write.write_text(f"# What a census costs\n\n{head}    {command}\n\n{text}")


def measure(args: argparse.Namespace) -> list[str]:
    import torch

    from gpumon_agent import agent as agents
    from gpumon_agent.leaks.suspicion import Suspicion

    samples = [{"x": [number, str(number)], "y": number} for number in range(250_000)]
    entries: list[Entry] = []
    while len(gc.get_objects()) < args.objects:
        entries += [Entry(number) for number in range(10_000)]
    leaked = [torch.zeros(8) for _ in range(1_000)]
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    agent = agents.Agent("benchmark", publish=False)
    agents._agent = agent
    agent.adopt(model, optimizer)
    census = agent.evidence.census
    times: list[int] = []
    original = agent.evidence._take

    def timed(*arguments: object) -> None:
        began = time.thread_time_ns()
        original(*arguments)
        times.append(time.thread_time_ns() - began)

    agent.evidence._take = timed

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
    suspicion = Suspicion()
    began = time.thread_time_ns()
    for number in range(100_000):
        suspicion.step_closed(number, ((0, 1 << 30, 1000 + number % 7),))
    rows.append(("suspicion, a step and device", f"{(time.thread_time_ns() - began) / 100_000 / 1000:.2f} µs"))
    agent.leave("stopped")
    del samples, entries
    return [ROW.format("", ""), ROW.format("-" * 62, "-" * 13 + ":"), *(ROW.format(*row) for row in rows)]


if __name__ == "__main__":
    main()
