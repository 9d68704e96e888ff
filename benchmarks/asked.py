"""What a look at the allocator's blocks costs the training thread, by the number of blocks.

    python -m gpumon.virtual_gpu run -n 1 -- python benchmarks/asked.py [--times N]

Prints for each size, in milliseconds: the read alone with the garbage collector held, as the agent does it, and not
held; then the longest and the sum of the slices in which messages, and a file, are made of it.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Iterator
from statistics import median

import torch

from gpumon.analysis.blocks import allocator, cell_bytes, cells
from gpumon_agent import wire
from gpumon_agent.attribution.workspaces import snapshot
from gpumon_agent.oom import memory_viz
from gpumon_agent.transport import blocks

SIZES = (1_000, 10_000, 50_000, 100_000)


def read() -> blocks.Raw:
    return blocks.read(blocks.BLOCKS_AT_OOM_MAX)


def ms(spent_ns: float) -> str:
    return f"{spent_ns / 1e6:9.2f}"


def slices(work: Iterator[object]) -> tuple[int, int]:
    """(longest, sum) of the turns, in ns of this thread."""
    longest = total = 0
    while True:
        began = time.thread_time_ns()
        done = next(work, work) is work
        spent = time.thread_time_ns() - began
        longest, total = max(longest, spent), total + spent
        if done:
            return longest, total


def messages(raw: blocks.Raw) -> Iterator[object]:
    for made in blocks.made_of(raw, 0):
        yield
        if made is not None:
            yield from blocks.encoded(made, 0, 0, (0, "forward"), 0, "asked", 0)


def drawn(raw: blocks.Raw) -> int:
    """What a viewer needs for one map of 116 × 30 cells."""
    made = next(each for each in blocks.made_of(raw, 0) if each is not None)
    cut = [segment for part in wire.parts(made) for segment in part]
    began = time.thread_time_ns()
    found = allocator(cut)
    each = cell_bytes(found, 116, 30)
    for pool in found.pools:
        cells(pool, each)
    return time.thread_time_ns() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=7)
    times = parser.parse_args().times
    kept: list[torch.Tensor] = []
    heads = ("read p50", "max", "not held", "slice", "all", "file", "all", "map")
    print(f"{'blocks':>8} {' '.join(f'{head:>9}' for head in heads)}")
    for size in SIZES:
        while len(kept) < size:
            kept.append(torch.empty(1, device="cuda"))
        held, free = [], []
        for _ in range(times):
            held.append(read().spent_ns)
            began = time.monotonic_ns()
            told = snapshot(traces=False)
            free.append(time.monotonic_ns() - began)
            del told
        slice_, all_ = slices(messages(read()))
        raw, out = read(), io.BytesIO()
        file, whole = slices(map(out.write, memory_viz.pieces(raw.segments, raw.rest)))
        figures = (median(held), max(held), median(free), slice_, all_, file, whole, drawn(read()))
        print(f"{size:>8,} {' '.join(ms(figure) for figure in figures)}")


if __name__ == "__main__":
    main()
