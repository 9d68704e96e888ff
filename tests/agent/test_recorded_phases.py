"""Phases as annotations of a snapshot: whole microseconds, by time, among the user's."""

from __future__ import annotations

import time

from gpumon_agent import wire
from gpumon_agent.oom.recorded_phases import PHASES_MAX, RecordedPhases

US = 1_000


def phase(step: int, end_ns: int, duration_ns: int, device: int = 0) -> tuple[int, wire.Phase]:
    return 0, wire.Phase(step, "forward", 0, device, end_ns, duration_ns)


def test_short_phases_are_left_out_and_the_rest_is_by_time() -> None:
    now = time.monotonic_ns()
    kept = RecordedPhases(lambda: True)
    kept.drained([phase(1, now, 500 * US), phase(1, now, 500 * US, device=1), phase(2, now + 999, 999)])
    mine = {"device": 0, "name": "mine", "stage": "START", "time_us": (time.time_ns() // US) - 250}
    found = kept.annotated([mine], (3, "backward", now + US), 1)
    assert [(each["device"], each["name"], each["stage"]) for each in found] == [
        (0, "step 1, forward", "START"),
        (1, "step 1, forward", "START"),
        (0, "mine", "START"),
        (0, "step 1, forward", "END"),
        (1, "step 1, forward", "END"),
        (1, "step 3, backward", "START"),
    ]
    assert found[3]["time_us"] - found[0]["time_us"] == 500


def test_the_newest_are_kept_and_none_while_nobody_records() -> None:
    now = time.monotonic_ns()
    kept = RecordedPhases(lambda: True)
    kept.drained([phase(step, now + step * 10 * US, 5 * US) for step in range(PHASES_MAX + 1)])
    found = kept.annotated([], (0, "load", now), 0)
    assert len(found) == 2 * PHASES_MAX + 1
    assert found[0]["name"] == "step 1, forward"
    idle = RecordedPhases(lambda: False)
    idle.drained([phase(1, now, 500 * US)])
    assert idle.annotated([], (2, "forward", now), 0) == []
