"""What the next iteration's peak will be, with an interval, and whether it fits.

Model. A phase's peak is an anchor plus an excess. The anchor is what stays: allocated as forward begins (for forward,
backward and whatever else runs in a step), allocated at the end of the optimizer (for optimizer and between). The
excess is the phase's own: activations, workspaces, temporaries. Anchors follow a robust trend where there is one;
excesses are the newest value where the last ones agree, else the median of the recent ones. The forecast is the
largest phase: peaks move from one phase to another, so each is carried forward for itself. Phases that fewer than half
of the recent steps had are left out, unless they came at equal distances and are due (evaluation, a checkpoint). Where
the peaks of the last three rounds of 2 to `PERIOD` steps were the same, the forecast is the peak of one round before.
Where optimizers took turns in the last two, it is the middle of the peaks of the newest such steps. Where the peaks
themselves have a trend (a batch that grows), they are carried on along it.

If the next batch's bytes are known (`input_bytes`), the excess of forward and backward is read from a resistant line
over the recent steps, or from the newest step with that very size; else it is that of the usual batch, and how batches
differ is in the interval.

Interval. One-step-ahead residuals of this very forecaster, newest `RESIDUALS`, as a conformal band (robust.conformal).
A residual outside the band by more than the band's own width is a surprise: the interval covers it at once. A second
one on the same side right after it is another regime: residuals and window are started anew. Then, as in the first
steps, the band is widened by a share of the peak that falls with the square of the steps since: 10 %, 2.5 %, 1.1 % …

Sources. Anchors: FACTS of PyTorch's allocator (peaks are piecewise linear in the batch). Theil–Sen, Tukey, conformal
prediction: see gpumon.analysis.robust.
Cost. `observe` and `forecast` look at a few newest steps; every eighth step trend and batch are fitted again, over at
most 32 and `WINDOW` points. Where steps are alike neither is done again. Memory is constant. benchmarks/session.py
measures both.

Known limitations. Excess over the bytes of a batch is taken as a line: what follows its shapes, attention's square too,
is foreseen once they are known (the agent's shape model). `max_batch_factor` scales all of a phase's excess, gradients
included, when all batches had the same size: it is a lower bound then.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from gpumon.analysis.forecast.headroom import Room, Taken, steps_until
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.lines import Forecast
from gpumon.analysis.robust import NORMAL_95, Band, Line, Trend, conformal, exceedance, fading, median, resistant_line
from gpumon.analysis.series import level, over_batch, upwards
from gpumon_agent import wire

WINDOW = 64  # steps the anchors and excesses are learnt from
RESIDUALS = 200
LEVEL_STEPS = 9  # of which a median is taken
TYPICAL_STEPS = 16
PERIOD = 16  # steps after which a pattern (optimizers in turn, a saved checkpoint) is still recognized
TURNS = 3  # of steps that take turns, so many of one's newest ones tell of the next
PERIOD_TOLERANCE = 0.001  # of the peak
PHASES_KNOWN = 32  # names a user gives to phases may be endless
FIRST_WIDTH = 0.10  # share of the peak added to each side of the interval after the first step
REFIT_EVERY = 8
BATCH_EVERY = 32
SETTLED_STEPS = 8  # what changes before is no regime, but a run that begins
FAR_POINTS = 64
FAR_AGREES = 0.5  # share of the trend over the window by which that over the whole regime may differ
FAR_BENT = 0.05  # share of what it rose by over the regime that it may stand off a straight line
STRAYS = 1.36  # standard deviations of a sum of random amounts, beyond which it strays from that line in 5 % of cases
ENDS = 3  # steps that stand for the newest
END_ANCHORED = (wire.OPTIMIZER, wire.BETWEEN)
BATCH_PHASES = (wire.FORWARD, wire.BACKWARD)


class _Point(NamedTuple):
    peak: float
    phase: str


class _Far(NamedTuple):
    """What is kept of a step, over many of them."""

    slope: float
    varies: float  # its variance
    steps: float


class _Series:
    """What a phase added to its anchor, step by step."""

    __slots__ = ("after", "gap", "gap_before", "highest", "last", "newest", "run", "same", "seen")

    def __init__(self, name: str) -> None:
        self.after = name in END_ANCHORED  # its anchor is the end, else the start
        self.newest: deque[int] = deque(maxlen=LEVEL_STEPS)  # excesses; where they all are the same, none is added
        self.last = -1  # the newest of them
        self.highest = -1
        self.same = 0  # so many before it were the same
        self.seen = -1  # the newest step that had it
        self.run = 0  # steps in a row until then
        self.gap = self.gap_before = 1  # steps from the one before it to that one, and to the one before it

    def usual(self) -> float:
        return self.last if self.same >= 2 else level(self.newest)


class Forecaster:
    """Follows one device of one rank, step by step."""

    def __init__(self) -> None:
        self._window: deque[StepPeaks] = deque(maxlen=WINDOW)
        self._peaks: deque[int] = deque(maxlen=WINDOW)  # of the same steps
        self._numbers: deque[int] = deque(maxlen=WINDOW)  # theirs
        self._begun: deque[int] = deque(maxlen=WINDOW)  # what they started with
        self._in_a_row = 0  # steps since some were left out
        self._before: list[int] = []  # the `PERIOD` newest peaks, by size
        self._again = 0  # so many steps in a row peaked as one of those before
        self._turns = False  # not every step of the regime had the same optimizers
        self._starts: deque[int] = deque(maxlen=LEVEL_STEPS)  # of the newest of them
        self._ends: deque[int] = deque(maxlen=LEVEL_STEPS)
        self._phases: dict[str, _Series] = {}
        self._residuals: deque[float] = deque()
        self._ordered: list[float] = []  # the same, by size
        self._held: Band | None = None  # what holds them; None: they changed
        self._predicted: _Point | None = None
        self._band = (0.0, 0.0)
        self._calm = (0.0, 0.0)  # the band without the newest surprise
        self._surprise: float | None = None  # a residual far outside: an unusual batch, or the first of a regime
        self._since_change = 0
        self.changes: deque[int] = deque(maxlen=16)
        """steps with which another regime was seen to have begun"""
        self._prior = 0.0
        self._trend: Trend | None = None
        self._peak_trend: Trend | None = None
        self._batch: list[Line] | None = None  # a phase: excess over the multiple of the usual batch; None: not fitted
        self._typical: tuple[float, float] | None = None
        self._seen = 0
        self._far: list[tuple[float, float]] = []  # (step, start) over the whole regime, ever further apart
        self._stride = 1
        self._far_trend: _Far | None = None
        self._highest = 0
        self._usual: tuple[int, float] | None = None  # under a trend: a step, and the middle peak as of then
        self._apart: list[float] = []  # by how much the window's peaks differ from it
        self._alike = 0  # the newest steps, so many, that are the same in all that is learnt from
        self._taken = Taken()
        self._settled = False  # what was fitted last was fitted over nothing but such steps

    # ------------------------------------------------------------------------------------------------- learning

    def observe(self, step: StepPeaks, gradient_bytes: int | None = None) -> None:
        """Learns one closed step. `gradient_bytes`: what zero_grad will give back, asked for after the first step."""
        self._score(step)
        if self._seen == 1 or (self._window and step.step <= self._window[-1].step):
            self._forget()  # before the first optimizer step there is no optimizer state: another regime
        self._alike = self._alike + 1 if self._window and _same(step, self._window[-1]) else 1
        self._remember(step)
        self._since_change += 1
        if self._seen % REFIT_EVERY == 0 or len(self._window) <= 2 * REFIT_EVERY:
            settled = self._alike >= WINDOW
            if not (settled and self._settled) and not self._stands():
                self._refit()
                self._predicted = None
            self._settled = settled
        predicted = self._predicted if self._predicts_the_same(step) else None
        self._predicted = predicted = predicted or self._predict(gradient_bytes)
        self._band = self._interval(predicted.peak)

    def skip(self, highest: int) -> None:
        """Steps were left out, which peaked at `highest`: the next one says nothing of how well it was foreseen."""
        self._highest = max(self._highest, highest)
        self._predicted = self._surprise = None
        self._in_a_row = 0

    def _remember(self, step: StepPeaks) -> None:
        number, start, end, phases, highest = step[:5]
        seen = self._seen = self._seen + 1
        if len(self._window) == WINDOW and self._peaks[0] > self._highest:
            self._highest = self._peaks[0]
        before, at = self._before, bisect_left(self._before, highest * (1 - PERIOD_TOLERANCE))
        alike = at < len(before) and before[at] <= highest * (1 + PERIOD_TOLERANCE)
        self._again = self._again + 1 if alike else 0
        if len(before) == PERIOD:
            del before[bisect_left(before, self._peaks[-PERIOD])]
        insort(before, highest)
        self._turns = self._turns or (bool(self._window) and self._window[-1].optimizers != step.optimizers)
        self._window.append(step)
        self._peaks.append(highest)
        self._numbers.append(number)
        self._begun.append(start)
        self._in_a_row += 1
        if step.reserved_peak is not None:
            self._taken.observe(number, step.reserved_peak, end)
        self._starts.append(start)
        self._ends.append(end)
        if seen % self._stride == 0:
            self._far.append((float(number), float(start)))
            if len(self._far) == FAR_POINTS:
                del self._far[::2]
                self._stride *= 2
        known = self._phases
        for name, peak in phases:
            series = known.get(name)
            if series is None:
                if len(known) >= PHASES_KNOWN:
                    continue
                series = known[name] = _Series(name)
            excess = peak - (end if series.after else start)
            if series.seen == seen - 1:
                series.run += 1
            else:
                series.gap_before = series.gap if series.run == 1 else 1
                series.gap, series.run = seen - series.seen if series.seen >= 0 else 1, 1
            series.seen = seen
            if excess != series.last:
                series.last, series.same = excess, 0
            else:
                series.same += 1
                if series.same >= LEVEL_STEPS:
                    continue  # they all are that
            series.newest.append(excess)
            series.highest = max(series.newest)

    def _forget(self, keep: StepPeaks | None = None) -> None:
        self._highest = max(self._highest, *self._peaks, 0)
        for series in (self._window, self._peaks, self._numbers, self._begun, self._starts, self._ends):
            series.clear()
        self._before.clear()
        self._again = self._in_a_row = 0
        self._turns = False
        self._far.clear()
        self._stride = 1
        self._far_trend = None
        self._usual = None
        self._alike = 0
        self._phases.clear()
        self._batch = None
        self._trend = self._peak_trend = None
        if keep is not None:
            self._seen -= 1
            self._remember(keep)

    def _score(self, step: StepPeaks) -> None:
        predicted = self._predicted
        if predicted is None:
            self._prior = FIRST_WIDTH * step.peak
            return
        residual = step.peak - predicted.peak
        below, above = self._calm
        reach = above - below
        side = 1 if residual > above + reach else -1 if residual < below - reach else 0
        surprise, self._surprise = self._surprise, None
        if self._seen == 1:  # before the second step nothing was known of the first one's optimizer state
            self._begin_regime(step, residual)
        elif side and surprise is not None and surprise * side > 0:
            self._forget(keep=self._window[-1])
            self._residuals.clear()
            self._ordered.clear()
            self._held = None
            if step.step >= SETTLED_STEPS:
                self.changes.append(step.step)
            self._begin_regime(step, residual)
        else:
            if surprise is not None:
                self._keep(surprise)  # it stood alone: an unusual batch, not another regime
            if side:
                self._surprise = residual
            else:
                self._keep(residual)

    def _keep(self, residual: float) -> None:
        if len(self._residuals) == RESIDUALS:
            if self._residuals[0] == residual:
                self._residuals.rotate(-1)  # as where all steps are alike
                return
            del self._ordered[bisect_left(self._ordered, self._residuals.popleft())]
        self._held = None
        self._residuals.append(residual)
        insort(self._ordered, residual)

    def _begin_regime(self, step: StepPeaks, residual: float) -> None:
        self._prior = max(FIRST_WIDTH * step.peak, abs(residual))
        self._since_change = 0

    def _stands(self) -> bool:
        """At every other refit: nothing had a trend, and nothing that is kept has one now. Batches differ, no more."""
        if self._seen % (2 * REFIT_EVERY) == 0 or len(self._window) < WINDOW:
            return False
        if self._trend is not None or self._peak_trend is not None:
            return False
        return upwards(list(self._numbers), list(self._begun)) is None

    def _refit(self) -> None:
        """What is fitted over the whole window: the trend, the batch's share, the typical peak."""
        window = self._window
        steps = list(self._numbers)
        self._trend = upwards(steps, list(self._begun))
        peaks = list(self._peaks)
        self._peak_trend = upwards(steps, peaks)
        self._far_trend = None if self._trend is None else self._kept(self._trend.slope)
        if self._seen % BATCH_EVERY == 0 or len(window) < WINDOW:
            self._batch = None
        if (rate := self._rate()) is not None:
            newest = window[-1].step
            level_peaks = [peak - rate * (step - newest) for peak, step in zip(peaks, steps, strict=True)]
            middle = median(level_peaks)
            self._usual, self._apart = (newest, middle), [peak - middle for peak in level_peaks]
        recent = sorted(peaks[-TYPICAL_STEPS:])
        self._typical = (recent[TYPICAL_STEPS // 4], median(recent)) if len(recent) == TYPICAL_STEPS else None

    def _kept(self, near: float) -> _Far | None:
        """The trend of as much of the regime as is straight and agrees with the near one; None: nothing does.

        By its ends: what is kept is a sum, and of a sum of
        random amounts the ends tell all that the points between do. Straight is what strays no further from the line
        between its ends than such a sum would (STRAYS).
        """
        far, window = self._far, self._window
        x2, y2 = _mean([(s.step, s.start) for s in (window[at] for at in range(-min(ENDS, len(window)), 0))])
        for oldest in (len(far) * eighth // 8 for eighth in range(5)):
            points = far[oldest:]
            if len(points) < 2 * ENDS:
                break
            x1, y1 = points[0]
            slope = (y2 - y1) / (x2 - x1)
            if abs(slope - near) > FAR_AGREES * near:
                continue
            apart = [(left[0] - x, left[1] - y) for left, (x, y) in zip(points[1:], points, strict=False)]
            varies = sum([(more - slope * steps) ** 2 / steps for steps, more in apart]) / len(apart)
            strays = max([abs(y - y1 - slope * (x - x1)) for x, y in points])
            if strays <= max(FAR_BENT * (y2 - y1), STRAYS * math.sqrt(varies * (x2 - x1))):
                return _Far(slope, varies, x2 - x1)
        return None

    # ------------------------------------------------------------------------------------------------ predicting

    def _predict(self, gradient_bytes: int | None = None, input_bytes: int | None = None) -> _Point:
        newest = self._window[-1]
        slope = self._trend.slope if self._trend else 0.0
        window = self._window
        period = self._period() if input_bytes is None else None
        if period is not None:
            before = window[-period]
            return _Point(before.peak + slope * period, before.peak_phase)
        turn = self._turn() if input_bytes is None else None
        if turn is not None:
            alike = range(turn, min(TURNS * turn, len(window)) + 1, turn)
            return _Point(level([window[-at].peak + slope * at for at in alike]), window[-turn].peak_phase)
        steps = min(LEVEL_STEPS, len(window))
        if self._peak_trend is not None and input_bytes is None:
            slope = self._peak_trend.slope
            peaks = [s.peak - slope * (s.step - newest.step) for s in (window[at] for at in range(-steps, 0))]
            return _Point(level(peaks) + slope, newest.peak_phase)
        if not slope:
            start, end = float(level(self._starts)), float(level(self._ends))
        else:
            recent = [window[at] for at in range(-steps, 0)]
            start = level([s.start - slope * (s.step - newest.step) for s in recent]) + slope
            end = level([s.end - slope * (s.step - newest.step) for s in recent]) + slope
        if self._seen == 1 and gradient_bytes is not None:  # what the first step leaves to the second
            start = max(start, end - gradient_bytes)
        highest, highest_in, seen = 0.0, newest.peak_phase, self._seen
        likely, least = self._phases.get(highest_in), 0.0
        if likely is not None and input_bytes is None and likely.run >= steps and likely.seen == seen:
            least = (end if likely.after else start) + likely.usual()
        for name, series in self._phases.items():
            anchor = end if series.after else start
            if series is likely and least:
                peak = least
            elif input_bytes is None and series.run >= steps and series.seen == seen:  # in each of the newest steps
                if anchor + series.highest < least:
                    continue
                peak = anchor + series.usual()
            elif (excess := self._excess(name, series, steps, input_bytes)) is not None:
                peak = anchor + excess
            else:
                continue
            if peak > highest:
                highest, highest_in = peak, name
        return _Point(highest, highest_in)

    def _predicts_the_same(self, step: StepPeaks) -> bool:
        """Whether the steps that a prediction looks at, and each phase's excess in them, are those of the last one."""
        if self._alike <= LEVEL_STEPS + 1 or self._trend is not None or self._peak_trend is not None:
            return False
        return len(step.phases) == len(self._phases)  # none is left that may be due

    def _period(self) -> int | None:
        """After how many steps, 2 to `PERIOD`, the peaks repeat: seen in the last three rounds. None: they do not."""
        if self._again < 4 or self._in_a_row < 6:  # two rounds of two, and the one before
            return None
        peaks = list(self._peaks)
        newest = peaks[-1]
        if newest == peaks[-2] == peaks[-3]:
            return None
        least, most = newest * (1 - PERIOD_TOLERANCE), newest * (1 + PERIOD_TOLERANCE)
        for period, peak in enumerate(peaks[-3 : -2 - PERIOD : -1], 2):
            if least <= peak <= most and 3 * period <= self._in_a_row and _repeats(peaks, period):
                return period
        return None

    def _turn(self) -> int | None:
        """After how many steps the same optimizers step again, by the last two rounds. None: they take no turns."""
        if not self._turns:
            return None
        stepped = [step.optimizers for step in self._window]
        for turn in range(2, min(PERIOD, len(stepped) // 2) + 1):
            if stepped[-turn:] == stepped[-2 * turn : -turn] and len(set(stepped[-turn:])) > 1:
                return turn
        return None

    def _excess(self, name: str, series: _Series, steps: int, input_bytes: int | None) -> float | None:
        """None for a phase that is not due: one that comes every so many steps, or that fewer than half had."""
        due = self._due(series)
        if due is not None:
            return max(series.newest[-1], series.newest[-2]) if due else None
        if series.seen <= self._seen - steps:
            return None
        known = self._entries(name)
        recent = [excess for seen, _, excess in known if seen > self._seen - steps]
        if 2 * len(recent) < steps or not recent:
            return None
        if input_bytes is not None and name in BATCH_PHASES:
            same = next((excess for _, size, excess in reversed(known) if size == input_bytes), None)
            if same is not None:
                return same
            line = resistant_line([(size, excess) for _, size, excess in known])
            if line is not None:
                return line.at(input_bytes)
        return level(recent)

    def _entries(self, name: str) -> list[tuple[int, int, int]]:
        """Of the window's steps that had a phase: the how-manieth, input bytes, excess."""
        first = self._seen - len(self._window) + 1
        return [
            (first + at, step.input_bytes or 0, peak - (step.end if name in END_ANCHORED else step.start))
            for at, step in enumerate(self._window)
            for phase, peak in step.phases
            if phase == name
        ]

    def _due(self, series: _Series) -> bool | None:
        """Whether a phase that came at equal distances comes now; None where it comes at every step, or at none."""
        if series.run > 1 or series.gap < 2 or series.gap_before != series.gap:
            return None
        since = self._seen + 1 - series.seen
        return None if since > series.gap else since == series.gap

    def _interval(self, peak: float) -> tuple[float, float]:
        band = self._held = self._held or conformal(self._ordered)
        extra = self._prior / max(1, self._since_change) ** 2
        if extra < 1e-4 * peak and len(self._residuals) >= 2:
            extra = 0.0
        below, above = band.below, band.above
        self._calm = (below - extra if below < 0.0 else -extra, above + extra if above > 0.0 else extra)
        if self._surprise is None:
            return self._calm
        return min(self._calm[0], self._surprise), max(self._calm[1], self._surprise)

    # ------------------------------------------------------------------------------------------------- answering

    def typical_peak(self) -> tuple[float, float] | None:
        """Lower quartile and median of the recent peaks; None before there are enough to speak of them."""
        return self._typical

    def forecast(self, room: Room | None, input_bytes: int | None = None) -> Forecast | None:
        """Of the next iteration; None before the first one closed. `input_bytes`: the next batch's, where known."""
        predicted = self._predicted
        if predicted is None:
            return None
        if input_bytes is not None:
            predicted = self._predict(None, input_bytes)
        below, above = self._band
        peak = round(predicted.peak)
        headroom = None if room is None else room.above(peak)
        rate = self._rate()
        total = (rate or 0.0) + (room.shrinks_per_step if room is not None else 0.0)
        kept = rate is not None and self._trend is not None and self._trend.slope >= rate / 2
        p_oom = None
        if headroom is not None:
            scale = max(above - below, 1e-3 * predicted.peak) / 2
            largest = max(self._peaks) - predicted.peak
            p_oom = 1.0
            if headroom > 0 or (headroom == 0 and rate is None and largest >= 0):  # a peak that high did fit
                beyond = headroom + 0.5  # what takes all that is left still fits
                if rate is None and beyond > largest:  # only that and how many there were count
                    p_oom = 0.5 * fading(largest, beyond, scale) / (len(self._window) + 1)
                else:
                    p_oom = exceedance(self._around(predicted.peak), beyond, scale)
        left = self._steps_to_oom(room, headroom, total, kept)
        newest = self._window[-1]
        stands = min(newest.start, newest.end)
        return Forecast(
            next_peak=peak,
            low=min(peak, max(stands, math.floor(predicted.peak + below))),
            high=math.ceil(predicted.peak + above),
            phase=predicted.phase,
            headroom=headroom,
            p_oom=p_oom,
            steps_to_oom=left[0] if left is not None else None,
            max_batch_factor=None if room is None else self._batch_factor(room, max(0.0, above)),
            learnt_from=self._seen,
            bytes_per_step=None if rate is None else round(rate),
            growth=None if rate is None else "kept" if kept else "batch",
            highest=self._highest,
            steps_to_oom_low=left[1] if left is not None else None,
            steps_to_oom_high=left[2] if left is not None else None,
        )

    def _around(self, peak: float) -> list[float]:
        """By how much the window's peaks, carried on to the next step, differ from a forecast."""
        slope = self._rate()
        if slope is None:
            return [each - peak for each in self._peaks]
        following = self._window[-1].step + 1
        return [step.peak + slope * (following - step.step) - peak for step in self._window]

    def _steps_to_oom(
        self, room: Room | None, headroom: int | None, rate: float, kept: bool
    ) -> tuple[int, int, int | None] | None:
        """And the least and the most, that hold 95 % of what comes; None for the most: it may never."""
        if room is None or headroom is None or rate <= 0:
            return None
        if headroom < 0:
            return 0, 0, 1
        ends_apart = 0.0
        last = None
        if not kept or self._usual is None:
            steps = steps_until(headroom, rate)
        elif (last := self._taken.last_standing(room.available)) is not None:
            steps = max(1, round((last[0] - self._window[-1].end) / rate) + 1)
            ends_apart = last[1]
        else:
            since, usual = self._usual
            now = usual + rate * (self._window[-1].step + 1 - since)
            steps = steps_until(room.above(round(now)), rate, self._apart)
        if steps is None:
            return None
        if last is None:
            peaks = sorted(self._apart) or [0.0]
            ends_apart = (peaks[int(0.84 * (len(peaks) - 1))] - peaks[int(0.16 * (len(peaks) - 1))]) / 2
        return (steps, *self._between(steps, rate, ends_apart))

    def _between(self, steps: int, rate: float, ends_apart: float) -> tuple[int, int | None]:
        """What holds 95 % of the steps that are left.

        With amounts of a mean and a variance, seen in n steps, what k steps sum up to is known to their variance times
        k + k² / n; where memory ends differs by `ends_apart` (a standard deviation).
        """
        far, trend = self._far_trend, self._trend or self._peak_trend
        if far is not None and far.slope == self._rate():
            varies, seen = far.varies, far.steps
            apart = NORMAL_95 * math.sqrt(varies * (steps + steps * steps / seen) + ends_apart**2) / rate
            return max(0, math.floor(steps - apart) - 1), math.ceil(steps + apart) + 1
        ends = NORMAL_95 * ends_apart / rate
        low, high = (trend.low, trend.high) if trend is not None else (rate, rate)
        least = max(0, math.floor(steps * min(1.0, rate / high) - ends) - 1) if high > 0 else 0
        return least, math.ceil(steps * max(1.0, rate / low) + ends) + 1 if low > 0 else None

    def _rate(self) -> float | None:
        """Bytes a step by which the peak grows. Random batches hide a leak in the peak, not in what stays."""
        fastest = max((trend.slope for trend in (self._trend, self._peak_trend) if trend is not None), default=None)
        if fastest is None or self._trend is None or self._far_trend is None or self._trend.slope < fastest / 2:
            return fastest
        return self._far_trend.slope  # what is kept grows: the same trend, seen for longer

    def _batch_factor(self, room: Room, above: float) -> float | None:
        """Largest k so that every phase fits with k times the usual batch, the interval's upper side included.

        What batches differ by grows with them; what a new regime or a surprise adds to the interval does not.
        """
        newest = self._window[-1]
        differ = min(above, max(0.0, self._held.above if self._held is not None else 0.0))
        usable = room.available - room.stranded - (above - differ)
        if usable < 0:
            return 0.0
        for name, peak in newest.phases:
            if peak > usable and name in END_ANCHORED:  # the optimizer step alone does not fit: no batch does
                return 0.0
        if self._batch is None:
            points: dict[str, list[tuple[int, int]]] = {name: [] for name in BATCH_PHASES}
            for step in self._window:
                size, start = step.input_bytes or 0, step.start
                for name, peak in step.phases:
                    if name in points:
                        points[name].append((size, peak - start))
            self._batch = [over_batch(each) for each in points.values() if each]
        factors = [
            (usable - newest.start - line.intercept) / (line.slope + differ) for line in self._batch if line.slope > 0
        ]
        return max(0.0, math.floor(100 * min(factors)) / 100) if factors else None


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum([x for x, _ in points]) / len(points), sum([y for _, y in points]) / len(points)


def _repeats(peaks: Sequence[int], period: int) -> bool:
    """Whether each of the newest two rounds of them is that of a round before."""
    rounds = zip(peaks[-2 * period :], peaks[-3 * period : -period], strict=True)
    return all(peak * (1 - PERIOD_TOLERANCE) <= before <= peak * (1 + PERIOD_TOLERANCE) for peak, before in rounds)


def _stood(newer: StepPeaks, older: StepPeaks) -> bool:
    """Whether both began and ended with the same bytes."""
    return newer.start == older.start and newer.end == older.end


def _same(newer: StepPeaks, older: StepPeaks) -> bool:
    """Whether both are the same in all that a forecast is made from."""
    return _stood(newer, older) and newer.phases == older.phases and newer.input_bytes == older.input_bytes
