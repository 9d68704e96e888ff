"""Forecasts the next iteration's peak before its batch is known: the shape model evaluated at the usual batch.

Model. The next step starts at the newest step's end plus the usual difference (inputs, a leak's bytes). The usual batch
is the newest one if the last three steps needed the same, or if the recent ones rise or fall (sorted by length);
otherwise the median of the recent ones, of those with the same optimizers if optimizers alternate. The shape model
(gpumon_agent.shape_model.model) gives that batch's peak and phase. Peaks that rise by the same amount each step are
extrapolated. If the last three rounds of steps peaked alike, the next peak is that of one round ago. Phases that run
before the first forward of every nth step (an evaluation) are added when due.

Interval. The residuals of this forecast, kept as the shape model keeps its own (see its `residuals`): wide in the first
steps and after a change of regime. A residual far outside widens the next interval at once.

Cost. One update and one query of the shape model per step. Memory is constant.
Known limitations. A step's micro-batch shapes are divided evenly among its forwards. With fewer than `NEW_BATCHES`
different batches, `max_batch_factor` scales all of the excess, gradients included: a lower bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gpumon.analysis.forecast.headroom import Room, Taken, steps_to_full
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.robust import exceedance, median
from gpumon.analysis.types import BATCH, KEPT, Forecast, Growth
from gpumon_agent import wire
from gpumon_agent.shape_model.model import Kind, ShapeModel
from gpumon_agent.shape_model.periodicity import ABOVE_END, Seen, coming
from gpumon_agent.shape_model.residuals import FIRST_WIDTH, Residuals
from gpumon_agent.shape_model.shape_regression import KNOWN, Features, features
from gpumon_agent.shape_model.verdict import Fragments

SAME = 0.001  # relative difference allowed between peaks of two rounds
WINDOW = 64  # steps that are kept
RECENT = 9  # newest of them: their median is the usual step
TYPICAL_STEPS = 16
TURNS = 3  # steps with the same optimizers, for their median
SAME_PACE_STEPS = 8  # peaks that rise by the same amount over so many steps are extrapolated
SAME_PACE_APART = 0.05  # relative difference allowed between these amounts
NEW_BATCHES = 3  # different batches needed before the shape model scales one
END_ANCHORED = (wire.OPTIMIZER, wire.BETWEEN)  # their peaks do not move with the next step's start
BATCH_PHASES = (wire.FORWARD, wire.BACKWARD)
UNKNOWN: tuple[tuple[int, ...], ...] = ((1,),)
"""Placeholder for a batch whose shapes were not read: the model treats all of these as alike."""


class _Step(NamedTuple):
    peak: int
    end: int
    excess: int  # peak − start
    phase: str
    by_batch: int  # excess of forward and backward
    optimizers: tuple[int, ...]
    batch: Features | None  # None: take the measured excess, do not ask the shape model
    kind: Kind


class Forecaster:
    def __init__(self) -> None:
        self.shape_model = ShapeModel()
        self.fragments = Fragments(False)
        self.seen = 0
        self._recent: deque[_Step] = deque(maxlen=WINDOW)
        self._between: deque[int] = deque(maxlen=RECENT)  # a step's start − the previous step's end
        self._early: dict[str, deque[Seen]] = {}  # peaks before a step's first forward, by phase
        self._newest: StepPeaks | None = None
        self._pace: float | None = None  # rise of the newest peaks per step
        self._alike = 0  # identical newest steps in a row
        self._highest = 0  # highest peak of older steps
        self._taken = Taken()
        self._residuals = Residuals()
        self._surprise: float | None = None
        self._unit = 1  # a peak of this regime, in bytes: residuals are relative to it
        self._start = 0.0  # of the next step
        self._next: tuple[float, str] | None = None

    # ------------------------------------------------------------------------------------------------- learning

    def observe(self, step: StepPeaks, phases: Sequence[wire.Phase], gradient_bytes: int | None = None) -> None:
        """Learns one closed step. `gradient_bytes`: bytes that zero_grad will free, used after the first step."""
        before, changed = self._newest, self.shape_model.changed
        groups = shared_out(step.input_shapes, phases)
        same = before is not None and step.step == before.step + 1 and step[1:] == before[1:]
        self._alike = self._alike + 1 if same else 0
        if self.shape_model.learn(step.step, phases, groups):
            self.fragments.learn(phases)
        elif phases:
            self.shape_model.carry(phases[-1], groups)
        self._score(step)
        if self.seen <= 1 or self.shape_model.changed != changed:
            self._forget()
            self._unit = max(1, step.peak)  # the first step has no optimizer state before its end: another regime
        elif before is not None and step.step == before.step + 1:
            self._between.append(step.start - before.end)
        self.seen += 1
        if len(self._recent) == WINDOW:
            self._highest = max(self._highest, self._recent[0].peak)
        early, peak, phase = _parted(phases, step)
        shapes = groups[0] if groups else UNKNOWN
        batch = features(shapes) if len(groups) == 1 else None  # of several batches only the joint need is known
        kind = False, tuple(map(len, shapes))
        by_batch = max([p for name, p in step.phases if name in BATCH_PHASES], default=step.peak) - step.start
        self._recent.append(
            _Step(step.peak, step.end, peak - step.start, phase, by_batch, step.optimizers, batch, kind)
        )
        self._newest = step
        if step.reserved_peak is not None:
            self._taken.observe(step.step, step.reserved_peak, step.end)
        end = before.end if before is not None else step.start
        for name, peak in early.items():
            if name not in self._early:  # names may be unlimited: drop those not seen for long
                oldest = self.seen - 2 * WINDOW
                self._early = {known: series for known, series in self._early.items() if series[-1][0] >= oldest}
            series = self._early.setdefault(name, deque(maxlen=2 * WINDOW))
            series.append((self.seen, peak - step.start, peak - end, peak))
        if self._next is None or self._alike <= RECENT or len(self._early) > 1:  # otherwise the forecast is unchanged
            self._next = self._predict(gradient_bytes)

    def skip(self, highest: int) -> None:
        """Steps with peaks up to `highest` were left out, so the next residual is not scored."""
        self._highest = max(self._highest, highest)
        self._next = self._surprise = None

    def _score(self, step: StepPeaks) -> None:
        if self._next is None or self.seen < 2:
            return
        residual, residuals = (step.peak - self._next[0]) / self._unit, self._residuals
        surprise, self._surprise = self._surprise, None
        if surprise is not None:
            residuals.learn(surprise)
        if residuals.is_far(residual):
            self._surprise = residual
        else:
            residuals.learn(residual)

    def _forget(self) -> None:
        self._highest = max([self._highest, *[each.peak for each in self._recent]])
        self._recent.clear()
        self._between.clear()
        self._early.clear()
        self._residuals.forget(max(FIRST_WIDTH, abs(self._surprise or 0.0)))
        self._surprise = None

    # ----------------------------------------------------------------------------------------------- predicting

    def _predict(self, gradient_bytes: int | None) -> tuple[float, str]:
        newest, usual = self._newest, self._usual()
        assert newest is not None
        between = self._between
        start = newest.end + _level(between) if between else float(newest.start)
        if self.seen == 1:  # the second step starts with optimizer state
            if gradient_bytes is not None:
                start = max(start, float(newest.end - gradient_bytes))
            self._start = start
            moved = start - newest.start
            return max((peak + moved * (name not in END_ANCHORED), name) for name, peak in newest.phases)
        self._start = start
        recent = list(self._recent)
        self._pace = _same_pace([each.peak for each in recent[-SAME_PACE_STEPS:]])
        if self._pace is not None:
            return newest.peak + self._pace, newest.peak_phase
        if (length := _round(recent)) is not None:
            before = recent[-length]
            return float(before.peak + newest.end - recent[-1 - length].end), before.phase
        found = None if usual.batch is None else self.shape_model.peak(usual.batch, usual.kind, round(start))
        peak, phase = (
            (start + usual.excess, usual.phase) if found is None or found[2] == KNOWN else (float(found[0]), found[1])
        )
        for name, seen in self._early.items():
            above = coming(seen, self.seen, self.seen, ABOVE_END)
            if above is not None and newest.end + above > peak:
                peak, phase = newest.end + above, name
        return peak, phase

    def _usual(self) -> _Step:
        recent = list(self._recent)
        newest = recent[-1]
        if len(recent) < 3 or (newest.excess == recent[-2].excess == recent[-3].excess):
            return newest if len(recent) < 2 else max(recent[-2:], key=lambda each: each.excess)
        turn = _turn(recent)
        needs = [each.excess for each in recent[-RECENT:]]
        if turn is None and len(needs) == RECENT and needs in (sorted(needs), sorted(needs, reverse=True)):
            return newest  # batches sorted by length
        alike = recent[-RECENT:] if turn is None else recent[-turn : -TURNS * turn - 1 : -turn]
        usual = sorted(alike, key=lambda each: each.excess)[len(alike) // 2]
        return usual if turn is None else usual._replace(batch=None)

    # ------------------------------------------------------------------------------------------------ answering

    def typical_peak(self) -> tuple[float, float] | None:
        """Lower quartile and median of the last `TYPICAL_STEPS` peaks; None if there are fewer."""
        recent = sorted([self._recent[at].peak for at in range(-min(TYPICAL_STEPS, len(self._recent)), 0)])
        return (recent[TYPICAL_STEPS // 4], median(recent)) if len(recent) == TYPICAL_STEPS else None

    def forecast(self, budget: Room | None, kept: Growth | None = None) -> Forecast | None:
        """The next iteration's forecast; None before the first closed step. `kept`: growth from step to step."""
        if self._next is None or self._newest is None:
            return None
        predicted, phase = self._next
        peak = round(predicted)
        below, above = self._residuals.below, self._residuals.above
        if self._surprise is not None:
            below, above = min(below, self._surprise), max(above, self._surprise)
        high = math.ceil(predicted + above * self._unit)
        low = max(min(self._newest.start, self._newest.end), math.floor(predicted + below * self._unit))
        headroom = None if budget is None else budget.above(peak)
        differ = [each.excess - (predicted - self._start) for each in self._recent]
        if kept is None and self._pace is not None:  # a device may be full before growth is confirmed
            steps = self._recent[-SAME_PACE_STEPS].end, self._newest.end
            stays = 2 * (steps[1] - steps[0]) >= (SAME_PACE_STEPS - 1) * self._pace
            kept = Growth(KEPT if stays else BATCH, True, per_step=self._pace, low=self._pace, high=self._pace)
        p_oom = left = None
        if headroom is not None and budget is not None:
            p_oom = 1.0 if headroom < 0 else exceedance(differ, headroom + 0.5, max(high - low, 1e-3 * peak) / 2)
            last = self._taken.last_standing(budget.available)
            end = (
                None if last is None or kept is None or kept.figure == BATCH else (last[0] - self._newest.end, last[1])
            )
            left = steps_to_full(headroom, kept, differ, budget.shrinks_per_step, end)
        return Forecast(
            next_peak=peak,
            low=min(peak, low),
            high=high,
            phase=phase,
            headroom=headroom,
            p_oom=p_oom,
            steps_to_oom=left[0] if left is not None else None,
            max_batch_factor=None if budget is None else self._batch_factor(budget),
            learnt_from=self.seen,
            bytes_per_step=None if kept is None else round(kept.per_step or 0),
            growth=None if kept is None else BATCH if kept.figure == BATCH else KEPT,
            highest=self._highest,
            steps_to_oom_low=left[1] if left is not None else None,
            steps_to_oom_high=left[2] if left is not None else None,
        )

    def _batch_factor(self, budget: Room) -> float | None:
        """Largest k for which k times the batch fits, the largest recent batch included."""
        newest, largest = self._newest, max(self._recent, key=lambda each: each.by_batch)
        assert newest is not None
        usable = budget.available - budget.stranded
        optimizer = max((peak for name, peak in newest.phases if name == wire.OPTIMIZER), default=0)
        if usable < max(newest.start, optimizer):  # no batch fits
            return 0.0
        once = slope = float(largest.by_batch)
        known = None if largest.batch is None else self.shape_model.needs(largest.kind, largest.batch)
        if known is not None and largest.batch is not None and known[2].batches >= NEW_BATCHES:
            a, b, c, d, e = largest.batch
            twice = self.shape_model.needs(largest.kind, (2 * a, 2 * b, 2 * c, 2 * d, 2 * e))
            assert twice is not None
            slope = min(once, max(twice[0], twice[1] or 0.0) - once)
        if slope <= 0:
            return None
        return max(0.0, math.floor(100 * (usable - self._start - (once - slope)) / slope) / 100)


def shared_out(shapes: Sequence[tuple[int, ...]], phases: Sequence[wire.Phase]) -> list[Sequence[tuple[int, ...]]]:
    """The step's shapes, forward by forward; `UNKNOWN` if none were read."""
    forwards = sum([phase.phase == wire.FORWARD for phase in phases])
    each, rest = divmod(len(shapes), forwards) if forwards else (0, 0)
    if not each or rest:
        return [shapes or UNKNOWN] * forwards
    return [shapes[at * each : (at + 1) * each] for at in range(forwards)]


def _parted(phases: Sequence[wire.Phase], step: StepPeaks) -> tuple[dict[str, int], int, str]:
    """Peaks by phase before the step's first forward; of the rest, the highest peak and its phase."""
    early: dict[str, int] = {}
    highest, highest_in, begun = -1, step.peak_phase, False
    for phase in phases:
        name, peak = phase.phase, phase.allocated_peak
        begun = begun or name in (wire.FORWARD, wire.BACKWARD)
        if peak is None or name == wire.LOAD:
            continue
        if begun and peak > highest:
            highest, highest_in = peak, name
        elif not begun:
            early[name] = max(peak, early.get(name, 0))
    return (early, highest, highest_in) if highest >= 0 else ({}, step.peak, step.peak_phase)


def _level(values: Sequence[int]) -> float:
    """The newest value if the last three agree, else the median."""
    if len(values) < 3 or values[-1] == values[-2] == values[-3]:
        return values[-1]
    return median(values)


def _same_pace(peaks: Sequence[int]) -> float | None:
    pace = (peaks[-1] - peaks[0]) / (SAME_PACE_STEPS - 1)
    if len(peaks) < SAME_PACE_STEPS or pace < 1:
        return None
    return pace if all(abs(b - a - pace) <= SAME_PACE_APART * pace for a, b in pairwise(peaks)) else None


def _round(steps: Sequence[_Step]) -> int | None:
    """The period of the peaks in steps, seen three times; None if they do not repeat or are all equal."""
    peaks = [each.peak for each in steps]
    newest = peaks[-1]
    if len(peaks) < 6 or newest == peaks[-2] == peaks[-3]:
        return None
    for length in range(2, len(peaks) // 3 + 1):
        if abs(peaks[-1 - length] - newest) <= SAME * newest and all(
            abs(left - right) <= SAME * left
            for left, right in zip(peaks[-2 * length :], peaks[-3 * length : -length], strict=True)
        ):
            return length
    return None


def _turn(steps: Sequence[_Step]) -> int | None:
    """The period in steps of the optimizers that step, seen twice; None if they do not alternate."""
    stepped = [each.optimizers for each in steps]
    if stepped.count(stepped[-1]) == len(stepped):
        return None
    for turn in range(2, len(stepped) // 2 + 1):
        if stepped[-turn:] == stepped[-2 * turn : -turn] and len(set(stepped[-turn:])) > 1:
            return turn
    return None
