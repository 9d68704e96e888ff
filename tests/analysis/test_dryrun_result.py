"""A dry run's verdict, from runs whose every byte is known."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from synthetic import GIB, MIB, Run

from gpumon.analysis.dryrun_result import DryRunResult, Outcome, Space
from gpumon_agent import wire


def outcome(stream: Iterable[wire.Received]) -> Outcome:
    result = DryRunResult()
    for received in stream:
        result.take(received)
    return result.outcome("finished", 0, (Space("card", 40 * GIB, 2 * GIB, 450 * MIB),))


@pytest.mark.parametrize(("more", "lines_of"), [(8, "peak"), (12, "end")])
def test_the_breakdown_of_a_peak_within_a_hundredth_serves_for_the_highest(more: int, lines_of: str) -> None:
    """Of 1,000 MiB. Only step 1's peak was composed, and step 3's is higher; else the breakdown is that of an end."""
    run = Run(activations=lambda step: (675 + more * (step == 3)) * MIB)
    events = list(run.stream(6))
    peak = run.peaks(1)["backward"]
    composed = wire.Ledger(1, "backward", 0, 0, peak, peak - run.rounding, None, weights=run.weights, peak=True)
    at = next(i for i, r in enumerate(events) if isinstance(r.event, wire.Step) and r.event.step == 1)
    highest = outcome([*events[:at], wire.Received(run.nonce, events[at].unix_ns, composed), *events[at:]]).peak
    assert highest is not None
    assert (highest.step, highest.lines_of) == (3, lines_of)


@pytest.mark.parametrize(("steps", "fits"), [(18, True), (22, False)])
def test_what_stays_of_20_steps_is_a_growth_that_does_not_fit(steps: int, fits: bool) -> None:
    found = outcome(Run(kept=lambda step: 30 * MIB * step).stream(steps, host_every=1))
    assert (found.fits, found.grows_out is None) == (fits, fits)
