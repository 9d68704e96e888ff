"""Predicts whether the batch that enters forward will fit, before anything is allocated for it.

The training thread passes the batch's shapes and what the allocator holds at that moment. The shape model has learned
from the events of earlier steps. Nothing here may ask the driver how much memory the process can have: a viewer sends
it, or an out-of-memory that the training survived shows it. The device's total, and the fraction of it that the user
set, always apply: a peak above them cannot fit. If nothing else is known, there is no headroom and no other warning
except `tight`, if the allocator had to free its cache recently.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic_ns as _now_ns
from typing import Any

from gpumon_agent import environment, wire
from gpumon_agent.guard import say
from gpumon_agent.noted import Noted
from gpumon_agent.shape_model.model import ShapeModel
from gpumon_agent.shape_model.shape_regression import Features, Shapes, features
from gpumon_agent.shape_model.verdict import Fragments, verdict
from gpumon_agent.units import torch_size
from gpumon_agent.wire import BETWEEN, OOM_AHEAD, TIGHT

VARIABLE = "GPUMON_OUTLOOK"
_ALIKE_MAX = 64  # steps in a row with the same figures: from more of them nothing is learned
Fields = list[Any]
Figures = list[Any]


def judged(
    shape_model: ShapeModel,
    step: int,
    device: int,
    t_ns: int,
    shapes: Shapes,
    nbytes: int | None,
    start: int,
    so_far: int,
    budget: int | None,
    fragments: Fragments,
) -> wire.Outlook | None:
    """The outlook of a step's first batch; None if nothing is known of such batches."""
    batch = features(shapes)
    if batch is None:
        return None
    kind = (False, tuple(map(len, shapes)))
    predicted = shape_model.peak(batch, kind, start)
    if predicted is None:
        return None
    peak, phase, sort = predicted
    low, high, trusted = shape_model.interval(peak, sort, batch, kind)
    low = max(low, start)
    word, headroom = verdict(peak, low, high, trusted, budget, None, fragments)
    if so_far > peak:
        peak, phase, low, high = so_far, BETWEEN, so_far, max(high, so_far)
    sent_shapes = tuple(tuple(shape) for shape in shapes[: wire.SHAPES_MAX])
    return wire.Outlook(step, device, t_ns, peak, low, high, phase, word, headroom, nbytes, sent_shapes)


class _Device:
    """Everything about a device that each batch needs."""

    __slots__ = ("first", "fragments", "said", "shape_model")

    def __init__(self, shape_model: ShapeModel, fragments: Fragments) -> None:
        self.shape_model, self.fragments = shape_model, fragments
        self.first: int | None = None  # bytes allocated before the step's first batch
        self.said = 0  # the last outlook's peak


class Outlooks:
    """The outlooks of one process."""

    def __init__(
        self,
        append: Callable[[Any], None],
        budget: dict[int, int],
        *,
        expandable: bool = False,
        functions: list[Callable[[wire.Outlook], object]] | None = None,
    ) -> None:
        self.budget = budget
        """bytes the process can have on a device, including what it has reserved"""
        self.limits: dict[int, int] = {}
        """upper bounds: the device's total, or the share of it that the user allows"""
        self._functions = functions if functions is not None else []
        self.waiting: wire.Outlook | None = None  # for the user's functions
        self._append = append
        self._prints = environment.value(VARIABLE) == "print"
        self._expandable = expandable
        self._devices: dict[int, _Device] = {}
        self._newest: tuple[Shapes, Features | None, tuple[int, ...]] = (), None, ()
        self._groups: deque[tuple[int, Sequence[tuple[int, ...]]]] = deque(maxlen=4096)
        self._open: list[wire.Phase] = []
        self._like: Figures = []  # those of the newest step
        self._alike = 0  # steps in a row that had the same
        self._noted = 0  # Noted.alike of the newest steps, if they were noted

    def batch(
        self, step: int, index: int, shapes: Sequence[tuple[int, ...]], nbytes: int, now: Sequence[tuple[int, Any, int]]
    ) -> tuple[bool, bool]:
        """Predicts the `index`-th batch of `step`. `now`: device, allocated, highest peak of the step so far.

        Whether an outlook warns: viewers should have it before this forward has run. Whether all is settled: while as
        much is allocated, the same batch needs no other outlook.
        """
        self._groups.append((step, shapes))
        devices = self._devices
        warns, settled = False, not self._functions
        if not devices:
            return warns, settled
        if self._newest[0] != shapes:
            self._newest = shapes, features(shapes), tuple(map(len, shapes))
        _, batch, ranks = self._newest
        if batch is None:
            return warns, settled
        kind = index > 0, ranks
        for device, allocated, so_far in now:
            known = devices.get(device)
            if known is None:
                continue
            shape_model = known.shape_model
            start = allocated if allocated is not None else shape_model.start
            if start is None:
                continue
            if index:
                first = known.first
            else:
                first = None
                known.first = start
            predicted = shape_model.peak(batch, kind, start, first)
            if predicted is None:
                continue
            peak, phase, sort = predicted
            low, high, trusted = shape_model.interval(peak, sort, batch, kind)
            low = low if low > start else start  # already allocated
            budget = self.budget.get(device)
            word, headroom = verdict(peak, low, high, trusted, budget, self.limits.get(device), known.fragments)
            if so_far > peak:
                peak, phase, low, high = so_far, BETWEEN, so_far, max(high, so_far)
            warning = word in (OOM_AHEAD, TIGHT)
            settled = settled and not warning
            if index and word != OOM_AHEAD and 100 * abs(peak - known.said) <= peak:
                continue  # within 1 % of the step's last outlook
            known.said = peak
            fields: Fields = [
                step, device, _now_ns(), peak, low, high, phase, word, headroom, nbytes,
                tuple(shapes[:wire.SHAPES_MAX]),
            ]  # fmt: skip
            self._append(fields)
            warns = warns or warning
            if self._functions:
                self.waiting = wire.Outlook(*fields)
            if self._prints and word == OOM_AHEAD:
                say(sentence(wire.Outlook(*fields)))
        return warns, settled

    def noted(self, step: int, shapes: Sequence[tuple[int, ...]]) -> None:
        """A batch of `step` that needs no outlook: only the shape model learns from it."""
        self._groups.append((step, shapes))

    def tell(self) -> None:
        """Calls the user's functions with the newest outlook. Their exceptions pass through."""
        outlook, self.waiting = self.waiting, None
        if outlook is not None:
            for function in tuple(self._functions):
                function(outlook)

    def follow(self, event: wire.NumberedEvent | Noted) -> None:
        """Call with each drained event, in order."""
        if isinstance(event, wire.Phase):
            self._open.append(event)
            if len(self._open) > 4 * wire.PHASES_PER_STEP_MAX:
                del self._open[: wire.PHASES_PER_STEP_MAX]
        elif isinstance(event, wire.Step):
            self._step_closed(event.step)
        elif isinstance(event, Noted):
            self._follow_noted(event)
        elif isinstance(event, wire.Oom) and event.free is not None and event.reserved is not None:
            can_have = event.free + event.reserved
            self.budget[event.device] = can_have if event.total is None else min(can_have, event.total)

    def _step_closed(self, step: int) -> None:
        phases, self._open = self._open, []
        groups: list[Shapes] = []
        while self._groups and self._groups[0][0] <= step:
            at, shapes = self._groups.popleft()
            if at == step:
                groups.append(shapes)
        self._noted = 0
        self._learn(step, phases, groups)

    def _follow_noted(self, noted: Noted) -> None:
        count = noted.count
        while self._groups and self._groups[0][0] < noted.step + count:
            self._groups.popleft()
        if noted.alike and noted.alike == self._noted and self._alike > _ALIKE_MAX:
            return
        for phases, groups, closed in noted.steps():
            self._learn(closed.step, phases, groups)
        self._noted = noted.alike

    def _learn(self, step: int, phases: list[wire.Phase], groups: list[Shapes]) -> None:
        if self._nothing_new(phases, groups):
            return
        for device in {phase.device for phase in phases}:
            here = [phase for phase in phases if phase.device == device and phase.step == step]
            if not here:
                continue
            known = self._devices.get(device)
            shape_model = ShapeModel() if known is None else known.shape_model
            if not shape_model.learn(step, here, groups):
                if here[-1].phase == wire.OPTIMIZER:
                    shape_model.carry(here[-1], groups)
            else:
                fragments = Fragments(self._expandable) if known is None else known.fragments
                fragments.learn(here)
                if known is None:
                    self._devices[device] = _Device(shape_model, fragments)

    def _nothing_new(self, phases: list[wire.Phase], groups: list[Shapes]) -> bool:
        figures: Figures = [
            (e.device, e.phase, e.flags, e.allocated, e.allocated_peak, e.reserved, e.inactive_split, e.retries)
            for e in phases
        ]
        figures += groups
        if figures != self._like:
            self._like, self._alike = figures, 0
        self._alike += 1
        return self._alike > _ALIKE_MAX

    def drained(self, events: list[tuple[int, wire.NumberedEvent | Noted]]) -> None:
        for _, event in events:
            self.follow(event)


def sentence(outlook: wire.Outlook) -> str:
    """One line for a terminal."""
    where = f"on device {outlook.device}"
    text = f"step {outlook.step} will not fit: {outlook.phase} needs {torch_size(outlook.next_peak)} {where}"
    if outlook.headroom is not None and outlook.headroom < 0:
        text += f", {torch_size(-outlook.headroom)} more than available"
    return text


class Followed:
    """Wraps a recorder's `drain`: makes the outlooks among its events (recorded as lists), then calls `follow`."""

    def __init__(
        self,
        drain: Callable[[], list[tuple[int, Any]]],
        follow: Callable[[list[tuple[int, wire.NumberedEvent | Noted]]], object],
    ) -> None:
        self._drain = drain
        self._follow = follow

    def drain(self) -> list[tuple[int, wire.NumberedEvent | Noted]]:
        events: list[tuple[int, wire.NumberedEvent | Noted]] = [
            (seq, wire.Outlook(*event) if isinstance(event, list) else event) for seq, event in self._drain()
        ]
        self._follow(events)
        return events
