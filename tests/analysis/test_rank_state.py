"""From how many steps a forecast is learnt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from synthetic import Run, rank_of

from gpumon.analysis.rank_state import DeviceState, RankState
from gpumon.analysis.report import steps_per_s
from gpumon.session.frame import StepRecord
from gpumon_agent import wire


def steps_of_the_forecast(device: DeviceState) -> int:
    forecast = device.forecaster.forecast(None)
    assert forecast is not None
    return forecast.learnt_from


@pytest.mark.parametrize(("sparsely", "learnt"), [(False, 100), (True, 8)])
def test_a_rank_that_nobody_looks_at_is_learnt_from_the_newest_8_of_the_steps_that_came(
    sparsely: bool, learnt: int
) -> None:
    rank, device = rank_of(Run(), 100), DeviceState(0)
    device.observe([(record, record.on(0)) for record in rank.steps], None, sparsely=sparsely)
    assert steps_of_the_forecast(device) == learnt


def test_after_the_past_was_thinned_the_newest_256_steps_of_then_and_all_since_are_learnt_from() -> None:
    rank = rank_of(Run(), 600)
    for thinned, learnt in ((None, 600), (wire.Thinned(-1, 499, 1), 256 + 100)):
        known = RankState()
        known.follow(replace(rank, thinned=thinned))
        assert steps_of_the_forecast(known.devices[0]) == learnt


def test_the_pace_is_that_of_the_newest_20_steps() -> None:
    closed = [step * 1_000_000_000 for step in range(40)] + [39_000_000_000 + n * 100_000_000 for n in range(1, 21)]
    steps = [StepRecord(step, wire.Step(step, t_ns, 1), ()) for step, t_ns in enumerate(closed)]
    assert steps_per_s(steps) == pytest.approx(10)
