"""Detects growth from step to step, and rejects what settles, follows the batch, or comes and goes.

Model. A figure is sampled at every step's end (allocated at the end of the optimizer, live blocks, what the ledger
cannot name, slack; on the host, resident memory at each reading). Steps are grouped into parts at four scales; each
part is its median. A figure may be growing if, at some scale,

  - the newest `PARTS` parts rise, and the newest is above every part of the last `CEILING_STEPS` steps: a list
    emptied at the end of an epoch has been that high before;
  - the later parts rise at least `LATE_SHARE` as fast as the earlier ones: settling slows down;
  - Kendall's test over the window finds at least `Z` standard deviations, and Sen's 95 % interval of the slope lies
    above 0, after the part that follows the batch's bytes is removed with a resistant line;
  - if batches get longer, it grows by more than the square of their growth;
  - the window's growth is at least `Law.least`, and at most half of it belongs to owners that the ledger names.

Growth has ended if two parts in a row, at the scale of detection, are no higher than the ones before; if three parts
rise at less than `SLOWED_SHARE` of the detected rate; or if less than `KEPT_SHARE` of the growth is left. `since` is
where the line through the newest level, with the detected slope, meets the level before.

Sources. Mann (1945), Kendall (1975); Theil (1950), Sen (1968); see gpumon.analysis.robust.
Cost. A few list operations per step and figure; a median of at most `scales[-1]` values when a part closes. The test
runs only after `PARTS` rising parts, and during growth every `REFIT_PARTS` of the shortest parts. Memory is constant:
at most 2 × `WINDOW` values per figure, and `POINTS` for a plot.

Known limitations. A buffer that fills for longer than a window looks like a leak until it is full (its holder may show
the difference). A leak slower than the noise over the longest window that adds no block is not detected; one beside
batches that get longer is detected when they stop. Pages of a mapped file that is read for the first time count as
resident memory of the reading process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gpumon.analysis.robust import Trend, median, resistant_line, theil_sen
from gpumon.analysis.types import Growth

PARTS = 6
Z = 4.5
Z_OF_BATCHES = 3.0
LATE_SHARE = 0.6
CEILING_STEPS = 1_000
WINDOW = 240
POINTS = 120
REFIT_PARTS = 8
KEPT_SHARE = 0.5
SLOWED_SHARE = 0.2
SETTLING_STEPS = 2  # the first of a run, which create gradients, optimizer state and workspaces


class Law(msgspec.Struct, frozen=True):
    least: int = 0  # minimum growth over the window, in the figure's unit
    scales: tuple[int, ...] = (5, 10, 20, 40)  # steps (or readings) a part; each divides the next


BYTES = Law(least=4 << 10)
BLOCKS = Law()
SLACK = Law(least=32 << 20)
RESIDENT = Law(least=24 << 20, scales=(3, 6, 12, 24))
WORKER = Law(least=48 << 20, scales=(3, 6, 12, 24))
"""For DataLoader workers: four of them, decoding images in batches of 64, fluctuated by ±30 MiB."""


class _Scale:
    """The newest parts at one scale."""

    __slots__ = ("ceiling", "ceiling_at", "idle", "medians", "middles", "rises", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self.medians: list[float] = []  # of the newest PARTS + 1
        self.middles: list[int] = []  # the step in the middle of each of these
        self.rises = 0  # in a row
        self.idle = 0  # parts in a row that did not rise
        self.ceiling: float | None = None  # the highest part before the present run of rises
        self.ceiling_at = 0

    def close(self, value: float, middle: int, step: int) -> bool:
        """Adds a part's median, middle and last step. Returns whether the newest parts may be growth."""
        medians = self.medians
        if medians and value > medians[-1]:
            self.rises += 1
            self.idle = 0
        elif medians:
            before = medians[-1]
            if self.ceiling is None or before >= self.ceiling or step - self.ceiling_at > CEILING_STEPS:
                self.ceiling, self.ceiling_at = before, step
            self.rises = 0
            self.idle += 1
        medians.append(value)
        self.middles.append(middle)
        del medians[: -PARTS - 1], self.middles[: -PARTS - 1]
        if self.rises < PARTS - 1:
            return False
        if self.ceiling is not None and value <= self.ceiling and step - self.ceiling_at <= CEILING_STEPS:
            return False
        return self.rate(-3, -1) >= LATE_SHARE * self.rate(-PARTS, -PARTS + 2)

    def rate(self, first: int, last: int) -> float:
        """The rise per step from one of the newest parts to another. Old steps may be thinned."""
        return (self.medians[last] - self.medians[first]) / self.span(first, last)

    def span(self, first: int, last: int) -> int:
        return max(1, self.middles[last] - self.middles[first])  # the host may be read several times in a step


class _Found(msgspec.Struct):
    scale: _Scale
    since: int
    base: float
    top: float
    trend: Trend
    rate: float  # per step, at detection
    grown: int  # so far


class Follower:
    """Follows one figure, step by step; `growth` gives the result."""

    def __init__(self, figure: str, law: Law, owned_since: Callable[[int], int] | None = None) -> None:
        self.figure = figure
        self._law = law
        self._owned_since = owned_since
        self._scales = tuple(_Scale(width) for width in law.scales)
        self._steps: list[int] = []
        self._values: list[int] = []
        self._sizes: list[int] = []
        self._count = 0
        self._part = law.scales[0]
        self._stride = 1
        self._points: list[tuple[int, int]] = []
        self._found: _Found | None = None
        self._stated: Growth | None = None
        self.changed = 0
        """how often the result changed"""
        self._stopped = (0, float("-inf"))  # the step at which the previous growth ended, and its level

    def observe(self, step: int, value: int, size: int = 0) -> None:
        """Adds one step. `size`: the bytes of its batch, 0 if unknown."""
        self.extend((step,), (value,), (size,))

    def extend(self, steps: Sequence[int], values: Sequence[int], sizes: Sequence[int]) -> None:
        """Adds several steps at once, which is cheaper: most of the work is done once per part."""
        at, known = 0, self._count
        while at < len(values):
            upto = min(len(values), at + self._part - known % self._part)
            self._steps += steps[at:upto]
            self._values += values[at:upto]
            self._sizes += sizes[at:upto]
            self._plot(steps[at:upto], values[at:upto])
            known = self._count = known + upto - at
            if not known % self._part:
                self._close_parts(steps[upto - 1], known)
            at = upto

    def _plot(self, steps: Sequence[int], values: Sequence[int]) -> None:
        """Keep every nth of the new points."""
        known = self._count
        at = self._stride - known % self._stride
        while at <= len(values):
            self._points.append((steps[at - 1], values[at - 1]))
            self._restate()
            if len(self._points) > POINTS:
                del self._points[::2]
                self._stride *= 2
            at += self._stride - (known + at) % self._stride

    def _close_parts(self, step: int, count: int) -> None:
        values = self._values
        for scale in self._scales:
            if count % scale.width:
                break
            newest = values[-scale.width :]
            rising = scale.close(_middle(newest), self._steps[-(scale.width // 2)], step)
            if rising and self._found is None:
                self._confirm(scale)
        if self._found is not None:
            self._follow(count)
        if len(values) > 2 * WINDOW:
            for series in (values, self._steps, self._sizes):
                del series[:-WINDOW]

    @property
    def growing(self) -> bool:
        return self._found is not None

    @property
    def known(self) -> bool:
        return self._count > 0

    def growth(self) -> Growth:
        if self._stated is None:
            self._stated = self._state()
        return self._stated

    # ---------------------------------------------------------------------------------------------------- deciding

    def _confirm(self, scale: _Scale) -> None:
        span = min(scale.width * PARTS, len(self._values))
        steps, values = self._steps[-span:], self._values[-span:]
        medians = scale.medians
        if medians[-1] - medians[-PARTS] < self._law.least:
            return
        stopped_at, top = self._stopped
        if medians[-1] <= top and steps[-1] - stopped_at <= CEILING_STEPS:
            return  # a wider window still sees the rise that has ended
        if self._batches_explain(span, medians[-PARTS], medians[-1]):
            return
        if self._owned_since is not None and 2 * self._owned_since(steps[0]) > values[-1] - values[0]:
            return
        trend = self._trend(span)
        if trend is None or trend.z < Z or trend.low <= 0:
            return
        from_the_start = len(medians) <= PARTS
        base = float(values[0]) if from_the_start else medians[-PARTS - 1]
        since = steps[0] if from_the_start else scale.middles[-1] - round((medians[-1] - base) / trend.slope)
        self._found = _Found(
            scale,
            min(max(since, self._steps[0]), steps[-1]),
            base,
            medians[-1],
            trend,
            scale.rate(-PARTS, -1),
            max(0, round(self._scales[0].medians[-1] - base)),
        )
        self._restate()

    def _follow(self, count: int) -> None:
        found = self._found
        assert found is not None
        level = self._scales[0].medians[-1]
        found.top = max(found.top, level)
        slowed = found.scale.rate(-4, -1) < SLOWED_SHARE * found.rate
        if found.scale.idle >= 2 or slowed or level - found.base < KEPT_SHARE * (found.top - found.base):
            self._found = None
            self._restate()
            self._stopped = (self._steps[-1], found.top)
            return
        found.grown = max(0, round(level - found.base))
        self._restate()
        if count % (REFIT_PARTS * self._law.scales[0]) == 0:
            grown_for = sum(step >= found.since for step in self._steps)
            found.trend = self._trend(min(WINDOW, max(grown_for, found.scale.width * PARTS))) or found.trend

    def _trend(self, span: int) -> Trend | None:
        """The slope of the newest values, without the part that follows the batch."""
        steps, values, sizes = self._steps[-span:], self._values[-span:], self._sizes[-span:]
        if sizes[0] != sizes[-1] or min(sizes) != max(sizes):
            line = resistant_line([(float(size), float(value)) for size, value in zip(sizes, values, strict=True)])
            if line is not None and line.slope > 0 and not self._longer(span):
                values = [round(value - line.slope * size) for value, size in zip(values, sizes, strict=True)]
        return theil_sen([(float(step), float(value)) for step, value in zip(steps, values, strict=True)])

    def _longer(self, span: int) -> bool:
        sizes, steps = self._sizes[-span:], self._steps[-span:]
        if sizes[0] == sizes[-1] and min(sizes) == max(sizes):
            return False
        trend = theil_sen([(float(step), float(size)) for step, size in zip(steps, sizes, strict=True)])
        return trend is not None and trend.z >= Z_OF_BATCHES

    def _batches_explain(self, span: int, first: float, last: float) -> bool:
        if not self._longer(span):
            return False
        sizes = self._sizes[-span:]
        part = span // PARTS
        before, now = median(sizes[:part]), median(sizes[-part:])
        return before <= 0 or last <= first * (now / before) ** 2

    # ----------------------------------------------------------------------------------------------------- stating

    def _restate(self) -> None:
        self._stated = None
        self.changed += 1

    def _state(self) -> Growth:
        found = self._found
        if found is None:
            return Growth(self.figure, points=tuple(self._points))
        return Growth(
            self.figure,
            growing=True,
            since=found.since,
            per_step=found.trend.slope,
            low=max(0.0, found.trend.low),
            high=found.trend.high,
            so_far=found.grown,
            points=tuple(self._points),
        )


def _middle(values: list[int]) -> float:
    """The median; fast if all values are equal."""
    if values[0] == values[-1] and values.count(values[0]) == len(values):
        return float(values[0])
    return median(values)
