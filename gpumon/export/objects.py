"""Turns a stream of wire messages into the objects of `--json`, each as soon as its data is complete."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec

from gpumon.analysis import Reporter
from gpumon.analysis.answer import Answer, of_rank, worst
from gpumon.analysis.job import job
from gpumon.analysis.layers import trees
from gpumon.analysis.reports import room_known
from gpumon.analysis.types import Finding
from gpumon.export import jsonl
from gpumon.session.frame import HostSample, LayersRecord, RankFrame, StepRecord
from gpumon.session.store import SessionStore
from gpumon_agent import wire


class Stated(msgspec.Struct, frozen=True):
    """One object, with its keys for counting."""

    source: str
    object: jsonl.Object
    live: bool
    part: int | str = 0  # which of a rank's several: a model's index, a step's device, a finding

    @property
    def kind(self) -> str:
        return str(self.object["type"])


class _Said(msgspec.Struct):
    hello: wire.Hello | None = None
    models: dict[int, int] = msgspec.field(default_factory=dict)  # model → revision
    step: StepRecord | None = None
    progress: wire.Progress | None = None
    layers: dict[tuple[int, int], LayersRecord] = msgspec.field(default_factory=dict)  # by model and device
    findings: dict[tuple[str, str, int | None], tuple[str | None, ...]] = msgspec.field(default_factory=dict)
    """(code, subject, since) → last printed state, severity, holder, where"""
    ended: bool = False


class Objects:
    """Takes each message in the order of `link`."""

    def __init__(self, *, replaying: bool = False, rank: int | None = None) -> None:
        self._store = SessionStore(replaying=replaying)
        self._reporter = Reporter()
        self._only_rank = rank
        self._said: dict[str, _Said] = {}
        self._answers: dict[str, Answer] = {}  # by source
        self._answered: Answer | None = None  # the job's, as last printed

    def take(self, received: wire.Received) -> Iterator[Stated]:
        """Objects that this completes."""
        self._store.apply(received)
        event = received.event
        if isinstance(event, wire.Host):
            yield from self._host(received, event)
            return
        if isinstance(event, wire.Link):
            for each in self._on(event.host, received.unix_ns):
                yield from self._answer(each, received.unix_ns, not received.replayed)
            return
        if isinstance(event, (wire.Phase, wire.Ledger, wire.Notice)):
            return
        if isinstance(event, wire.Heartbeat) and not event.off:
            return
        rank = self._store.rank(received.source, received.unix_ns)
        if rank is None or (self._only_rank is not None and rank.hello.rank != self._only_rank):
            return
        said = self._said.setdefault(received.source, _Said())
        live = not received.replayed
        if isinstance(event, wire.Hello):
            self._reporter.meet(rank)
            if said.hello is None or not _same(said.hello, event):
                said.hello = event
                yield Stated(rank.source, jsonl.hello(rank, received.unix_ns), live)
        elif isinstance(event, (wire.Model, wire.Module, wire.Synced)):
            yield from self._models(rank, said, received, whole=isinstance(event, wire.Synced))
            if said.models:
                yield from self._answer(rank, received.unix_ns, live)
        elif isinstance(event, wire.Step):
            yield from self._step(rank, said, received, event)
            yield from self._answer(rank, received.unix_ns, live)
        elif isinstance(event, wire.Outlook):
            obj = jsonl.outlook(rank, event, replayed=received.replayed)
            yield Stated(rank.source, obj, live, event.device)
            if event.verdict == wire.OOM_AHEAD:
                found = self._reporter.rank(rank).findings
                yield from self._findings(rank, said, found, rank.unix_ns(event.t_ns), live)
                yield from self._answer(rank, received.unix_ns, live)
        elif isinstance(event, wire.Progress):
            if event is rank.progress and event != said.progress:
                said.progress = event
                yield Stated(rank.source, jsonl.progress(rank, event, replayed=received.replayed), live)
        elif isinstance(event, wire.Layers):
            yield from self._layers(rank, said, received)
        elif isinstance(event, (wire.Census, wire.Checkpoint, wire.Heartbeat)):
            yield from self._findings(rank, said, self._reporter.rank(rank).findings, received.unix_ns, live)
            yield from self._answer(rank, received.unix_ns, live)
        elif isinstance(event, wire.Oom):
            report = self._reporter.rank(rank).oom
            if report is not None:
                yield Stated(rank.source, jsonl.oom(rank, event, report), live)
                yield from self._answer(rank, received.unix_ns, live)
        elif isinstance(event, wire.Goodbye) and not said.ended:
            said.ended = True
            yield from self._findings(rank, said, self._reporter.rank(rank).findings, received.unix_ns, live)
            yield from self._answer(rank, received.unix_ns, live)
            yield Stated(rank.source, jsonl.goodbye(rank, event, received.unix_ns, self._first(received)), live)

    @property
    def room_known(self) -> bool:
        """Whether the device budget of every live rank is known."""
        frame = self._store.frame(time.time_ns())
        return room_known(frame, [self._reporter.rank(rank) for rank in frame.ranks])

    def now(self, unix_ns: int) -> Iterator[Stated]:
        """The current newest step, open findings and answer, whether printed before or not."""
        frame = self._store.frame(unix_ns)
        ranks = [each for each in frame.ranks if self._only_rank is None or each.hello.rank == self._only_rank]
        for rank in ranks:
            report = self._reporter.rank(rank)
            newest = rank.steps[-1] if rank.steps else None
            if newest is not None:
                seen = newest.devices()
                for device in report.devices:
                    if device.device in seen:
                        yield Stated(rank.source, jsonl.step(rank, newest, device), True, device.device)
            for at, found in enumerate(each for each in report.findings if each.state == "open"):
                yield Stated(rank.source, jsonl.finding(rank, found, frame.unix_ns), True, at)
            self._answers[rank.source] = of_rank(rank, report, frame.unix_ns)
        if ranks:
            self._answered = worst(self._answers.values(), self._answered)
            yield Stated(ranks[-1].source, jsonl.answer(self._answered, frame.unix_ns), True)

    def _answer(self, rank: RankFrame, unix_ns: int, live: bool) -> Iterator[Stated]:
        """The answer, if its state or the rank it names has changed."""
        hello = rank.hello
        if rank.source not in self._answers and hello.rank is not None:
            for source in [s for s, each in self._said.items() if each.hello and each.hello.rank == hello.rank]:
                self._answers.pop(source, None)  # a launcher has replaced that process
        self._answers[rank.source] = of_rank(rank, self._reporter.rank(rank), unix_ns)
        found = worst(self._answers.values(), self._answered)
        if self._answered is None or found.key != self._answered.key:
            yield Stated(rank.source, jsonl.answer(found, unix_ns), live)
        self._answered = found

    def _first(self, received: wire.Received) -> RankFrame | None:
        """The first rank to die, as far as known; the last goodbye has the final answer."""
        frame = self._store.frame(received.unix_ns)
        source = job(frame).first_to_die
        return next((rank for rank in frame.ranks if rank.source == source), None)

    def _models(self, rank: RankFrame, said: _Said, received: wire.Received, *, whole: bool) -> Iterator[Stated]:
        """Models whose modules have all arrived. `whole`: no more will come, so yield what is there."""
        for record in rank.models:
            complete = whole or len(record.modules) >= record.model.modules
            if complete and said.models.get(record.model.model) != record.model.revision:
                said.models[record.model.model] = record.model.revision
                obj = jsonl.model(rank, record, received.unix_ns)
                yield Stated(rank.source, obj, not received.replayed, record.model.model)

    def _layers(self, rank: RankFrame, said: _Said, received: wire.Received) -> Iterator[Stated]:
        """Layer records that are complete."""
        fresh = {(r.model, r.device): r for r in rank.layers if said.layers.get((r.model, r.device)) is not r}
        said.layers.update(fresh)
        for tree in trees(rank) if fresh else ():
            if (tree.model, tree.device) in fresh:
                obj = jsonl.layers(rank, tree, received.unix_ns)
                yield Stated(rank.source, obj, not received.replayed, tree.model)

    def _step(self, rank: RankFrame, said: _Said, received: wire.Received, event: wire.Step) -> Iterator[Stated]:
        newest = rank.steps[-1]
        if newest.step != event.step or newest is said.step:
            return
        said.step = newest
        live = not received.replayed
        report = self._reporter.rank(rank)
        seen = {phase.device for phase in newest.phases}
        for device in report.devices:
            if device.device in seen:
                yield Stated(rank.source, jsonl.step(rank, newest, device), live, device.device)
        yield from self._findings(rank, said, report.findings, rank.unix_ns(event.t_ns), live)

    def _findings(
        self, rank: RankFrame, said: _Said, findings: tuple[Finding, ...], unix_ns: int, live: bool
    ) -> Iterator[Stated]:
        """Each finding when it opens, when its holder, line or severity changes, and when it is gone."""
        present = set()
        for found in findings:  # open ones first, then those that are gone, newest first
            key = (found.code, found.subject, found.step)
            state = (found.state, found.severity, found.holder, found.where)
            if key not in present and said.findings.get(key) != state:
                said.findings[key] = state
                yield Stated(rank.source, jsonl.finding(rank, found, unix_ns), live, "/".join(map(str, key)))
            present.add(key)
        for key in said.findings.keys() - present:
            del said.findings[key]

    def _on(self, host: str, unix_ns: int) -> list[RankFrame]:
        ranks = [self._store.rank(source, unix_ns) for source in self._store.sources()]
        return [rank for rank in ranks if rank is not None and rank.hello.host == host]

    def _host(self, received: wire.Received, event: wire.Host) -> Iterator[Stated]:
        here = self._on(event.host, received.unix_ns)
        pids = frozenset(rank.hello.pid for rank in here)
        for rank in here:
            if rank.goodbye is not None or (self._only_rank is not None and rank.hello.rank != self._only_rank):
                continue
            sample = HostSample(received.unix_ns, event)
            yield Stated(rank.source, jsonl.host(rank, sample, pids), not received.replayed)


def _same(left: wire.Hello, right: wire.Hello) -> bool:
    return msgspec.structs.replace(left, clock=right.clock) == right
