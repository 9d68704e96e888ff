"""Peaks of steps that were not read."""

from __future__ import annotations

from gpumon.session.frame import StepRecord
from gpumon_agent import wire
from gpumon_agent.wire.thinning import facts

QUIET = (wire.QuietPeak(0, 900, 1000), wire.QuietPeak(1, None, None))


def closed() -> wire.Step:
    return wire.Step(12, 0, 0, 10**6, quiet=5, quiet_peaks=QUIET)


def test_a_quiet_peak_counts_as_the_steps() -> None:
    assert dict(facts(closed(), 1, [(0, 500), (1, 400)], 0).peaks) == {0: 900, 1: 400}
    assert dict(facts(closed(), 1, [(0, 950)], 0).peaks) == {0: 950}


def test_a_record_has_the_higher_of_both() -> None:
    record = StepRecord(12, closed(), (), alone=0, highest=500)
    assert record.peak(0) == 900
    assert record.peak(1) is None
