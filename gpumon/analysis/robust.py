"""Small robust statistics in plain Python: medians, a trend with its significance, a probability of exceedance.

No numpy: the viewer does not require it, and every series here has at most a few hundred values.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

NORMAL_95 = 1.96  # standard deviations to each side that hold 95 % of a normal distribution


def median(values: Sequence[int | float]) -> float:
    """The middle value; of an even number, the mean of the two."""
    return _middle(sorted(values))


def _middle(ordered: Sequence[int | float]) -> float:
    half = len(ordered) // 2
    return float(ordered[half]) if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class Trend(msgspec.Struct, frozen=True):
    """A slope per unit of x with its 95 % interval, and how many standard deviations Kendall's S is from no trend."""

    slope: float
    z: float
    low: float = 0.0
    high: float = 0.0


def theil_sen(points: Sequence[tuple[float, float]], *, at_most: int = 32) -> Trend | None:
    """Median of all pairwise slopes, with Kendall's test. None below three points.

    Source: Theil (1950), Sen (1968), the interval too: the ranks (N ± 1.96 σ(S)) / 2 of the N slopes; variance of S
    without ties: n(n−1)(2n+5)/18. Breaks down at 29 % outliers.
    Cost: O(m²), m = `at_most`; more points are thinned evenly, first and last kept.
    """
    count = len(points)
    if count < 3:
        return None
    if count > at_most:
        points = thinned(points, at_most)
        count = at_most
    slopes = sorted([(y2 - y) / (x2 - x) for i, (x, y) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 != x])
    if not slopes:
        return None
    concordance = len(slopes) - bisect_right(slopes, 0.0) - bisect_left(slopes, 0.0)
    deviation = _deviation(count)
    at = max(0, int((len(slopes) - NORMAL_95 * deviation) / 2))
    return Trend(median(slopes), concordance / deviation, slopes[at], slopes[-1 - at])


def _deviation(count: int) -> float:
    """Standard deviation of Kendall's S without a trend."""
    return math.sqrt(count * (count - 1) * (2 * count + 5) / 18)


def thinned(series: Sequence[Any], at_most: int = 32) -> list[Any]:
    """At most `at_most` points, evenly spaced, first and last kept."""
    count = len(series)
    if count <= at_most:
        return list(series)
    return [series[at] for at in _places(count, at_most)]


@lru_cache(maxsize=128)
def _places(count: int, at_most: int) -> tuple[int, ...]:
    return tuple([round(i * (count - 1) / (at_most - 1)) for i in range(at_most)])


class Line(msgspec.Struct, frozen=True):
    """y = intercept + slope · x."""

    intercept: float
    slope: float

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def resistant_line(points: Sequence[tuple[float, float]]) -> Line | None:
    """A line through the medians of the outer thirds of x. None below six points, or if the thirds do not differ in x.

    Source: Tukey, Exploratory Data Analysis (1977), the three-group resistant line without iteration.
    Cost: O(n log n). Breaks down when a sixth of the points, all in one outer third, are wild.
    """
    if len(points) < 6:
        return None
    ordered = sorted(points)
    third = len(ordered) // 3
    xs, ys = zip(*ordered, strict=True)
    x_left, x_right = _middle(xs[:third]), _middle(xs[-third:])
    if x_left == x_right:
        return None
    slope = (median(ys[-third:]) - median(ys[:third])) / (x_right - x_left)
    return Line(median([y - slope * x for x, y in ordered]), slope)


def exceedance(residuals: Sequence[float], threshold: float, scale: float) -> float:
    """Probability that the next residual is above `threshold`.

    Within the sample: the share of residuals above, as (k + ½)/(n + 1). Beyond the largest residual: 1/(2(n+1)),
    falling exponentially by a factor e per `scale`.
    """
    count = len(residuals)
    ordered = sorted(residuals)
    above = count - bisect_left(ordered, threshold)
    if above:
        return (above + 0.5) / (count + 1)
    largest = max(0.0, ordered[-1]) if ordered else 0.0
    return 0.5 / (count + 1) * math.exp(-max(0.0, threshold - largest) / max(scale, 1.0))
