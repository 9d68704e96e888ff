"""Cost of forecasts: the agent's at a batch and in learning, and the viewer's.

CPU time of one thread. The agent's two alternate, as in training; the viewer is another process, so it has its own
loop. Machine speed varies: the fastest and the slowest of `ROUNDS` are given. Used by benchmarks/forecast.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, median

from gpumon.analysis.forecast import Forecaster, Room
from gpumon.analysis.history import look
from gpumon.session.frame import StepRecord
from gpumon_agent import wire
from gpumon_agent.shape_model.outlook import Outlooks

MIB, GIB = 1 << 20, 1 << 30
ROUNDS = 3
SETTLED = 200  # warm-up steps, not counted


def costs() -> Iterator[tuple[str, str]]:
    """(name, cost in the fastest and slowest round)."""
    for kind in ("same shapes", "random shapes", "random pairs of lengths"):
        rounds = [spend(kind) for _ in range(ROUNDS)]
        for name in rounds[0]:
            each = [spent[name][SETTLED:] for spent in rounds]
            medians, means = [median(figures) for figures in each], [fmean(figures) for figures in each]
            yield f"{name}, {kind}", f"{span(medians)} µs median, {span(means)} µs mean"


def span(figures: Sequence[float]) -> str:
    return f"{min(figures):.1f} to {max(figures):.1f}"


def spend(kind: str) -> dict[str, list[float]]:
    """Microseconds per step, by name."""
    agent, viewer = _spent_by_agent(), _spent_by_viewer()
    spent: dict[str, list[float]] = {}
    for make in (agent, viewer):
        rng = random.Random(1)
        for step in range(2000):
            length = 512 if kind == "same shapes" else rng.randint(32, 900)
            shapes: tuple[tuple[int, int], ...] = ((8, length),)
            needs = 2e4 * 8 * length + 900.0 * 8 * length**2
            if kind == "random pairs of lengths":  # the maximum of two parts
                other = max(1, round(length * rng.uniform(0.6, 1.4)))
                shapes, needs = (*shapes, (8, other)), max(needs, 3e4 * 8 * other + 900.0 * 8 * length * other)
            ends = (("between", 0.0), ("forward", needs), ("backward", 1.2 * needs), ("optimizer", 100.0 * MIB))
            told = tuple(
                wire.Phase(step, name, 0, 0, 0, 1, 300 * MIB, 300 * MIB + round(peak), GIB, GIB, 0, 0, 0, 9, 0, 0)
                for name, peak in ends
            )
            for name, work in make(step, told, wire.Step(step, 0, 1, 64 * length, shapes, False, 4)):
                began = time.thread_time_ns()
                work()
                spent.setdefault(name, []).append((time.thread_time_ns() - began) / 1e3)
    return spent


Works = Callable[[int, tuple[wire.Phase, ...], wire.Step], Sequence[tuple[str, Callable[[], object]]]]


def _spent_by_agent() -> Works:
    outlooks = Outlooks(lambda e: None, {0: 8 * GIB})

    def works(step: int, told: tuple[wire.Phase, ...], closed: wire.Step) -> Sequence[tuple[str, Callable[[], object]]]:
        def learnt() -> None:
            for phase in told:
                outlooks.follow(phase)
            outlooks.follow(closed)

        said = partial(outlooks.batch, step, 0, closed.input_shapes, 1, [(0, 300 * MIB, 0)])
        return ("agent, a batch", said), ("agent, learning (its thread)", learnt), ("nothing", int)

    return works


def _spent_by_viewer() -> Works:
    forecaster = Forecaster()

    def works(step: int, told: tuple[wire.Phase, ...], closed: wire.Step) -> Sequence[tuple[str, Callable[[], object]]]:
        record = StepRecord(step, closed, told)

        def viewed() -> None:
            seen = look(record, record.phases)
            if seen.figures is not None:
                forecaster.observe(seen.figures, record.phases)
            forecaster.forecast(Room(8 * GIB, forecaster.fragments.bytes))

        return (("viewer, the forecast of each step", viewed),)

    return works
