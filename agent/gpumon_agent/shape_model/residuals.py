"""The interval around a prediction, from the errors of earlier ones, with the coverage it states.

Model. The sorts of predictions (batches known, new, larger than any) have residuals of different size,
so each sort has its own conformal interval, from its newest residuals.
Source. Conformal prediction by category (Vovk, Gammerman, Shafer, "Algorithmic Learning in a Random World", 2005,
section 4.5).
Cost. A few list operations a residual. Memory: `RESIDUALS_MAX` of a sort.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence

RESIDUALS_MAX = 200
FIRST_WIDTH = 0.10  # share of the peak to each side, before a sort has residuals
LEAST_WIDTH = 0.0005  # rounding of single blocks
RARE = 0.01  # where predictions are mostly exact, a larger error is an event and does not widen them
COVERAGE = 0.96  # target level, so that 95 % holds on short runs too


class Residuals:
    """Relative errors of the predictions of one sort, and the interval they give."""

    __slots__ = ("_newest", "_ordered", "above", "below", "prior", "seen")

    def __init__(self) -> None:
        self.forget()

    def forget(self, width: float = FIRST_WIDTH) -> None:
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []
        self.prior = width
        self.seen = 0
        self.below, self.above = -width, width

    def learn(self, residual: float) -> None:
        self.seen += 1
        if len(self._newest) == RESIDUALS_MAX:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(residual)
        insort(self._ordered, residual)
        self._settle()

    def _settle(self) -> None:
        ordered = self._ordered
        below, above = _bounds(ordered)
        exact, off = bisect_left(ordered, 0.0), bisect_right(ordered, 0.0)
        if 2 * (off - exact) > len(ordered) > off - exact:
            # mostly exact: any interval covers those, so make it cover the others too
            few = [each for each in (*ordered[:exact], *ordered[off:]) if -RARE <= each <= RARE]
            if few:
                low, high = _bounds(few)
                below, above = min(below, low), max(above, high)
        extra = self.prior / (self.seen + 1) ** 2
        least = LEAST_WIDTH + (extra if extra > 1e-4 else 0.0)
        self.below, self.above = min(-least, below), max(least, above)

    def is_far(self, residual: float) -> bool:
        """Outside by more than the interval's own width."""
        reach = self.above - self.below
        return residual > self.above + reach or residual < self.below - reach


def _bounds(ordered: Sequence[float]) -> tuple[float, float]:
    count, tail = len(ordered), (1 - COVERAGE) / 2
    reach = (ordered[-1] - ordered[0]) * 3 / (count + 1)
    low, high = math.floor((count + 1) * tail), math.ceil((count + 1) * (1 - tail))
    return (
        ordered[low - 1] if low >= 1 else ordered[0] - reach,
        ordered[high - 1] if high <= count else ordered[-1] + reach,
    )
