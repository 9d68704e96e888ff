"""Steps to OOM of a random leak: what somebody would say who was told beforehand where memory ends.

A leak of random amounts is foreseen no better than its rate is known from the steps seen, and than what is still to
come sums up to. Both are in what `told` says: it knows since which step the script leaks and takes the mean of all
steps since, the best unbiased estimate of a rate from independent amounts; and it is told how many bytes will stand as
an allocation fails, which nobody can know then: batches to come and where the allocator puts them decide it. Told by
the same job's other runs, it is what somebody knows who saw that job run out of memory before. Used by page.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumon.analysis.backtest import Backtest


def told(score: Backtest, since: int, ends_at: float | None = None) -> list[float]:
    """Errors as Backtest.steps_to_oom_errors has them, at the same steps. `ends_at`: bytes; None: what they were."""
    said_at = {step for step, _ in score.to_oom}
    (last, standing) = score.standing[-1]
    ends_at, rest = (standing, (score.oom_step or last) - last) if ends_at is None else (ends_at, 1)
    first = next(((step, kept) for step, kept in score.standing if step >= since), None)
    if first is None:
        return []
    said = [
        (step, max(0.0, (ends_at - kept) * (step - first[0]) / (kept - first[1]) + rest))
        for step, kept in score.standing
        if step in said_at and kept > first[1]
    ]
    return score.steps_to_oom_errors(said)


def within(errors: Sequence[float]) -> float | None:
    """The share of them that is 10 % or less."""
    return sum(error <= 0.1 for error in errors) / len(errors) if errors else None
