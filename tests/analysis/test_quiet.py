"""What is found in a run of which few steps were read."""

from __future__ import annotations

import random

from gpumon.analysis.growth_series import DeviceGrowth
from gpumon.analysis.history import higher, look
from gpumon.analysis.report import steps_per_s
from gpumon.session.frame import StepRecord
from gpumon_agent import wire

MIB = 1 << 20


def record(
    step: int, allocated: int, *, quiet: int = 0, peak: int = 0, ends: tuple[wire.QuietEnd, ...] = ()
) -> StepRecord:
    phase = wire.Phase(
        step, wire.OPTIMIZER, 0, 0, step, 1, allocated, allocated + MIB, allocated, allocated, allocations=9
    )
    peaks = (wire.QuietPeak(0, peak, peak),) if peak else ()
    closed = wire.Step(step, step, 1, phases=1, quiet=quiet, quiet_peaks=peaks, quiet_ends=ends)
    return StepRecord(step, closed, (phase,), alone=0, highest=allocated + MIB)


def test_the_highest_peak_so_far_may_be_of_a_quiet_step() -> None:
    seen = record(50, 10 * MIB, quiet=40, peak=99 * MIB)
    found = higher(None, 50, look(seen, seen.phases).highest)
    assert found is not None
    assert found.allocated == 99 * MIB


def test_a_leak_is_found_in_the_ends_of_quiet_steps() -> None:
    growth, noise = DeviceGrowth(), random.Random(1)

    def end(step: int) -> int:
        return 100 * MIB + step * 65_536 + noise.randrange(8) * 512

    for step in range(100, 1_200, 100):
        ends = tuple(wire.QuietEnd(at, 0, end(at), 9) for at in range(step - 95, step, 5))
        each = record(step, end(step), quiet=99, ends=ends)
        growth.observe(each, each.phases[-1], None, end(step) + MIB)
    grown = growth.kept()
    assert grown is not None
    assert grown.per_step is not None
    assert abs(grown.per_step - 65_536) < 200


def test_the_pace_counts_the_quiet_steps_between_those_that_were_read() -> None:
    """Read at 10, 50 and 90, a step each 2 ms."""
    steps = [
        StepRecord(step, wire.Step(step, step * 2_000_000, 2_000_000, quiet=quiet), ())
        for step, quiet in ((10, 0), (50, 39), (90, 39))
    ]
    assert steps_per_s(steps) == 500
