"""Headroom above a forecast peak in bytes, the steps until out-of-memory, and the probability of running out.

Model. Headroom = available bytes (reserved + free by the driver, at most the user's memory fraction) − next peak −
reserved bytes that the allocator cannot use then. The last term (the agent's Fragments) is at most reserved − allocated
at a peak, equals it once the allocator had to release its cache, and is 0 with expandable segments. Steps to OOM: the
bytes that may still be retained, divided by the growth per step (gpumon.analysis.growth) plus what other processes take
per step. The numerator is learned from past segment allocations (Taken). With too few of them, or once usage exceeds
that estimate, headroom is used instead.
Known limitations. Sizes of free blocks are known only if segments were read: a request larger than all of them fails
earlier. Growth of one tensor within a segment's rounding costs nothing at first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from itertools import pairwise

import msgspec

from gpumon.analysis.estimate.simulator import SMALL_SEGMENT
from gpumon.analysis.robust import NORMAL_95, theil_sen
from gpumon.analysis.types import Growth

SHRINKS_Z = 4.0
"""Kendall's S in standard deviations; below it the available bytes count as constant."""

SHRINKS_LEAST = 1 << 20
"""bytes per second"""

SEGMENTS, SEGMENTS_LEAST = 32, 3
"""How many growths of `reserved` count, the newest and a sample of all; and the fewest."""

WIDENS_Z = 4.0
"""Kendall's S in standard deviations; below it fragmentation counts as constant."""

WITHIN = (0.125, 0.375, 0.625, 0.875)  # positions sampled within one growth

ALIKE_LEAST, ALIKE_APART = 5, 8
"""Segments of one size, and the fraction (1/8) of that size within which their gaps must agree."""

SETTLES = 8  # growths up to this step are ignored: the cache is filling

LEAST_POINTS = 8
"""Points of a growth needed for the variance of its steps."""

READINGS = 64


class Room(msgspec.Struct, frozen=True):
    """The process's available bytes on its device: reserved + free at one moment, by allocator and driver."""

    available: int
    stranded: int = 0
    shrinks_per_step: float = 0.0  # bytes that other processes take

    def above(self, peak: int) -> int:
        """Bytes left above a peak; negative: missing."""
        left = self.available - peak
        return left - min(self.stranded, max(0, left))


class Others:
    """Follows the available bytes as other processes allocate and free."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, float]] = deque(maxlen=READINGS)
        self._slope = 0.0

    def read(self, t_s: float, available: int) -> None:
        readings = self._readings
        if readings and t_s <= readings[-1][0]:
            return
        readings.append((t_s, float(available)))
        if readings[0][1] == available:
            self._slope = 0.0
            return
        trend = theil_sen(list(readings))
        self._slope = trend.slope if trend is not None and trend.z <= -SHRINKS_Z else 0.0

    def per_step(self, steps_per_s: float | None) -> float:
        """Bytes that others take per step; 0 without a clear trend."""
        if not steps_per_s or self._slope > -SHRINKS_LEAST:
            return 0.0
        return -self._slope / steps_per_s


class Taken:
    """Learns from segment allocations how many bytes can be retained before one fails.

    Why: in five runs that end by a leak (benchmarks/forecast.py), steps to OOM are within 10 % at 90 % of the steps;
    with headroom alone at 75 %.

    Before each growth of `reserved`, the last step ended with some bytes retained, and the next one needed more than
    `reserved`. A device with any capacity between the old and the new `reserved` would have failed there. So each
    capacity in that range gives one sample of the gap between capacity and retained bytes: activations, batches,
    fragments. The real device is one more such case. If all segments are alike, the position of its capacity within a
    segment is known too.
    """

    def __init__(self) -> None:
        self._highest = 0  # reserved, ever
        self._standing = self._reserved = 0
        self._step = -1
        self._grown: deque[tuple[int, int, int]] = deque(maxlen=SEGMENTS)  # reserved before and after, bytes retained
        self._far: list[tuple[float, float]] = []  # (reserved, gap) over the whole run, thinned
        self._seen = 0
        self._stride = 1
        self._gaps: list[tuple[float, float]] | None = None  # (gap, weight in bytes), sorted
        self._widens = 0.0  # growth of the gap per byte reserved

    def observe(self, step: int, reserved: int, standing: int) -> None:
        """`standing`: allocated at the step's end."""
        if reserved > self._highest:
            if self._step == step - 1 >= SETTLES:  # otherwise the bytes retained before are unknown
                self._grow(self._highest, reserved, self._standing)
            self._highest = reserved
        self._standing, self._step, self._reserved = standing, step, reserved

    def _grow(self, before: int, after: int, standing: int) -> None:
        self._grown.append((before, after, standing))
        self._gaps = None
        self._seen += 1
        if self._seen % self._stride == 0:
            self._far.append((float(before), float(before - standing)))
            if len(self._far) == SEGMENTS:
                del self._far[::2]
                self._stride *= 2

    def last_standing(self, available: int) -> tuple[float, float] | None:
        """The bytes retained when an allocation will fail (median), and their spread.

        None with too few growths of `reserved`; also if more is retained already after the allocator released its
        cache, since the memory that was idle at earlier growths no longer is.
        """
        if len(self._grown) < SEGMENTS_LEAST:
            return None
        end = self._end(available)
        return None if self._reserved < self._highest and end[0] <= self._standing else end

    def _end(self, available: int) -> tuple[float, float]:
        alike = self._alike()
        if alike is not None:
            size, below, apart = alike
            return available - max(0, available - self._highest) % size - below, apart
        gaps = self._gaps = self._gaps or self._level()
        low, middle, high = (_quantile(gaps, share) for share in (0.16, 0.5, 0.84))
        return available - middle - self._widens * available, (high - low) / 2

    def _level(self) -> list[tuple[float, float]]:
        """The gaps between capacity and retained bytes, minus the trend of fragmentation."""
        trend = theil_sen(self._far)
        self._widens = trend.low if trend is not None and trend.z >= WIDENS_Z else 0.0
        return sorted(
            (end - stood - self._widens * end, (after - before) / len(WITHIN))
            for before, after, stood in self._grown
            for end in [before + (after - before) * share for share in WITHIN]
        )

    def _alike(self) -> tuple[int, float, float] | None:
        """Segment size, gap between reserved and retained, and its spread; None if segments differ."""
        # a segment of the small pool is never shared with tensors above 1 MiB
        large = [each for each in self._grown if each[1] - each[0] > SMALL_SEGMENT]
        if len(large) < ALIKE_LEAST:
            return None
        sizes = sorted([after - before for before, after, _ in large])
        below = sorted([before - stood for before, _, stood in large])
        if sizes[1] != sizes[-2] or ALIKE_APART * (below[-2] - below[1]) > sizes[1]:
            return None
        return sizes[1], below[len(below) // 2], (below[-2] - below[1]) / 2


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """A quantile of (value, weight) pairs sorted by value."""
    left = share * sum([weight for _, weight in weighted])
    for value, weight in weighted:
        left -= weight
        if left <= 0:
            return value
    return weighted[-1][0]


def steps_to_full(
    headroom: int,
    growth: Growth | None,
    differ: Collection[float] = (),
    shrinks: float = 0.0,
    end: tuple[float, float] | None = None,
) -> tuple[int, int, int | None] | None:
    """Steps until memory is full at this rate, and the 95 % interval; upper end None: possibly never.

    `differ`: recent batches' needs minus the usual one's; `shrinks`: bytes per step that others take; `end`: bytes that
    may still be retained before an allocation fails, and their spread (Taken), if known.
    """
    pace, varies, seen = _amounts(growth) if growth is not None else (0.0, 0.0, None)
    pace += shrinks
    if pace <= 0:
        return None
    if end is None or headroom < 0:
        steps, ends_apart = steps_until(headroom, pace, differ), _spread(differ)
    else:
        steps, ends_apart = max(1, round(end[0] / pace) + 1), end[1]
    if steps is None or steps == 0:
        return (0, 0, 0) if steps == 0 else None
    if seen is None and growth is not None:  # Sen's interval of the slope
        low, high = shrinks + (growth.low or 0.0), max(pace, shrinks + (growth.high or 0.0))
        most = math.ceil(steps * pace / low) + 1 if low > 0 else None
        return steps, max(0, math.floor(steps * pace / high) - 1), most
    # a sum of random amounts: after n observed ones, k more have the variance of one times k + k² / n
    apart = NORMAL_95 * math.sqrt(varies * (steps + steps * steps / (seen or 1)) + ends_apart**2) / pace
    return steps, max(0, math.floor(steps - apart) - 1), math.ceil(steps + apart) + 1


def _amounts(growth: Growth) -> tuple[float, float, int | None]:
    """Mean and variance of the bytes retained per step, and the number of steps; None: too few points for these."""
    points = [point for point in growth.points if growth.since is None or point[0] >= growth.since]
    if len(points) < LEAST_POINTS:
        return growth.per_step or 0.0, 0.0, None
    (x1, y1), (x2, y2) = points[0], points[-1]
    mean = (y2 - y1) / (x2 - x1)  # for a sum of random amounts, the points between add no information
    steps = [(right[0] - left[0], right[1] - left[1]) for left, right in pairwise(points)]
    return mean, sum([(kept - mean * apart) ** 2 / apart for apart, kept in steps]) / len(steps), x2 - x1


def _spread(differ: Collection[float]) -> float:
    """One standard deviation, from quantiles."""
    ordered = sorted(differ) or [0.0]
    last = len(ordered) - 1
    return (ordered[int(0.84 * last)] - ordered[int(0.16 * last)]) / 2


def steps_until(headroom: int, pace: float, differ: Collection[float] = ()) -> int | None:
    """Steps until an allocation fails with probability ½; None without growth.

    `differ`: by how much batches need more than the usual one. A large batch fails before the usual one: each step
    ahead fails with the share of batches that its headroom does not cover.
    """
    if pace <= 0:
        return None
    if headroom < 0:
        return 0
    usual = headroom / pace
    ordered = sorted(differ)
    largest = min(ordered[-1], float(headroom)) if ordered else 0.0
    if largest < pace:
        return math.floor(usual) + 1
    survives, left = 1.0, largest  # left: headroom from which on `too_large` batches fail
    for too_large in range(1, len(ordered) + 1):
        until = max(0.0, ordered[-1 - too_large]) if too_large < len(ordered) else 0.0
        if until >= left:
            continue
        each = math.log(1 - too_large / (len(ordered) + 1))
        if survives * math.exp(each * (left - until) / pace) <= 0.5:
            return math.floor(usual - left / pace + math.log(0.5 / survives) / each) + 1
        survives, left = survives * math.exp(each * (left - until) / pace), until
    return math.floor(usual) + 1
