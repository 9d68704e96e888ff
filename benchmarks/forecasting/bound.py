"""Steps to OOM of a random leak: what somebody would say who was told where memory ends, and what anybody can reach.

A leak of random amounts is foreseen no better than its rate is known from the steps seen, and than what is still to
come sums up to. Both are in what `told` says: it knows since which step the script leaks and takes the mean of all
steps since, the best unbiased estimate of a rate from independent amounts; and it is told how many bytes will stand as
an allocation fails, which nobody can know then: batches to come and where the allocator puts them decide it.

`chances` needs no estimator. Amounts of a mean m and a standard deviation s, n of them seen and k to come, sum up to
what is left with a relative variance of (s / m)² · (1/n + 1/k), by the central limit theorem; where memory ends adds
(e / (m k))², with e its standard deviation over runs of one job that differ by their seeds. The chance that a normal
variable of that variance stays within 10 % is the share of steps that the best possible estimator gets right: one that
knows the law of the amounts and the mean end, and lacks only what has not been drawn yet. Used by page.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import NormalDist, fmean, stdev

from forecasting.backtest import Backtest

NEAR = 0.1
_NORMAL = NormalDist()


def told(score: Backtest, since: int) -> list[float]:
    """Errors as Backtest.steps_to_oom_errors has them, at the same steps."""
    said_at = {step for step, _ in score.to_oom}
    last, ends_at = score.standing[-1]
    rest = (score.oom_step or last) - last
    first = next(((step, kept) for step, kept in score.standing if step >= since), None)
    if first is None:
        return []
    said = [
        (step, max(0.0, (ends_at - kept) * (step - first[0]) / (kept - first[1]) + rest))
        for step, kept in score.standing
        if step in said_at and kept > first[1]
    ]
    return score.steps_to_oom_errors(said)


def chances(score: Backtest, since: int, ends_apart: float) -> list[float]:
    """Of each of the same steps, how likely the best possible estimator is within 10 %.

    `ends_apart`: standard deviation of the bytes that stand as memory ends.
    """
    end = score.oom_step
    kept = [(step, bytes_) for step, bytes_ in score.standing if step >= since]
    amounts = [(y - x) / (to - at) for (at, x), (to, y) in pairwise(kept)]
    if end is None or len(amounts) < 2:
        return []
    mean = fmean(amounts)
    varies = (stdev(amounts) / mean) ** 2
    found = []
    for step, _ in score.to_oom:
        left, seen = end - step, step - since
        if 4 * step >= end and left >= 10 and seen > 0:
            variance = varies * (1 / seen + 1 / left) + (ends_apart / (mean * left)) ** 2
            found.append(2 * _NORMAL.cdf(NEAR / math.sqrt(variance)) - 1 if variance else 1.0)
    return found


def within(errors: Sequence[float]) -> float | None:
    """The share of them that is 10 % or less."""
    return sum(error <= NEAR for error in errors) / len(errors) if errors else None
