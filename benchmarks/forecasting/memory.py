"""What forecasting keeps over a very long run: blocks of Python's allocator and resident memory, early and late.

One process plays the agent's part and the viewer's for steps without end: lengths, pairs of lengths, images and
micro-batches in turn, ever new names of phases, a leak. Used by benchmarks/forecast.py.
"""

from __future__ import annotations

import gc
import random
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from gpumon.analysis.forecast import Forecaster, Room
from gpumon.analysis.history import look
from gpumon.session.frame import StepRecord
from gpumon_agent import wire
from gpumon_agent.shape_model.outlook import Outlooks

MIB, GIB = 1 << 20, 1 << 30
Shapes = tuple[tuple[int, ...], ...]


def batches(rng: random.Random, step: int) -> Shapes:
    """Of one step, by what the run does at the time: each for ten thousand steps."""
    kind, rows = step // 10_000 % 4, rng.choice((4, 8))
    length = rng.randint(16, 900)
    if kind == 1:
        return (rows, length), (rows, max(1, round(length * rng.uniform(0.6, 1.4))))
    if kind == 2:
        return ((rows, 3, 8 * (length // 40 + 4), 8 * (length // 40 + 4)),)
    return ((rows, length),)


def phases(step: int, index: int, shapes: Shapes, kept: int) -> list[wire.Phase]:
    needed = sum(MIB // 2 + 20_000 * shape[0] * shape[-1] for shape in shapes)
    ends = [("between", 0), ("forward", needed), ("backward", round(1.2 * needed)), ("optimizer", 40 * MIB)]
    if step % 50 == 0:
        ends.append((f"step {step}", 30 * MIB))
    return [
        wire.Phase(step, name, index, 0, 0, 1, kept, kept + peak, 2 * GIB, 2 * GIB, kept, 8 * MIB, kept, 9, 0, 0)
        for name, peak in ends
    ]


def keeping(steps: int) -> Iterator[tuple[int, int, int]]:
    """(steps, allocated blocks, resident KiB), a few times: the first after a tenth of the run."""
    rng = random.Random(3)
    outlooks, forecaster = Outlooks(lambda event: None, {0: 8 * GIB}), Forecaster()
    told = max(1, steps // 10)
    for step in range(steps + 1):
        shapes = batches(rng, step)
        kept = 300 * MIB + (step % 40_000) * 4096
        outlooks.batch(step, 0, shapes, 1, [(0, kept, 0)])
        made = phases(step, 0, shapes, kept)
        closed = wire.Step(step, 0, 1, 64 * shapes[0][-1], shapes, False, len(made))
        for event in (*made, closed):
            outlooks.follow(event)
        record = StepRecord(step, closed, tuple(made))
        seen = look(record, record.phases)
        if seen.figures is not None:
            forecaster.observe(seen.figures, record.phases)
        if step % 5 == 0:
            forecaster.forecast(Room(8 * GIB, forecaster.fragments.bytes))
        if step and step % told == 0:
            gc.collect()
            yield step, sys.getallocatedblocks(), _resident_kib()


def _resident_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024
