"""When a viewer hurries to tell an agent its memory budget."""

from __future__ import annotations

from synthetic import Run, frame_of

from gpumon.cli.budget_sender import BudgetSender

SECOND = 1_000_000_000


def test_the_driver_is_read_faster_for_the_first_twenty_seconds_of_a_rank_alone() -> None:
    budgets = BudgetSender()
    frame = frame_of(Run(), 1)
    budgets.seen(frame)
    assert budgets.wanted(frame.unix_ns + 19 * SECOND)
    assert not budgets.wanted(frame.unix_ns + 20 * SECOND)
