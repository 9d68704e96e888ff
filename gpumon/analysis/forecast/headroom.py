"""Headroom above a forecast peak in bytes, the steps until out-of-memory, and the probability of running out.

Model. Headroom = what the process can have (reserved + free, by the driver; no more than a fraction that the user set)
− the next peak − what the allocator will hold reserved then and cannot use. That last figure (the agent's
Fragments) is at most reserved − allocated at a peak, for it fitted into that, and it is that very figure once the
allocator had to give its cache back; with expandable segments it is nothing. Steps to OOM:
the bytes that may still be retained, divided by the growth per step (gpumon.analysis.growth) plus what other processes
take per step. The numerator is learned from past segment allocations (Taken). With too few of them, or once usage
exceeds that estimate, headroom is used instead.
Known limitations. Which blocks lie free together is known only where the segments were read: a request that is larger
than each of them fails earlier. Growth of one tensor by less than a segment's rounding costs nothing at first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from gpumon.analysis.robust import NORMAL_95, theil_sen
from gpumon.analysis.types import Growth

SHRINKS_Z = 4.0
"""Kendall's S, in standard deviations: a room that shrinks less surely than this stands."""

SHRINKS_LEAST = 1 << 20
"""bytes a second"""

SEGMENTS, SEGMENTS_LEAST = 32, 3
"""How many of the newest growths of what is reserved count, and from how many on they tell."""

FAR_SEGMENTS = 32
"""So many of all growths tell whether fragments get more."""

WIDENS_Z = 4.0
"""Kendall's S, in standard deviations: fragments that get more less surely than this are taken to stay as they are."""

WITHIN = (0.125, 0.375, 0.625, 0.875)  # places in a growth that stand for all ends in it

ALIKE_LEAST, ALIKE_APART = 5, 8
"""So many segments of one size, each taken with what stood at the same height below, but for an eighth of that size."""

SETTLES = 8  # steps before which it grows for other reasons: the cache fills

SMALL_SEGMENT = 2 << 20
"""bytes; the allocator's for tensors below 1 MiB: they share none with larger ones"""

LEAST_POINTS = 8
"""Of a growth, from which on its amounts tell how surely its end is known."""

READINGS = 64
CHUNKS = 24  # into which the steps are cut between which a large batch and the usual one meet the end


@dataclass(frozen=True, slots=True)
class Room:
    """What the process can have on its device: reserved and free at one moment, by allocator and driver."""

    available: int
    stranded: int = 0
    shrinks_per_step: float = 0.0  # taken by other processes

    def above(self, peak: int) -> int:
        """Bytes left above a peak; below 0, missing."""
        left = self.available - peak
        return left - min(self.stranded, max(0, left))


class Others:
    """Follows what the process can have as others come and go."""

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
        """Bytes that others take a step; 0 where that is no trend."""
        if not steps_per_s or self._slope > -SHRINKS_LEAST:
            return 0.0
        return -self._slope / steps_per_s


class Taken:
    """Follows how the allocator takes memory from the device: in segments, each when what it holds does not do.

    Why it is here: of five runs that a leak ends (benchmarks/forecast.py), the steps to OOM are within 10 % at 90 % of
    the steps; at 75 % where headroom alone is asked.

    Each time it does, the last step left so many bytes standing, and what came then needed more than was reserved: a
    device that ended anywhere between the reserved before and after would have ended there. So each such growth tells,
    for each end that lies in it, how far below that end what stood then lay: activations, batches, fragments. The
    device's own end is one more of these. Where all segments are alike, it is known into which of them it falls.
    """

    def __init__(self) -> None:
        self._highest = 0  # reserved, ever
        self._standing = self._reserved = 0
        self._step = -1
        self._grown: deque[tuple[int, int, int]] = deque(maxlen=SEGMENTS)  # reserved before and after, what stood
        self._far: list[tuple[float, float]] = []  # reserved and how far below, over the whole run, ever further apart
        self._seen = 0
        self._stride = 1
        self._gaps: list[tuple[float, float]] | None = None  # how far below, and how many bytes of ends; by size
        self._widens = 0.0  # bytes a byte reserved

    def observe(self, step: int, reserved: int, standing: int) -> None:
        """`standing`: allocated at the step's end."""
        if reserved > self._highest:
            if self._step == step - 1 >= SETTLES:  # else what stood before was not read
                self._grow(self._highest, reserved, self._standing)
            self._highest = reserved
        self._standing, self._step, self._reserved = standing, step, reserved

    def _grow(self, before: int, after: int, standing: int) -> None:
        self._grown.append((before, after, standing))
        self._gaps = None
        self._seen += 1
        if self._seen % self._stride == 0:
            self._far.append((float(before), float(before - standing)))
            if len(self._far) == FAR_SEGMENTS:
                del self._far[::2]
                self._stride *= 2

    def last_standing(self, available: int) -> tuple[float, float] | None:
        """What will stand as an allocation fails, as likely more as less, and by how much that differs each time.

        None where the reserved did not grow often enough to tell; and where more than that stands already, after the
        allocator gave its cache back: what lay idle when it had to grow does so no more.
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
        """How far below each end what stood lay, less by what fragments had come to with it by then."""
        trend = theil_sen(self._far)
        self._widens = trend.low if trend is not None and trend.z >= WIDENS_Z else 0.0
        return sorted(
            (end - stood - self._widens * end, (after - before) / len(WITHIN))
            for before, after, stood in self._grown
            for end in [before + (after - before) * share for share in WITHIN]
        )

    def _alike(self) -> tuple[int, float, float] | None:
        """The size of a segment, how far below the reserved it is taken, and how that differs; None: they differ."""
        large = [each for each in self._grown if each[1] - each[0] > SMALL_SEGMENT]
        if len(large) < ALIKE_LEAST:
            return None
        sizes = sorted([after - before for before, after, _ in large])
        below = sorted([before - stood for before, _, stood in large])
        if sizes[1] != sizes[-2] or ALIKE_APART * (below[-2] - below[1]) > sizes[1]:
            return None
        return sizes[1], below[len(below) // 2], (below[-2] - below[1]) / 2


def _quantile(weighted: Sequence[tuple[float, float]], share: float) -> float:
    """Of values with weights, by size."""
    left = share * sum([weight for _, weight in weighted])
    for value, weight in weighted:
        left -= weight
        if left <= 0:
            return value
    return weighted[-1][0]


def room_over_growth(
    headroom: int,
    growth: Growth | None,
    differ: Collection[float] = (),
    shrinks: float = 0.0,
    end: tuple[float, float] | None = None,
) -> tuple[int, int, int | None] | None:
    """Steps until memory is full at this pace, and the 95 % interval; None for the most: it may never come to that.

    `differ`: by how much recent batches need more than the usual one; `shrinks`: bytes a step that others take; `end`:
    what may still be kept before an allocation fails, and by how much that differs (Taken), where that is known.
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
    # what is kept is a sum of amounts: known from n of them, k more vary by their variance times k + k² / n
    apart = NORMAL_95 * math.sqrt(varies * (steps + steps * steps / (seen or 1)) + ends_apart**2) / pace
    return steps, max(0, math.floor(steps - apart) - 1), math.ceil(steps + apart) + 1


def _amounts(growth: Growth) -> tuple[float, float, int | None]:
    """What a step keeps: its mean and variance, and of how many steps; None: too few points tell the variance."""
    points = [point for point in growth.points if growth.since is None or point[0] >= growth.since]
    if len(points) < LEAST_POINTS:
        return growth.per_step or 0.0, 0.0, None
    (x1, y1), (x2, y2) = points[0], points[-1]
    mean = (y2 - y1) / (x2 - x1)  # of a sum of random amounts the ends tell all that the points between do
    steps = [(right[0] - left[0], right[1] - left[1]) for left, right in pairwise(points)]
    return mean, sum([(kept - mean * apart) ** 2 / apart for apart, kept in steps]) / len(steps), x2 - x1


def _spread(differ: Collection[float]) -> float:
    """One standard deviation, by the quantiles."""
    ordered = sorted(differ) or [0.0]
    last = len(ordered) - 1
    return (ordered[int(0.84 * last)] - ordered[int(0.16 * last)]) / 2


def steps_until(headroom: int, pace: float, differ: Collection[float] = ()) -> int | None:
    """Steps after which an allocation will have failed as likely as not; None without a pace.

    `differ`: by how much batches need more than the usual one. A large batch meets the end before the usual one does:
    each step ahead fails with the share of batches that its headroom does not cover.
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
    width = largest / pace / CHUNKS
    survives = 1.0
    for chunk in range(CHUNKS):
        left = largest * (1 - (chunk + 0.5) / CHUNKS)
        fails = (len(ordered) - bisect_left(ordered, left)) / (len(ordered) + 1)
        survives *= (1 - fails) ** width
        if survives <= 0.5:
            return math.floor(usual - left / pace) + 1
    return math.floor(usual) + 1
