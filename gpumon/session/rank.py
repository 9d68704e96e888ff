"""State of one training process, built from its events. Long: one method for each kind of event.

How events become steps: a `Phase` or `Ledger` joins the open step of its number; `wire.Step` closes it into one
immutable `StepRecord`. Live events may arrive before the snapshot of the past is complete, so older steps may close
after newer ones, and phases may arrive for a closed step: both are inserted in the right place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from operator import attrgetter

import msgspec

from gpumon.session.assembling import Assembly
from gpumon.session.evaluations import told_apart
from gpumon.session.frame import (
    SILENT_AFTER_NS,
    HostSample,
    LayersRecord,
    ModelRecord,
    RankFrame,
    SegmentsRecord,
    Status,
    StepRecord,
)
from gpumon.session.limits import StoreLimits
from gpumon.session.sequence_intervals import SequenceIntervals
from gpumon.session.steps import PackedSteps, StepRing
from gpumon_agent import wire
from gpumon_agent.wire.thinning import Facts, beat_is_kept, facts, kept

_PHASE = wire.Phase
_JOINING = (wire.Phase, wire.Ledger)  # looked up once: thousands of events a second pass here
_FIGURES = (
    "allocated", "allocated_peak", "reserved", "reserved_peak", "active", "inactive_split", "requested", "allocations"
)  # fmt: skip
_figures = attrgetter(*_FIGURES)
KNOWN_MAX = 256
_set = msgspec.structs.force_setattr


def refused(event: wire.Unread) -> str:
    """Sentence for an event that was not read."""
    return f"a message of kind {event.kind!r} was refused, for it breaks the protocol's bounds: {event.why}"


class _OpenStep:
    __slots__ = ("first_seq", "ledgers", "phases", "replayed")

    def __init__(self, seq: int, replayed: bool) -> None:
        self.phases: list[wire.Phase] = []
        self.ledgers: list[wire.Ledger] = []
        self.first_seq = seq  # below 0 until a numbered event joins: ledgers of the static picture have none
        self.replayed = replayed


class Rank:
    def __init__(self, source: str, limits: StoreLimits, arrival: int) -> None:
        self.source = source
        self.limits = limits
        self.arrival = arrival
        self.hello: wire.Hello | None = None
        self.models: dict[int, wire.Model] = {}
        self.modules: dict[int, dict[str, wire.Module]] = {}
        self.steps = StepRing(limits.steps)
        self.newest = -2  # number of the last one; at first below all, of which the least is -1
        self.open: dict[int, _OpenStep] = {}
        self._known: dict[object, object] = {}  # figures of the newest steps
        self.numbers = SequenceIntervals(limits.gaps)
        self.heartbeat: wire.Heartbeat | None = None
        self._beats: dict[int, wire.Heartbeat] = {}
        self._beats_view: tuple[wire.Heartbeat, ...] = ()
        self.heard_unix_ns = 0
        self.synced = False
        self.catching_up = False
        self.oom: wire.Oom | None = None
        self.notices: deque[wire.Notice] = deque(maxlen=limits.notices)
        self.goodbye: wire.Goodbye | None = None
        self.refused: set[str] = set()  # kinds of events
        self.layers: dict[tuple[int, int], LayersRecord] = {}  # by model and device
        self._layers_parts: dict[tuple[int, int], Assembly[wire.Layers]] = {}  # likewise
        self.outlooks: dict[int, wire.Outlook] = {}  # by device
        self.censuses: tuple[wire.Census, ...] = ()
        self.checkpoints: dict[tuple[int, int], wire.Checkpoint] = {}  # by load and device
        self.segments: dict[int, SegmentsRecord] = {}  # by device
        self._segments_parts: dict[int, Assembly[wire.Segments]] = {}
        self.snapshot: wire.Snapshot | None = None
        self.progress: wire.Progress | None = None
        self.trackers: wire.Trackers | None = None
        self.older = PackedSteps()  # steps before those, kept by `thinned`
        self._arriving: dict[int, StepRecord] = {}  # such steps, until `thinned` follows them
        self.thinned: wire.Thinned | None = None
        self._older_max = limits.older
        self._layers_view: tuple[LayersRecord, ...] | None = ()
        self._models_view: tuple[ModelRecord, ...] | None = ()

    def keep(self, steps: int, older: int) -> None:
        """Sets the limits for the newest and the thinned steps."""
        self.steps.keep(steps)
        self._older_max = older

    # ------------------------------------------------------------------------------------------------ events in

    def apply(self, received: wire.Received) -> None:
        if received.unix_ns > self.heard_unix_ns:
            self.heard_unix_ns = received.unix_ns
        seq = received.seq
        if seq >= 0 and not self.numbers.take(seq):
            return
        event = received.event
        if isinstance(event, wire.Phase):
            self._join(event.step, seq, received.replayed).phases.append(event)
            if event.step <= self.newest:
                self._settle(event.step)
        elif isinstance(event, wire.Step):
            self._close(event, seq, received.replayed)
        elif isinstance(event, wire.Ledger):
            self._join(event.step, seq, received.replayed).ledgers.append(event)
            if event.step <= self.newest:
                self._settle(event.step)
        elif isinstance(event, wire.Heartbeat):
            self._beat(event)
        else:
            self._describe(event, received.replayed)

    def apply_run(self, unix_ns: int, events: Sequence[wire.Event], seq: int, replayed: bool) -> bool:
        """The same for events that came together. False, and nothing is done, if they do not follow the last ones."""
        if not self.numbers.take_next(seq, seq + len(events) - 1):
            return False
        if unix_ns > self.heard_unix_ns:
            self.heard_unix_ns = unix_ns
        closed = self.newest
        into: _OpenStep | None = None  # the step joined last: `_join` costs more than the rest
        at = events_left = 0
        for event in events:
            if isinstance(event, _JOINING):
                step = event.step
                if into is None or step != at or not events_left:
                    into, at = self._join(step, seq, replayed), step
                    events_left = self.limits.events_per_step - len(into.phases) - len(into.ledgers)
                if isinstance(event, _PHASE):
                    into.phases.append(event)
                else:
                    into.ledgers.append(event)
                events_left -= 1
                if step <= closed:
                    self._settle(step)
                    into = None
            elif isinstance(event, wire.Step):
                self._close(event, seq, replayed)
                closed, into = self.newest, None
            else:
                self._describe(event, replayed)
            seq += 1
        return True

    def _describe(self, event: wire.Event, replayed: bool) -> None:
        self.catching_up = self.catching_up or (replayed and not self.synced)
        if isinstance(event, wire.Hello):
            self.hello = event
        elif isinstance(event, wire.Model):
            self._model(event)
        elif isinstance(event, wire.Module):
            known = self.models.get(event.model)
            modules = self.modules.setdefault(event.model, {})
            if (known is None or known.revision == event.revision) and len(modules) < self.limits.modules:
                modules[event.path] = event
                self._models_view = None
        elif isinstance(event, wire.Layers):
            self._layers(event)
        elif isinstance(event, wire.Synced):
            self.synced = True
            self.catching_up = False
        elif isinstance(event, wire.Oom):
            if self.oom is None or event.t_ns >= self.oom.t_ns:
                self.oom = event
        elif isinstance(event, wire.Notice):
            if event not in self.notices:  # snapshots repeat old ones
                self.notices.append(event)
        elif isinstance(event, wire.PastStep):
            self._past(event)
        elif isinstance(event, wire.Thinned):
            self._thin(event)
        elif isinstance(event, wire.Goodbye):
            self.goodbye = event
        elif isinstance(event, wire.Unread):
            self._refused(event)
        else:
            self._evidence(event)

    def _refused(self, event: wire.Unread) -> None:
        """Reported once per kind of event, so that a broken agent cannot fill the log."""
        if event.why is None or event.kind in self.refused or len(self.refused) >= self.limits.notices:
            return
        self.refused.add(event.kind)
        clock = self.hello.clock if self.hello is not None else wire.Clock(0, 0)
        t_ns = self.heard_unix_ns - clock.unix_ns + clock.monotonic_ns
        self.notices.append(wire.Notice(t_ns, refused(event)))

    def _model(self, event: wire.Model) -> None:
        known = self.models.get(event.model)
        if known is None and len(self.models) >= self.limits.models:
            return
        if known is not None and event.revision < known.revision:
            return
        modules = self.modules.get(event.model, {})
        self.modules[event.model] = {p: m for p, m in modules.items() if m.revision == event.revision}
        self.models[event.model] = event
        self._models_view = None

    def _layers(self, event: wire.Layers) -> None:
        """Shown once all parts of a step's set are there, until a newer set is complete."""
        key = (event.model, event.device)
        known = self.layers.get(key)
        if known is None and len(self.layers) >= self.limits.models:
            return
        if (known and event.step < known.step) or event.parts * wire.LAYERS_PER_PART > self.limits.layers:
            return
        parts = self._layers_parts.setdefault(key, Assembly()).add(event.step, event)
        if parts is None:
            return
        layers = tuple(layer for part in parts for layer in part.layers)
        record = LayersRecord(event.model, event.device, event.step, layers, parts[-1].elsewhere)
        if record != known:  # the static picture repeats the newest
            self.layers[key] = record
            self._layers_view = None

    def _segments(self, event: wire.Segments) -> None:
        if event.parts * wire.BLOCKS_PER_PART > self.limits.blocks:
            return
        if event.device not in self.segments and len(self.segments) >= self.limits.models:
            return
        parts = self._segments_parts.setdefault(event.device, Assembly()).add(event.number, event)
        if parts is not None:
            whole = tuple(segment for part in parts for segment in part.segments)
            self.segments[event.device] = SegmentsRecord(
                event.device, event.number, event.step, event.phase, event.t_ns, event.reason, whole, event.spent_ns,
                event.holders, event.walked,
            )  # fmt: skip

    def _evidence(self, event: wire.Event) -> None:
        if isinstance(event, wire.Outlook):
            if event.device in self.outlooks or len(self.outlooks) < self.limits.models:
                self.outlooks[event.device] = event
        elif isinstance(event, wire.Census):
            known = {census.number: census for census in self.censuses}
            known[event.number] = event
            self.censuses = tuple(known[number] for number in sorted(known)[-wire.CENSUSES_KEPT :])
        elif isinstance(event, wire.Checkpoint):
            key = (event.number, event.device)
            self.checkpoints[key] = event
            if len(self.checkpoints) > self.limits.checkpoints:
                del self.checkpoints[min(self.checkpoints)]
        elif isinstance(event, wire.Segments):
            self._segments(event)
        elif isinstance(event, wire.Snapshot):
            self.snapshot = event
        elif isinstance(event, wire.Progress) and (self.progress is None or event.t_ns >= self.progress.t_ns):
            self.progress = event
        elif isinstance(event, wire.Trackers):
            self.trackers = event

    def _beat(self, event: wire.Heartbeat) -> None:
        known = self.heartbeat
        if known is None or event.t_ns >= known.t_ns:  # snapshots contain older ones
            self.heartbeat = event
        if event.number is None or event.number in self._beats:
            return
        self._beats[event.number] = event
        newest = max(event.number, self.heartbeat.number or 0) if self.heartbeat is not None else event.number
        self._beats = {n: self._beats[n] for n in sorted(self._beats) if beat_is_kept(n, newest)}
        self._beats_view = tuple(self._beats.values())

    def _past(self, event: wire.PastStep) -> None:
        closed, phases, ledgers = event.closed, event.phases, event.ledgers
        at = bisect_left(self.steps, closed.step, key=lambda record: record.step)
        if at < len(self.steps) and self.steps[at].step == closed.step:
            return  # this viewer has it in full
        if len(self._arriving) >= self.limits.older:
            return
        phases, alone, highest = _in_order(phases)
        complete = closed.phases is None or closed.phases == len(phases)
        if closed.evaluated and complete:
            phases, ledgers = told_apart(phases, ledgers, closed.evaluated)
        record = StepRecord(closed.step, closed, phases, ledgers, True, complete, alone, highest)
        self._share(record)
        self._arriving[closed.step] = record

    def _thin(self, event: wire.Thinned) -> None:
        """Thins the steps up to `event.until` like the helper."""
        arrived, self._arriving = self._arriving, {}
        if self.thinned is not None and event.newest < self.thinned.newest:
            return  # repeated
        past = {record.step: record for record in self.older} | arrived
        past |= {record.step: record for record in self.steps.drop_until(event.until)}
        about, stride = [facts_of(past[step]) for step in sorted(past)], event.stride
        while True:
            chosen = kept(about, stride)
            if len(chosen) <= self._older_max or stride > event.newest:
                break
            stride *= 2  # there are many ranks
        self.older = PackedSteps([past[step] for step in sorted(chosen)])
        self.thinned = event

    def _join(self, step: int, seq: int, replayed: bool) -> _OpenStep:
        """The open step of that number; if it is closed, a new one that `_settle` merges into it."""
        found = self.open.get(step)
        if found is None:
            if len(self.open) >= self.limits.open_steps:
                del self.open[min(self.open)]
            found = self.open[step] = _OpenStep(seq, replayed)
        elif len(found.phases) + len(found.ledgers) >= self.limits.events_per_step:
            found.phases = found.phases[1:]
            found.ledgers = found.ledgers[-self.limits.events_per_step // 2 :]
        if seq >= 0 and (found.first_seq < 0 or seq < found.first_seq):
            found.first_seq = seq
        return found

    def _close(self, event: wire.Step, seq: int, replayed: bool) -> None:
        built = self.open.pop(event.step, None)
        phases, alone, highest = _in_order(tuple(built.phases) if built else ())
        first = built.first_seq if built and built.first_seq >= 0 else seq
        complete = event.phases is None or event.phases == len(phases)
        ledgers = tuple(built.ledgers) if built else ()
        if event.evaluated and complete:
            phases, ledgers = told_apart(phases, ledgers, event.evaluated)
        record = StepRecord(
            step=event.step,
            closed=event,
            phases=phases,
            ledgers=ledgers,
            replayed=replayed,
            whole=complete and (seq < 0 or self.numbers.unbroken(first, seq)),
            alone=alone,
            highest=highest,
        )
        self._share(record)
        steps = self.steps
        if self.newest < event.step:
            steps.append(record)
            self.newest = event.step
        else:
            at = self._position(event.step)
            # the same step closed twice: a second optimizer, or a restarted count
            if at < len(steps) and steps[at].step == event.step:
                steps.put(at, record)
            else:
                steps.insert(at, record)
        if self.open and (not replayed or self.synced):  # older ones will not close any more
            for step in [s for s in self.open if s < event.step]:
                del self.open[step]

    def _share(self, record: StepRecord) -> None:
        """Figures equal to others of the newest steps become the same objects: they are half of a step's memory."""
        known = self._known
        if len(known) > KNOWN_MAX:
            known.clear()
        for phase in record.phases:
            _set(phase, "step", record.step)
            for name, value in zip(_FIGURES, _figures(phase), strict=True):
                again = known.setdefault(value, value)
                if again is not value:
                    _set(phase, name, again)
        if record.closed is not None:
            shapes = record.closed.input_shapes
            _set(record.closed, "input_shapes", known.setdefault(shapes, shapes))

    def _settle(self, step: int) -> None:
        """Late events of a closed step: replaces its record."""
        steps = self.steps
        late = self.open.pop(step)
        at = self._position(step)
        known = steps[at] if at < len(steps) else None
        if known is None or known.step != step or known.closed is None:
            if at or len(steps) < self.limits.steps:
                self.open[step] = late
            return
        phases, alone, highest = _in_order(known.phases + tuple(late.phases))
        phases = phases[-self.limits.events_per_step :]
        ledgers = (known.ledgers + tuple(late.ledgers))[-self.limits.events_per_step :]
        expected = known.closed.phases
        if known.closed.evaluated and len(phases) == expected:
            phases, ledgers = told_apart(phases, ledgers, known.closed.evaluated)
        steps.put(
            at,
            msgspec.structs.replace(
                known,
                phases=phases,
                ledgers=ledgers,
                whole=known.whole if expected is None else len(phases) == expected,
                alone=alone,
                highest=highest,
            ),
        )

    def _position(self, step: int) -> int:
        """Index of the first record with a number of at least `step`; past the end if there is none."""
        steps = self.steps
        at = len(steps) - 1
        if at > 0 and steps[at - 1].step < step <= steps[at].step:
            return at
        return bisect_left(steps, step, key=lambda record: record.step)

    # ------------------------------------------------------------------------------------------------ frames out

    def status(self, now_unix_ns: int) -> Status:
        if self.goodbye is not None:
            return "ended"
        return "silent" if now_unix_ns - self.heard_unix_ns > SILENT_AFTER_NS else "live"

    @property
    def stepped_unix_ns(self) -> int:
        """When its newest step closed; 0: none."""
        closed = self.steps[-1].closed if self.steps else None
        if closed is None or self.hello is None:
            return 0
        return self.hello.clock.unix_ns + (closed.t_ns - self.hello.clock.monotonic_ns)

    def frame(
        self, hello: wire.Hello, now_unix_ns: int, samples: tuple[HostSample, ...], lost_link: str | None = None
    ) -> RankFrame:
        if self._models_view is None:
            self._models_view = tuple(
                ModelRecord(model, tuple(self.modules.get(index, {}).values()))
                for index, model in sorted(self.models.items())
            )
        if self._layers_view is None:
            self._layers_view = tuple(record for _, record in sorted(self.layers.items()))
        newest = samples[-1] if samples else None
        return RankFrame(
            source=self.source,
            hello=hello,
            models=self._models_view,
            steps=self.steps.view(),
            open_step=self._open_step(),
            heartbeat=self.heartbeat,
            heartbeats=self._beats_view,
            heard_unix_ns=self.heard_unix_ns,
            status=self.status(now_unix_ns),
            synced=self.synced,
            lost_events=0 if self.catching_up else self.numbers.lost(),
            oom=self.oom,
            notices=tuple(self.notices),
            goodbye=self.goodbye,
            host=newest.host if newest else None,
            host_unix_ns=newest.unix_ns if newest else None,
            host_samples=samples,
            layers=self._layers_view,
            outlooks=tuple(self.outlooks[device] for device in sorted(self.outlooks)),
            census=self.censuses[-1] if self.censuses else None,
            checkpoints=tuple(self.checkpoints[key] for key in sorted(self.checkpoints)),
            segments=tuple(self.segments[device] for device in sorted(self.segments)),
            snapshot=self.snapshot,
            censuses=self.censuses,
            older=self.older,
            thinned=self.thinned,
            progress=self.progress,
            lost_link=lost_link if self.goodbye is None else None,
            trackers=self.trackers,
        )

    def _open_step(self) -> StepRecord | None:
        if not self.open:
            return None
        step = max(self.open)
        if step < self.newest:
            return None
        built = self.open[step]
        phases, alone, highest = _in_order(tuple(built.phases))
        return StepRecord(step, None, phases, tuple(built.ledgers), built.replayed, alone=alone, highest=highest)


def facts_of(record: StepRecord) -> Facts:
    """Of a closed step."""
    assert record.closed is not None
    peaks = ((phase.device, phase.allocated_peak) for phase in record.phases)
    return facts(record.closed, len(record.phases), peaks, len(record.ledgers))


def _in_order(phases: tuple[wire.Phase, ...]) -> tuple[tuple[wire.Phase, ...], int | None, int]:
    """Phases in order of time (as they arrive, unless live and replayed ones mix); their device if there is only one;
    the highest peak there.
    """
    if not phases:
        return phases, None, -1
    before, alone, one, highest = phases[0].t_ns, phases[0].device, True, -1
    for phase in phases:
        if phase.t_ns < before:
            return _in_order(tuple(sorted(phases, key=lambda phase: phase.t_ns)))
        before = phase.t_ns
        if phase.device != alone:
            one = False
        peak = phase.allocated_peak
        if peak is not None and peak > highest:
            highest = peak
    return (phases, alone, highest) if one else (phases, None, -1)
