"""Predicts one device's next peak for a batch of known shapes: the phase's excess on top of what is allocated.

Model. As a batch arrives, `start` bytes are allocated. Forward and backward each peak at start plus an excess that
depends on the batch (see shape_regression). Later micro-batches of a step begin with the gradients of the earlier ones,
so they are learned separately. Phases after them (optimizer, clipping, a user's phase) have an excess over the step's
start, or over another baseline if that is steadier (see periodicity). The forecast is the highest of
these and of what the step has reached already.

A residual far outside its interval widens the next interval at once. A second one on the same side means that the run
has changed: everything learned is dropped, and the interval is as wide as in the first steps.

Used twice: in the agent and in the viewer. Cost: see shape_regression; a step of known shapes and known figures needs
no update. Memory is constant.

Known limitations. The first step does not show the optimizer state of the second, so its figures are dropped. Of
several micro-batches only the current one is known. Later ones are assumed equal to it if the newest step's were,
else as high as usual.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from gpumon_agent.shape_model.periodicity import ABOVE_END, ABOVE_START, SEEN_MAX, Seen, coming, steadiest
from gpumon_agent.shape_model.residuals import FIRST_WIDTH, Residuals
from gpumon_agent.shape_model.shape_regression import AFTER, BEYOND, NEW, Features, ShapeRegression, Shapes, features
from gpumon_agent.wire import ABORTED, BACKWARD, BOUND, FORWARD, LOAD, Phase

LABELS_MAX = 32  # users may name any number of phases
KINDS_MAX = 16  # alternating models, micro-batches
FEW_APART, BEYOND_APART = 0.25, 0.1  # widening per side, as share of the excess beyond the largest batch
TRUSTED_AFTER = (0, 3, 3, 0)
"""Residuals of each sort, from which on the point forecast decides."""
_LATER = "\0later"  # no phase has this name

Kind = tuple[bool, tuple[int, ...]]
"""(is a later micro-batch of its step; number of dimensions of each input)"""


class _Batch:
    """One forward of a step and the backward after it."""

    __slots__ = ("backward", "features", "forward", "kind", "start")

    def __init__(self, start: int, forward: int, kind: Kind, batch: Features) -> None:
        self.start, self.forward, self.kind, self.features = start, forward, kind, batch
        self.backward: int | None = None


class _Kind:
    """What was learned of batches of one kind."""

    __slots__ = ("backward", "forward", "offset", "seen_at")

    def __init__(self) -> None:
        self.forward = ShapeRegression()
        self.backward: ShapeRegression | None = None
        self.offset = 0.0  # its start minus the step's
        self.seen_at = 0

    def at(self, batch: Features) -> tuple[float, str]:
        forward, later = self.both(batch)
        return (later, BACKWARD) if later is not None and later > forward else (forward, FORWARD)

    def both(self, batch: Features) -> tuple[float, float | None]:
        return self.forward.at(batch), None if self.backward is None else self.backward.at(batch)


class ShapeModel:
    """One device of one process."""

    def __init__(self) -> None:
        self.steps = 0
        self._began = 0  # `steps` when the regime began
        self.changed = 0  # number of regime changes
        self.changes: deque[int] = deque(maxlen=16)
        """steps at which a regime change was detected"""
        self.residuals = (Residuals(), Residuals(), Residuals(), Residuals())
        self.start: int | None = None  # of the newest step
        self._end = 0  # of the newest step; 0: none yet
        self._kinds: dict[Kind, _Kind] = {}
        self._after: dict[str, deque[Seen]] = {}
        self._rest: tuple[float, str, int] | None = None
        """the highest phase after the next step's batches: value, name, baseline (see periodicity)"""
        self._later: float | None = None  # what later micro-batches are expected to need, above the step's start
        self._surprise: float | None = None
        self._later_alike = False  # the newest step's micro-batches were all alike

    # -------------------------------------------------------------------------------------------------- predicting

    def peak(self, batch: Features, kind: Kind, start: int, first: int | None = None) -> tuple[int, str, int] | None:
        """(peak of the step from here on, its phase, sort). `first`: for a later micro-batch, its step's start."""
        known = self._kinds.get(kind)
        if known is None:
            return None
        sort = known.forward.sort_of(batch)
        excess, phase = known.at(batch)
        peak = start + excess
        begun = start if first is None else first
        if self._rest is not None:
            after, name, above = self._rest
            after += begun if above == ABOVE_START else self._end if above == ABOVE_END else 0
            if after > peak:
                peak, phase, sort = after, name, AFTER
        if first is None:
            later = self._later_peak(batch, kind)
            if later is not None and begun + later[0] > peak:
                peak, phase, sort = begun + later[0], BACKWARD, later[1] if later[1] is not None else sort
        return round(peak) if peak > 0 else 0, phase, sort

    def _later_peak(self, batch: Features, kind: Kind) -> tuple[float, int | None] | None:
        """Peak of later micro-batches above the step's start: like the first if they were alike, else as usual."""
        if self._later_alike:
            like = self._kinds.get((True, kind[1]))
            if like is not None:
                return like.offset + like.at(batch)[0], None
        return None if self._later is None else (self._later, AFTER)

    def interval(self, peak: int, sort: int, batch: Features, kind: Kind) -> tuple[int, int, bool]:
        """95 % interval of the peak; and whether the point forecast decides, not only the lower end."""
        residuals = self.residuals[sort]
        below, above = residuals.below, residuals.above
        if sort == BEYOND:  # uncertainty grows with the distance
            needs = self._kinds[kind].forward
            largest = needs.largest()
            if largest is not None and batch[0] > largest[0]:
                excess = needs.at(batch) / max(peak, 1)
                apart = (1 - largest[0] / batch[0]) * excess * (FEW_APART if needs.batches < 3 else BEYOND_APART)
                below, above = below - apart, above + apart
        surprise = self._surprise
        if surprise is not None:
            below, above = min(below, surprise), max(above, surprise)
        low = int(peak * (1 + below))
        return low if low > 0 else 0, int(peak * (1 + above)) + 1, residuals.seen >= TRUSTED_AFTER[sort]

    # ---------------------------------------------------------------------------------------------------- learning

    def learn(self, step: int, phases: Sequence[Phase], groups: Sequence[Shapes]) -> bool:
        """Learns from a closed step: its phases on this device, the shapes of each forward. False: unreadable."""
        batches: list[_Batch] = []
        after: dict[str, int] = {}
        allocated: int | None = None
        before = forwards = 0
        for phase in phases:
            peak, name = phase.allocated_peak, phase.phase
            if peak is None or phase.allocated is None:
                return False
            if name == FORWARD:
                at, forwards = forwards, forwards + 1
                if allocated is None or at >= len(groups):
                    return False
                if phase.flags & ABORTED:
                    allocated = phase.allocated
                    continue
                batch = features(groups[at])
                if batch is None:
                    return False
                batches.append(_Batch(allocated, peak, (bool(batches), tuple(map(len, groups[at]))), batch))
            elif name == BACKWARD and batches and phase.flags & ABORTED:
                batches.pop()  # e.g. the script caught an out-of-memory
            elif name == BACKWARD and batches:
                batches[-1].backward = max(peak, batches[-1].backward or 0)
            elif batches and phase.index == 0:
                after[name] = peak
            elif batches:
                after[name] = max(peak, after.get(name, 0))
            elif name != LOAD:
                before = max(before, peak)
            allocated = phase.allocated
        if not batches:
            return False
        first = batches[0]
        self.start = first.start
        if self.steps == 1:
            self._forget()  # the second step has optimizer state and new buckets
        self._score(step, first, batches, after)
        self.steps += 1
        for each in batches:
            self._learn_batch(each, first.start)
        self._later_alike = len(batches) > 1 and all(
            each.features == first.features and each.kind[1] == first.kind[1] for each in batches
        )
        if len(batches) > 1:
            after[_LATER] = max(max(each.forward, each.backward or 0) for each in batches[1:])
        self._learn_after(after, first.start, self._end or first.start)
        if allocated is not None:
            self._end = allocated
        return True

    def carry(self, last: Phase, groups: Sequence[Shapes]) -> None:
        """Follows a step that was read only at its end: shifts the start by as much as the end moved.

        Its peak is known too, so the residual of its forecast is learned.
        """
        if last.allocated is None or not self._end or self.start is None:
            return
        batch = features(groups[0]) if groups else None
        if batch is not None and last.allocated_peak is not None and last.flags & BOUND:
            predicted = self.peak(batch, (False, tuple(map(len, groups[0]))), self.start)
            if predicted is not None and predicted[0]:
                residual, residuals = last.allocated_peak / predicted[0] - 1, self.residuals[predicted[2]]
                surprise, self._surprise = self._surprise, None
                if surprise is not None:
                    residuals.learn(surprise)
                if residuals.is_far(residual):
                    self._surprise = residual  # a second one, in a step read in full, is a regime change
                else:
                    residuals.learn(residual)
        self.start += last.allocated - self._end
        self._end = last.allocated

    def _learn_batch(self, batch: _Batch, start: int) -> None:
        known = self._kinds.get(batch.kind)
        if known is None:
            if len(self._kinds) >= KINDS_MAX:
                del self._kinds[min(self._kinds, key=lambda kind: self._kinds[kind].seen_at)]
            known = self._kinds[batch.kind] = _Kind()
        known.forward.learn(batch.features, batch.forward - batch.start)
        if batch.backward is not None:
            if known.backward is None:
                known.backward = ShapeRegression()
            known.backward.learn(batch.features, batch.backward - batch.start)
        known.offset = float(batch.start - start)
        known.seen_at = self.steps

    def _learn_after(self, after: dict[str, int], start: int, end: int) -> None:
        """`end`: of the previous step."""
        series = self._after
        for name in after:
            if name not in series and len(series) < LABELS_MAX:
                series[name] = deque(maxlen=SEEN_MAX)
        for name, peak in after.items():
            if name in series:
                series[name].append((self.steps, peak - start, peak - end, peak))
        rest: tuple[float, str, int] | None = None
        later: float | None = None
        stood, gone = (0, start, end, 0), None
        for name, values in series.items():
            if self.steps - values[-1][0] > SEEN_MAX:
                gone = name
                continue
            of = steadiest(values) if name in after and name != _LATER else ABOVE_START
            expected = coming(values, self.steps, self.steps - self._began, of)
            if name == _LATER:
                later = expected
            elif expected is not None and (rest is None or expected + stood[of] > rest[0] + stood[rest[2]]):
                rest = expected, name, of
        if gone is not None:
            del series[gone]
        # the first optimizer step's peak is the state it creates, which is in the start of the second step
        self._rest = rest if self.steps > 1 else None
        self._later = later

    def _score(self, step: int, first: _Batch, batches: list[_Batch], after: dict[str, int]) -> None:
        predicted = self.peak(first.features, first.kind, first.start)
        if predicted is None:
            return
        actual = max(max(each.forward, each.backward or 0) for each in batches)
        actual = max(actual, max(after.values(), default=0))
        peak, _, sort = predicted
        if sort in (NEW, BEYOND) and not self._kinds[first.kind].forward.is_determined:
            return
        residual = actual / peak - 1 if peak else 0.0
        residuals = self.residuals[sort]
        surprise, self._surprise = self._surprise, None
        if sort != BEYOND and residuals.is_far(residual):
            if surprise is not None and surprise * residual > 0:
                self._forget(max(FIRST_WIDTH, abs(residual)))
                self.changes.append(step)
                self.changed += 1
                return
            self._surprise = residual
        elif surprise is not None:
            residuals.learn(surprise)  # it was isolated
        if self._surprise is None:
            residuals.learn(residual)

    def _forget(self, width: float = FIRST_WIDTH) -> None:
        self._began = self.steps
        self._kinds.clear()
        self._after.clear()
        self._rest = self._later = None
        self._later_alike = False
        self._surprise = None
        for residuals in self.residuals:
            residuals.forget(width)

    # --------------------------------------------------------------------------------------------------- answering

    def needs(self, kind: Kind, batch: Features) -> tuple[float, float | None, ShapeRegression] | None:
        """Forward's and backward's excess for a batch, and forward's regression."""
        known = self._kinds.get(kind)
        return None if known is None else (*known.both(batch), known.forward)
