"""Pure state of a session: events go in one by one, frozen Frames come out. No clock, no socket, no drawing.

`apply` is O(1) (a late event of an already closed step costs a bisection) and never raises, whatever the order or
loss of events. Memory is bounded: `StoreLimits` caps every ring, and the numbers of lost events are kept as a few
intervals, not one by one.

How events become steps: a `Phase` or `Ledger` joins the open step of its number; `wire.Step` closes it into one
immutable `StepRecord`. A viewer hears live events before the snapshot of the past is complete, so older steps may
close after newer ones, and phases may reach a step that is closed already: both are put where they belong.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, replace
from itertools import pairwise

from gpumon.session.frame import (
    SILENT_AFTER_NS,
    Frame,
    HostSample,
    ModelRecord,
    RankFrame,
    Status,
    StepRecord,
)
from gpumon_agent import wire


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """What a session keeps at most."""

    steps: int = 2_000  # closed steps a rank
    open_steps: int = 8  # steps under way a rank; more than one only while live and replayed events mix
    events_per_step: int = 8 * wire.PHASES_PER_STEP_MAX
    notices: int = 64
    modules: int = 65_536  # a model
    models: int = 64
    host_samples: int = 600  # a machine; ten minutes at one reading a second
    gaps: int = 64  # intervals of lost numbers a rank that a late snapshot may still fill
    ended: int = 64  # ranks that said goodbye


class _Numbers:
    """Which event numbers were received: disjoint closed intervals in order, the newest last."""

    __slots__ = ("_limit", "forgotten", "spans")

    def __init__(self, limit: int) -> None:
        self.spans: list[list[int]] = []
        self.forgotten = 0  # numbers in gaps that are no longer kept as such
        self._limit = limit

    def take(self, seq: int) -> bool:
        """True if `seq` is new."""
        spans = self.spans
        if spans:
            newest = spans[-1]
            if seq == newest[1] + 1:
                newest[1] = seq
                return True
            if seq > newest[1]:
                spans.append([seq, seq])
                if len(spans) > self._limit:
                    self.forgotten += spans[1][0] - spans[0][1] - 1
                    spans[0:2] = [[spans[0][0], spans[1][1]]]
                return True
            return self._take_older(seq)
        spans.append([seq, seq])
        return True

    def _take_older(self, seq: int) -> bool:
        spans = self.spans
        at = bisect_left(spans, seq, key=lambda span: span[1])  # the first span that ends at or after seq
        if spans[at][0] <= seq:
            return False
        joins_left = at > 0 and spans[at - 1][1] == seq - 1
        joins_right = spans[at][0] == seq + 1
        if joins_left and joins_right:
            spans[at - 1][1] = spans[at][1]
            del spans[at]
        elif joins_left:
            spans[at - 1][1] = seq
        elif joins_right:
            spans[at][0] = seq
        elif len(spans) < self._limit:
            spans.insert(at, [seq, seq])
        return True

    def lost(self) -> int:
        """Numbers missing between the lowest and the highest received."""
        gaps = sum(right[0] - left[1] - 1 for left, right in pairwise(self.spans))
        return gaps + self.forgotten

    def unbroken(self, first: int, last: int) -> bool:
        at = bisect_left(self.spans, last, key=lambda span: span[1])
        return at < len(self.spans) and self.spans[at][0] <= first


class _OpenStep:
    __slots__ = ("first_seq", "ledgers", "phases", "replayed")

    def __init__(self, seq: int, replayed: bool) -> None:
        self.phases: list[wire.Phase] = []
        self.ledgers: list[wire.Ledger] = []
        self.first_seq = seq  # below 0 until a numbered event joins: the static picture's ledger has no number
        self.replayed = replayed


class _Rank:
    """What is known of one training process so far."""

    def __init__(self, source: str, limits: StoreLimits, arrival: int) -> None:
        self.source = source
        self.limits = limits
        self.arrival = arrival
        self.hello: wire.Hello | None = None
        self.models: dict[int, wire.Model] = {}
        self.modules: dict[int, dict[str, wire.Module]] = {}
        self.steps: deque[StepRecord] = deque()
        self.open: dict[int, _OpenStep] = {}
        self.numbers = _Numbers(limits.gaps)
        self.heartbeat: wire.Heartbeat | None = None
        self.heard_unix_ns = 0
        self.synced = False
        self.catching_up = False
        self.oom: wire.Oom | None = None
        self.notices: deque[wire.Notice] = deque(maxlen=limits.notices)
        self.goodbye: wire.Goodbye | None = None
        self._steps_view: tuple[StepRecord, ...] | None = ()
        self._models_view: tuple[ModelRecord, ...] | None = ()

    # ------------------------------------------------------------------------------------------------ events in

    def apply(self, received: wire.Received) -> None:
        if received.unix_ns > self.heard_unix_ns:
            self.heard_unix_ns = received.unix_ns
        seq = received.seq
        if seq >= 0 and not self.numbers.take(seq):
            return
        event = received.event
        if isinstance(event, wire.Phase):
            self._join(event.step, received).phases.append(event)
            self._settle(event.step)
        elif isinstance(event, wire.Step):
            self._close(event, received)
        elif isinstance(event, wire.Ledger):
            self._join(event.step, received).ledgers.append(event)
            self._settle(event.step)
        elif isinstance(event, wire.Heartbeat):
            self.heartbeat = event
        else:
            self._describe(event, received)

    def _describe(self, event: wire.Event, received: wire.Received) -> None:
        self.catching_up = self.catching_up or (received.replayed and not self.synced)
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
        elif isinstance(event, wire.Synced):
            self.synced = True
            self.catching_up = False
        elif isinstance(event, wire.Oom):
            self.oom = event
        elif isinstance(event, wire.Notice):
            self.notices.append(event)
        elif isinstance(event, wire.Goodbye):
            self.goodbye = event

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

    def _join(self, step: int, received: wire.Received) -> _OpenStep:
        """The open step of that number; when it has closed already, a fresh one that `_settle` merges into it."""
        found = self.open.get(step)
        if found is None:
            if len(self.open) >= self.limits.open_steps:
                del self.open[min(self.open)]
            found = self.open[step] = _OpenStep(received.seq, received.replayed)
        elif len(found.phases) + len(found.ledgers) >= self.limits.events_per_step:
            found.phases = found.phases[1:]
            found.ledgers = found.ledgers[-self.limits.events_per_step // 2 :]
        if received.seq >= 0 and (found.first_seq < 0 or received.seq < found.first_seq):
            found.first_seq = received.seq
        return found

    def _close(self, event: wire.Step, received: wire.Received) -> None:
        built = self.open.pop(event.step, None)
        phases = tuple(built.phases) if built else ()
        first = built.first_seq if built and built.first_seq >= 0 else received.seq
        complete = event.phases is None or event.phases == len(phases)
        record = StepRecord(
            step=event.step,
            closed=event,
            phases=_in_order(phases),
            ledgers=tuple(built.ledgers) if built else (),
            replayed=received.replayed,
            whole=complete and (received.seq < 0 or self.numbers.unbroken(first, received.seq)),
        )
        steps = self.steps
        self._steps_view = None
        if not steps or steps[-1].step < event.step:
            steps.append(record)
        else:
            at = self._position(event.step)
            if steps[at].step == event.step:  # the same step closed twice: a second optimizer, or a restarted count
                steps[at] = record
            else:
                steps.insert(at, record)
        if len(steps) > self.limits.steps:
            steps.popleft()
        if not received.replayed or self.synced:  # what is older and still open will not close any more
            for step in [s for s in self.open if s < event.step]:
                del self.open[step]

    def _settle(self, step: int) -> None:
        """Late events of a step that has closed: a new record takes the old one's place."""
        steps = self.steps
        if not steps or step > steps[-1].step:
            return
        late = self.open.pop(step)
        at = self._position(step)
        known = steps[at]
        if known.step != step or known.closed is None:
            if step > steps[0].step or len(steps) < self.limits.steps:
                self.open[step] = late
            return
        phases = _in_order(known.phases + tuple(late.phases))[-self.limits.events_per_step :]
        expected = known.closed.phases
        steps[at] = replace(
            known,
            phases=phases,
            ledgers=(known.ledgers + tuple(late.ledgers))[-self.limits.events_per_step :],
            whole=known.whole if expected is None else len(phases) == expected,
        )
        self._steps_view = None

    def _position(self, step: int) -> int:
        """Index of the first record whose number is at least `step`; the deque's last one is known to be."""
        steps = self.steps
        at = len(steps) - 1
        if at > 0 and steps[at - 1].step < step:
            return at
        return bisect_left(steps, step, key=lambda record: record.step)

    # ------------------------------------------------------------------------------------------------ frames out

    def status(self, now_unix_ns: int) -> Status:
        if self.goodbye is not None:
            return "ended"
        return "silent" if now_unix_ns - self.heard_unix_ns > SILENT_AFTER_NS else "live"

    def frame(self, hello: wire.Hello, now_unix_ns: int, samples: tuple[HostSample, ...]) -> RankFrame:
        if self._steps_view is None:
            self._steps_view = tuple(self.steps)
        if self._models_view is None:
            self._models_view = tuple(
                ModelRecord(model, tuple(self.modules.get(index, {}).values()))
                for index, model in sorted(self.models.items())
            )
        newest = samples[-1] if samples else None
        return RankFrame(
            source=self.source,
            hello=hello,
            models=self._models_view,
            steps=self._steps_view,
            open_step=self._open_step(),
            heartbeat=self.heartbeat,
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
        )

    def _open_step(self) -> StepRecord | None:
        if not self.open:
            return None
        step = max(self.open)
        if self.steps and step < self.steps[-1].step:
            return None
        built = self.open[step]
        return StepRecord(step, None, _in_order(tuple(built.phases)), tuple(built.ledgers), built.replayed)


def _in_order(phases: tuple[wire.Phase, ...]) -> tuple[wire.Phase, ...]:
    """Phases in order of time; they arrive so unless live and replayed ones mixed."""
    if all(left.t_ns <= right.t_ns for left, right in pairwise(phases)):
        return phases
    return tuple(sorted(phases, key=lambda phase: phase.t_ns))


class SessionStore:
    """All ranks and machines of one session.

    `replaying`: events come from a recording; a rank's silence is then measured against the newest recorded moment.
    """

    def __init__(self, limits: StoreLimits | None = None, *, replaying: bool = False) -> None:
        self._limits = limits or StoreLimits()
        self._replaying = replaying
        self._ranks: dict[str, _Rank] = {}
        self._hosts: dict[str, deque[HostSample]] = {}
        self._host_views: dict[str, tuple[HostSample, ...]] = {}
        self._newest_unix_ns = 0
        self._arrivals = 0

    def apply(self, received: wire.Received) -> None:
        """Takes one event in."""
        if received.unix_ns > self._newest_unix_ns:
            self._newest_unix_ns = received.unix_ns
        rank = self._ranks.get(received.source)
        if rank is None:
            if isinstance(received.event, wire.Host):
                self._host(received.event, received.unix_ns)
                return
            self._arrivals += 1
            rank = self._ranks[received.source] = _Rank(received.source, self._limits, self._arrivals)
            self._forget_ended()
        rank.apply(received)

    def frame(self, now_unix_ns: int) -> Frame:
        """The picture at `now_unix_ns` (the receiver's clock); in a replay its newest recorded moment counts."""
        now = self._newest_unix_ns if self._replaying else now_unix_ns
        for name, samples in self._hosts.items():
            if name not in self._host_views:
                self._host_views[name] = tuple(samples)
        self._drop_replaced(now)
        order = sorted((r for r in self._ranks.values() if r.hello is not None), key=lambda r: self._order(r, now))
        ranks = tuple(
            rank.frame(rank.hello, now, self._host_views.get(rank.hello.host, ()))
            for rank in order
            if rank.hello is not None
        )
        hosts = tuple(samples[-1].host for _, samples in sorted(self._host_views.items()))
        return Frame(unix_ns=now, ranks=ranks, hosts=hosts, replaying=self._replaying)

    def rank(self, source: str, now_unix_ns: int) -> RankFrame | None:
        """One rank alone, for a consumer that acts on each event; None before its Hello."""
        rank = self._ranks.get(source)
        if rank is None or rank.hello is None:
            return None
        name = rank.hello.host
        if name in self._hosts and name not in self._host_views:
            self._host_views[name] = tuple(self._hosts[name])
        return rank.frame(rank.hello, now_unix_ns, self._host_views.get(name, ()))

    def sources(self) -> tuple[str, ...]:
        """Every rank that was heard of, in order of arrival."""
        return tuple(self._ranks)

    def _host(self, event: wire.Host, unix_ns: int) -> None:
        samples = self._hosts.get(event.host)
        if samples is None:
            samples = self._hosts[event.host] = deque(maxlen=self._limits.host_samples)
        samples.append(HostSample(unix_ns, event))
        self._host_views.pop(event.host, None)

    # ------------------------------------------------------------------------------------------------ restarts

    def _successor(self, rank: _Rank, now_unix_ns: int) -> _Rank | None:
        """The process that began under the same name and rank after this one fell silent or said goodbye."""
        hello = rank.hello
        if hello is None or rank.status(now_unix_ns) == "live":
            return None
        newest: _Rank | None = None
        for other in self._ranks.values():
            theirs = other.hello
            if theirs is None or other is rank:
                continue
            same = (theirs.name, theirs.host, theirs.rank) == (hello.name, hello.host, hello.rank)
            if (
                same
                and theirs.clock.unix_ns > hello.clock.unix_ns
                and (newest is None or other.arrival > newest.arrival)
            ):
                newest = other
        return newest

    def _drop_replaced(self, now_unix_ns: int) -> None:
        """An ended rank's last picture stays until the process that took its place has closed a step."""
        if len(self._ranks) < 2:
            return
        for source, rank in list(self._ranks.items()):
            successor = self._successor(rank, now_unix_ns)
            if successor is not None and successor.steps:
                del self._ranks[source]

    def _order(self, rank: _Rank, now_unix_ns: int) -> tuple[int, int, int, int]:
        hello = rank.hello
        if hello is None:
            return (0, 0, 0, 0)
        replaced = len(self._ranks) > 1 and self._successor(rank, now_unix_ns) is not None
        return (0 if replaced else 1, -1 if hello.rank is None else hello.rank, hello.pid, rank.arrival)

    def _forget_ended(self) -> None:
        ended = [source for source, rank in self._ranks.items() if rank.goodbye is not None]
        for source in ended[: max(0, len(ended) - self._limits.ended)]:
            del self._ranks[source]
