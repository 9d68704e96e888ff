"""Finds batches whose size makes the peak.

Model. Input bytes of the root's forward and the peak of the same step, over the newest `WINDOW` steps. A batch is an
outlier if it has `SIZE_FACTOR` times the 95 % quantile of the sizes, and its step `PEAK_FACTOR` times that of the
peaks. Cutting it to a quantile is assumed to lower its peak to the highest one within the quantile.
Cost. A comparison per step; the window is sorted every `SORT_EVERY` steps, and for each candidate.
Known limitations. Sizes are bytes: batches with equal bytes and different lengths are not distinguished.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from gpumon.analysis.growth import SETTLING_STEPS
from gpumon.analysis.history import StepPeaks

WINDOW = 512
LEAST_STEPS = 10
SORT_EVERY = 32
SIZE_FACTOR = 1.5
PEAK_FACTOR = 1.25
CUTS = (0.99, 0.95, 0.90)


@dataclass(frozen=True, slots=True)
class Outlier:
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
        self._known: deque[tuple[int, int]] = deque(maxlen=WINDOW)  # bytes, peak
        self._seen = 0
        self._alike = 0  # batches in a row of the newest one's size
        self._large = 0.0  # bytes from which a batch may stand out

    def observe(self, step: StepPeaks) -> None:
        size = step.input_bytes
        if not size or step.step < SETTLING_STEPS:
            return
        known = self._known
        self._alike = self._alike + 1 if known and known[-1][0] == size else 0
        if len(known) >= LEAST_STEPS:
            if self._seen % SORT_EVERY == 0 or len(known) == LEAST_STEPS:
                usual = size if self._alike >= len(known) else _at(sorted([each for each, _ in known]), 0.95)
                self._large = SIZE_FACTOR * usual
            if size >= self._large:
                self._judge(step, size)
        known.append((size, step.peak))
        self._seen += 1

    def _judge(self, step: StepPeaks, size: int) -> None:
        sizes = sorted([each for each, _ in self._known])
        if size < SIZE_FACTOR * _at(sizes, 0.95):
            return
        if step.peak < PEAK_FACTOR * _at(sorted([peak for _, peak in self._known]), 0.95):
            return
        for cut in CUTS:
            limit = _at(sizes, cut)
            if SIZE_FACTOR * limit <= size:
                break
        within = max(peak for each, peak in self._known if each <= limit)
        smaller = sum(each < size for each in sizes) / (len(sizes) + 1)
        usual = _at(sizes, 0.5)
        self.outlier = Outlier(step.step, step.input_shapes, size / usual, smaller, step.peak, cut, within)


def _at(ordered: list[int], quantile: float) -> int:
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
