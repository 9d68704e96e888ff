"""What the next iteration's peak will be, with an interval, and whether it fits.

Model. A phase's peak is an anchor plus an excess. The anchor is what stays: allocated as forward begins (for forward,
backward and whatever else runs in a step), allocated at the end of the optimizer (for optimizer and between). The
excess is the phase's own: activations, workspaces, temporaries. Anchors follow a robust trend where there is one;
excesses are the newest value where the last two agree, else the median of the recent ones. The forecast is the
largest phase: peaks move from one phase to another, so each is carried forward for itself.

If the next batch's bytes are known (`input_bytes`), the excess of forward and backward is read from a resistant line
over the recent steps, or from the newest step with that very size; else it is that of the usual batch, and how batches
differ is in the interval.

Interval. One-step-ahead residuals of this very forecaster, newest `RESIDUALS`, as a conformal band (robust.conformal).
A residual outside the band by more than the band's own width is a surprise: the interval covers it at once. A second
one on the same side right after it is another regime: residuals and window are started anew. Then, as in the first
steps, the band is widened by a share of the peak that falls with the square of the steps since: 10 %, 2.5 %, 1.1 % …

Headroom = what the process can have (reserved + free, by the driver) − next peak − bytes stranded in segments that
stay partly in use through the whole step.

Sources. Anchors: FACTS of PyTorch's allocator (peaks are piecewise linear in the batch). Theil–Sen, Tukey, conformal
prediction: see gpumon.analysis.robust.
Cost. `observe` is O(1) with a re-fit of a trend over at most 32 points every eighth step of a series that moves;
memory is constant.

Known limitations. Excess over batch is taken as a line: attention's square of the sequence length is not modelled and
shows as a wider band. `max_batch_factor` scales all of a phase's excess, gradients included, when all batches had the
same size: it is a lower bound then. Evaluation counts only in steps that contain it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from gpumon.analysis.history import StepPeaks
from gpumon.analysis.lines import Forecast
from gpumon.analysis.robust import Trend, conformal, exceedance, median, resistant_line, theil_sen
from gpumon_agent import wire

WINDOW = 64  # steps the anchors and excesses are learnt from
RESIDUALS = 200
LEVEL_STEPS = 9  # of which a median is taken
TYPICAL_STEPS = 16
FIRST_WIDTH = 0.10  # share of the peak added to each side of the interval after the first step
REFIT_EVERY = 8
TREND_Z = 5.0  # Kendall's S, in standard deviations: a trend below this is none
TREND_BYTES_PER_STEP = 256.0
END_ANCHORED = (wire.OPTIMIZER, wire.BETWEEN)
BATCH_PHASES = (wire.FORWARD, wire.BACKWARD)


@dataclass(frozen=True, slots=True)
class Room:
    """What the process can have on its device: reserved and free at one moment, by allocator and driver."""

    available: int
    stranded: int = 0


@dataclass(frozen=True, slots=True)
class _Point:
    peak: float
    phase: str


class Forecaster:
    """Follows one device of one rank, step by step."""

    def __init__(self) -> None:
        self._window: deque[StepPeaks] = deque(maxlen=WINDOW)
        self._residuals: deque[float] = deque(maxlen=RESIDUALS)
        self._predicted: _Point | None = None
        self._band = (0.0, 0.0)
        self._calm = (0.0, 0.0)  # the band without the newest surprise
        self._surprise: float | None = None  # a residual far outside: an unusual batch, or the first of a regime
        self._since_change = 0
        self._prior = 0.0
        self._trend: Trend | None = None
        self._seen = 0

    # ------------------------------------------------------------------------------------------------- learning

    def observe(self, step: StepPeaks, gradient_bytes: int | None = None) -> None:
        """Learns one closed step. `gradient_bytes`: what zero_grad will give back, asked for after the first step."""
        self._score(step)
        if self._seen == 1 or (self._window and step.step <= self._window[-1].step):
            self._window.clear()  # before the first optimizer step there is no optimizer state: another regime
            self._trend = None
        self._window.append(step)
        self._seen += 1
        self._since_change += 1
        if len(self._window) >= 3 and (self._seen % REFIT_EVERY == 0 or len(self._window) < 2 * REFIT_EVERY):
            self._refit()
        self._predicted = self._predict(gradient_bytes)
        self._band = self._interval(self._predicted.peak)

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
            self._window = deque(list(self._window)[-1:], maxlen=WINDOW)
            self._residuals.clear()
            self._trend = None
            self._begin_regime(step, residual)
        else:
            if surprise is not None:
                self._residuals.append(surprise)  # it stood alone: an unusual batch, not another regime
            if side:
                self._surprise = residual
            else:
                self._residuals.append(residual)

    def _begin_regime(self, step: StepPeaks, residual: float) -> None:
        self._prior = max(FIRST_WIDTH * step.peak, abs(residual))
        self._since_change = 0

    def _refit(self) -> None:
        starts = [(float(s.step), float(s.start)) for s in self._window]
        if all(y == starts[0][1] for _, y in starts):
            self._trend = None
            return
        trend = theil_sen(starts)
        steady = trend is not None and trend.z >= TREND_Z and trend.slope >= TREND_BYTES_PER_STEP
        self._trend = trend if steady else None

    # ------------------------------------------------------------------------------------------------ predicting

    def _predict(self, gradient_bytes: int | None = None, input_bytes: int | None = None) -> _Point:
        window = self._window
        newest = window[-1]
        slope = self._trend.slope if self._trend else 0.0
        start = self._level([s.start - slope * (s.step - newest.step) for s in window]) + slope
        end = self._level([s.end - slope * (s.step - newest.step) for s in window]) + slope
        if self._seen == 1 and gradient_bytes is not None:  # what the first step leaves to the second
            start = max(start, end - gradient_bytes)
        best = _Point(0.0, newest.peak_phase)
        for name in {phase.phase for phase in newest.phases}:
            anchor = end if name in END_ANCHORED else start
            excess = self._excess(name, input_bytes)
            if excess is not None and anchor + excess > best.peak:
                best = _Point(anchor + excess, name)
        return best

    def _excess(self, name: str, input_bytes: int | None = None) -> float | None:
        points: list[tuple[float, float]] = []
        for step in self._window:
            anchor = step.end if name in END_ANCHORED else step.start
            size = float(step.input_bytes or 0)
            points.extend((size, float(phase.peak - anchor)) for phase in step.phases if phase.phase == name)
        if not points:
            return None
        if input_bytes is not None and name in BATCH_PHASES:
            same = [excess for size, excess in points if size == input_bytes]
            if same:
                return same[-1]
            line = resistant_line(points)
            if line is not None:
                return line.at(input_bytes)
        return self._level([excess for _, excess in points])

    @staticmethod
    def _level(values: list[float]) -> float:
        if len(values) < 2 or values[-1] == values[-2]:
            return values[-1]
        if len(values) == 2:
            return max(values)
        return median(values[-LEVEL_STEPS:])

    def _interval(self, peak: float) -> tuple[float, float]:
        band = conformal(self._residuals)
        extra = self._prior / max(1, self._since_change) ** 2
        if extra < 1e-4 * peak and len(self._residuals) >= 2:
            extra = 0.0
        self._calm = (min(0.0, band.below) - extra, max(0.0, band.above) + extra)
        if self._surprise is None:
            return self._calm
        return min(self._calm[0], self._surprise), max(self._calm[1], self._surprise)

    # ------------------------------------------------------------------------------------------------- answering

    def typical_peak(self) -> float | None:
        """Median peak of the recent steps; None before there are enough to speak of one."""
        recent = list(self._window)[-TYPICAL_STEPS:]
        return median([step.peak for step in recent]) if len(recent) >= TYPICAL_STEPS else None

    def forecast(self, room: Room | None, input_bytes: int | None = None) -> Forecast | None:
        """Of the next iteration; None before the first one closed. `input_bytes`: the next batch's, where known."""
        predicted = self._predicted
        if predicted is None:
            return None
        if input_bytes is not None:
            predicted = self._predict(None, input_bytes)
        below, above = self._band
        peak = round(predicted.peak)
        headroom = None if room is None else room.available - peak - min(room.stranded, max(0, room.available - peak))
        p_oom = None
        if headroom is not None:
            scale = max(above - below, 1e-3 * predicted.peak) / 2
            p_oom = exceedance(self._residuals, float(headroom), scale) if headroom > 0 else 1.0
        return Forecast(
            next_peak=peak,
            low=max(0, math.floor(predicted.peak + below)),
            high=math.ceil(predicted.peak + above),
            phase=predicted.phase,
            headroom=headroom,
            p_oom=p_oom,
            steps_to_oom=self._steps_to_oom(headroom),
            max_batch_factor=self._batch_factor(room, predicted.peak + above, predicted.peak),
            learnt_from=self._seen,
            bytes_per_step=round(self._trend.slope) if self._trend is not None else None,
        )

    def _steps_to_oom(self, headroom: int | None) -> int | None:
        if headroom is None or self._trend is None:
            return None
        return max(0, math.floor(headroom / self._trend.slope)) + 1 if headroom >= 0 else 0

    def _batch_factor(self, room: Room | None, high: float, peak: float) -> float | None:
        """Largest k so that every phase fits with k times the usual batch, the interval's upper side included."""
        if room is None or not self._window:
            return None
        newest = self._window[-1]
        usable = room.available - room.stranded - max(0.0, high - peak)
        factor = math.inf
        for name in BATCH_PHASES:
            points = [
                (float(step.input_bytes or 0), float(phase.peak - step.start))
                for step in self._window
                for phase in step.phases
                if phase.phase == name
            ]
            if not points:
                continue
            line = resistant_line(points)
            usual = median([x for x, _ in points])
            room_left = usable - newest.start
            if line is not None and line.slope > 0 and line.intercept >= 0 and usual > 0:
                factor = min(factor, (room_left - line.intercept) / (line.slope * usual))
            else:
                excess = median([y for _, y in points])
                if excess > 0:
                    factor = min(factor, room_left / excess)
        if math.isinf(factor):
            return None
        fixed = max((p.peak for p in newest.phases if p.phase in END_ANCHORED), default=0)
        if fixed > usable:  # the optimizer step alone does not fit: no batch does
            return 0.0
        return max(0.0, math.floor(100 * factor) / 100)
