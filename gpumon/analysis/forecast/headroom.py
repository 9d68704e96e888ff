"""What is left above a forecast before an allocation fails, how many steps that lasts, and how likely it is too little.

Model. Headroom = what the process can have (reserved + free, by the driver; no more than a fraction that the user set)
− the next peak − what the allocator will hold reserved then and cannot use. That last figure (the agent's
Fragments) is at most reserved − allocated at a peak, for it fitted into that, and it is that very figure once the
allocator had to give its cache back; with expandable segments it is nothing. Steps to OOM: what may still be kept, over
what is kept of a step and what other processes take meanwhile. What may be kept is known from what was, each time the
allocator took a segment (Taken); before it did so often enough, and once more stands than that, headroom tells.
Known limitations. Which blocks lie free together is known only where the segments were read: a request that is larger
than each of them fails earlier. Growth of one tensor by less than a segment's rounding costs nothing at first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from gpumon.analysis.robust import theil_sen

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
        if len(readings) < 8 or readings[0][1] == available:
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


def steps_until(headroom: int | None, rate: float | None, residuals: Collection[float] = ()) -> int | None:
    """Steps after which an allocation will have failed as likely as not; None without a trend upwards.

    `residuals`: by how much peaks differed from their forecast. Where batches differ, a large one meets the end before
    the usual one does: each step ahead fails with the share of residuals that its headroom does not cover.
    """
    if headroom is None or rate is None or rate <= 0:
        return None
    if headroom < 0:
        return 0
    usual = headroom / rate
    ordered = sorted(residuals)
    largest = min(ordered[-1], float(headroom)) if ordered else 0.0
    if largest < rate:
        return math.floor(usual) + 1
    width = largest / rate / CHUNKS
    survives = 1.0
    for chunk in range(CHUNKS):
        left = largest * (1 - (chunk + 0.5) / CHUNKS)
        fails = (len(ordered) - bisect_left(ordered, left)) / (len(ordered) + 1)
        survives *= (1 - fails) ** width
        if survives <= 0.5:
            return math.floor(usual - left / rate) + 1
    return math.floor(usual) + 1
