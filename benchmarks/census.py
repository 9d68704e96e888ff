"""What a census costs: `python benchmarks/census.py [--write FILE]`; with --stacks what the lines of tensors cost.

A process with 700,000 Python objects that the collector knows, a list of 250,000 objects among them, trains on the CPU.
Censuses are asked for and taken in slices to the very end (installed packages' modules too). Of each slice the training
thread's own time is measured around everything that the agent does for it; of a suspicion, the time of one step.

--stacks needs a GPU, the virtual one will do: so many blocks, 100 of them with the stack that they were made by; of a
thousand reads the one piece that cannot be cut (a snapshot of few blocks, of many the newest allocations), then the
slices in which stacks are asked for, where there are many blocks of 600 addresses.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import time
from collections.abc import Callable
from statistics import median, quantiles

from common import options, write

ROW = "| {:<62} | {:>14} |"


class Entry:
    """One of very many small objects of the user's."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.tags = [str(number), number]


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--objects", type=int, default=700_000, help="that the collector knows (700,000)")
    parser.add_argument("--censuses", type=int, default=3, help="complete ones (3)")
    parser.add_argument("--stacks", action="store_true", help="where tensors were made instead, by number of blocks")
    args = parser.parse_args()
    os.environ["GPUMON_GOVERNOR"] = "off"
    text = "\n".join(measure_stacks() if args.stacks else measure(args)) + "\n"
    write("What a census costs", text, args.write)


def measure(args: argparse.Namespace) -> list[str]:
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
    return [ROW.format("", ""), ROW.format("-" * 62, "-" * 13 + ":"), *(ROW.format(*row) for row in rows)]


def measure_stacks() -> list[str]:
    import torch

    from gpumon_agent.attribution.peak_breakdown import History
    from gpumon_agent.attribution.workspaces import snapshot
    from gpumon_agent.leaks import allocations
    from gpumon_agent.leaks.object_children import Files
    from gpumon_agent.thread_clock import ThreadClock

    def deep(levels: int) -> torch.Tensor:
        return deep(levels - 1) if levels else torch.empty(64, device="cuda")

    def timed(pieces: list[int], piece: Callable[[], object]) -> object:
        began = time.thread_time_ns()
        result = piece()
        pieces.append(time.thread_time_ns() - began)
        return result

    torch.optim.SGD([torch.empty(1, device="cuda")])  # what an optimizer imports a first stack would, too
    history = History()
    rows = []
    for blocks in BLOCKS:
        pieces: list[int] = []
        slices: list[int] = []
        kept = [torch.empty(64, device="cuda") for _ in range(blocks - WITH_STACKS)]
        few = blocks <= allocations.BLOCKS_MAX
        rounds = ROUNDS if few or allocations._ask is not None else ROUNDS_IN_PAUSE
        for _ in range(rounds):
            read = allocations.Allocations(history, Files())
            read.begin(blocks)
            made = [deep(20) for _ in range(WITH_STACKS)]
            addresses = {tensor.data_ptr() for tensor in (*made, *kept[:ASKED])}
            gc.disable()  # as in a census
            if few:
                timed(pieces, lambda: snapshot(traces=False))
            elif read._traced is not None:
                timed(pieces, history.newest)
            while not read.survived:
                read.step_closed()
            if read._traced is None and not few:
                timed(pieces, functools.partial(read.read_in_pause, blocks))
            while not timed(slices, lambda read=read, a=addresses: read.read(a, (), ThreadClock(SLICE_NS))):
                pass
            gc.enable()
            assert len(read.lines) == WITH_STACKS, len(read.lines)
            del made
        how = (
            "all blocks" if few else "the newest allocations" if read._traced is not None else "all blocks, in a pause"
        )
        rows += _spread(f"{blocks:,} blocks: {how}, in one piece", pieces)
        rows += _spread(f"{blocks:,} blocks: a slice", slices)
        rows.append((f"{blocks:,} blocks: a whole read, mean", f"{sum(slices) / rounds / 1000:,.0f} µs"))
        del kept
    return [ROW.format("", ""), ROW.format("-" * 62, "-" * 13 + ":"), *(ROW.format(*row) for row in rows)]


def _spread(what: str, times: list[int]) -> list[tuple[str, str]]:
    cuts = quantiles(times, n=1000)
    figures = {"p50": median(times), "p99.9": cuts[998], "longest": max(times)}
    return [(f"{what}, {name}", f"{ns / 1000:,.0f} µs") for name, ns in figures.items()]


BLOCKS = (500, 1_000, 10_000, 100_000)
WITH_STACKS = 100
ASKED = 500  # addresses that have no stack
ROUNDS = 1_000
ROUNDS_IN_PAUSE = 20
SLICE_NS = 500_000


if __name__ == "__main__":
    main()
