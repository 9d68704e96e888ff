"""Finds batches whose size makes the peak.

Model. Input bytes of the root's forward and the peak of the same step, over the newest `WINDOW` steps. A batch is an
outlier if it has `SIZE_FACTOR` times the `USUAL` quantile of the sizes, and its step `PEAK_FACTOR` times that of the
peaks. Cutting it to a quantile is assumed to lower its peak to the highest one within the quantile.
Cost. Each step is put into the sorted window; for a candidate the window's peaks are sorted too.
Known limitations. Sizes are bytes: batches with equal bytes and different lengths are not distinguished.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

import msgspec

from gpumon.analysis.growth import SETTLING_STEPS
from gpumon.analysis.history import StepPeaks

WINDOW = 512
LEAST_STEPS = 10
SIZE_FACTOR = 1.5
PEAK_FACTOR = 1.25
USUAL = 0.95
CUTS = (0.99, USUAL)


class Outlier(msgspec.Struct, frozen=True):
    """A batch that makes the peak."""

    step: int
    shapes: tuple[tuple[int, ...], ...]
    times_usual: float  # its bytes / those of the median batch
    quantile: float  # the share of the batches known that are smaller
    peak: int
    cut: float  # the quantile to cut to, which it exceeds clearly
    cut_peak: int  # the highest peak within that quantile

    @property
    def saved(self) -> int:
        return self.peak - self.cut_peak


class Batches:
    """Follows one device of one rank. `outlier` is the newest."""

    def __init__(self) -> None:
        self.outlier: Outlier | None = None
        self._known: deque[tuple[int, int]] = deque()  # bytes, peak
        self._sizes: list[int] = []  # of these, sorted

    def observe(self, step: StepPeaks) -> None:
        size = step.input_bytes
        if not size or step.step < SETTLING_STEPS:
            return
        known, sizes = self._known, self._sizes
        if len(known) >= LEAST_STEPS and size >= SIZE_FACTOR * _at(sizes, USUAL):
            self._judge(step, size)
        if len(known) == WINDOW:
            del sizes[bisect_left(sizes, known.popleft()[0])]
        known.append((size, step.peak))
        insort(sizes, size)

    def _judge(self, step: StepPeaks, size: int) -> None:
        sizes = self._sizes
        if step.peak < PEAK_FACTOR * _at(sorted([peak for _, peak in self._known]), USUAL):
            return
        cut = next(cut for cut in CUTS if SIZE_FACTOR * _at(sizes, cut) <= size)
        limit = _at(sizes, cut)
        within = max(peak for each, peak in self._known if each <= limit)
        smaller = sum(each < size for each in sizes) / (len(sizes) + 1)
        usual = _at(sizes, 0.5)
        self.outlier = Outlier(step.step, step.input_shapes, size / usual, smaller, step.peak, cut, within)


def _at(ordered: list[int], quantile: float) -> int:
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
