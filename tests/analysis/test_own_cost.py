"""What gpumon costs, as outlets say it."""

from __future__ import annotations

import pytest

from gpumon.analysis.own_cost import OwnCost, own_cost
from gpumon_agent import wire


@pytest.mark.parametrize(
    ("share", "error", "text"),
    [
        (0.0041, 0.0019, "costs 0.4 % ± 0.2"),
        (0.0041, 0.0021, "costs 0.4 % ± 0.3"),  # limits are rounded up
        (0.0, 0.0, "costs 0.0 % ± 0.1"),
        (0.0123, None, "costs ≤ 1.3 %"),
        (0.003, None, "costs ≤ 0.3 %"),
        (0.0991, None, "costs ≤ 10 %"),
        (0.0, None, "costs ≤ 0.1 %"),
        (12.341, None, "costs ≤ 1,235 %"),
    ],
)
def test_a_cost_in_words(share: float, error: float | None, text: str) -> None:
    assert OwnCost(share, error).text == text


def test_a_heartbeat_tells_it_in_millionths() -> None:
    assert own_cost(None) is None
    assert own_cost(wire.Heartbeat(1, 0, "forward", 0)) is None
    assert own_cost(wire.Heartbeat(1, 0, "forward", 0, cost=4_100)) == OwnCost(0.0041, None)
    assert own_cost(wire.Heartbeat(1, 0, "forward", 0, cost=0, cost_error=1_900)) == OwnCost(0.0, 0.0019)


def test_a_limit_that_says_nothing_is_not_shown() -> None:
    """In the first seconds all steps are read: the limit, six times what was seen, would frighten."""
    assert OwnCost(0.09, None).says_something
    assert not OwnCost(0.11, None).says_something
    assert OwnCost(0.3, 0.1).says_something
