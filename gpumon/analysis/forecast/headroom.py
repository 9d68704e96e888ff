"""What is left above a forecast before an allocation fails, how many steps that lasts, and how likely it is too little.

Model. Headroom = what the process can have (reserved + free, by the driver; no more than a fraction that the user set)
− the next peak − what the allocator will hold reserved then and cannot use. That last figure (the agent's
Fragments) is at most reserved − allocated at a peak, for it fitted into that, and it is that very figure once the
allocator had to give its cache back; with expandable segments it is nothing. Steps to OOM: what may still be kept, over
what is kept of a step and what other processes take meanwhile. What may be kept is known from what was, each time the
allocator took a segment (Taken); before it did so often enough, headroom stands for it.
Known limitations. Which blocks lie free together is known only where the segments were read: a request that is larger
than each of them fails earlier. Growth of one tensor by less than a segment's rounding costs nothing at first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from gpumon.analysis.robust import theil_sen

SHRINKS_Z = 4.0
"""Kendall's S, in standard deviations: a room that shrinks less surely than this stands."""

SHRINKS_LEAST = 1 << 20
"""bytes a second"""

SEGMENTS, SEGMENTS_LEAST = 32, 3
"""How many of the newest growths of what is reserved count, and from how many on they tell."""

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

    Each time it does, the last step left some bytes standing, below what was reserved by so much: activations and what
    lies between them did not fit into that. As memory ends it is once more so, with all segments there is room for.
    """

    def __init__(self) -> None:
        self._reserved = 0
        self._standing = 0
        self._step = -1
        self._grown: deque[tuple[int, int]] = deque(maxlen=SEGMENTS)  # by how much, and that difference

    def observe(self, step: int, reserved: int, standing: int) -> None:
        """`standing`: allocated at the step's end."""
        if reserved > self._reserved and self._step == step - 1 >= SETTLES:  # else what stood before was not read
            self._grown.append((reserved - self._reserved, self._reserved - self._standing))
        self._reserved, self._standing, self._step = reserved, standing, step

    def last_standing(self, available: int) -> int | None:
        """What will stand as an allocation fails; None where the reserved did not grow often enough to tell."""
        large = [each for each in self._grown if each[0] > SMALL_SEGMENT]
        each = large if len(large) >= SEGMENTS_LEAST else self._grown
        if len(each) < SEGMENTS_LEAST:
            return None
        grown = sorted([by for by, _ in each])
        usual = grown[len(grown) // 2]
        left = max(0, available - self._reserved)
        alike = 4 * (grown[-2] - grown[1]) <= usual
        rest = left % usual if alike else min(left, usual // 2)  # of any size: half of one, in the mean
        return available - rest - sum([below for _, below in each]) // len(each)


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
