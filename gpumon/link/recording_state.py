"""What a reader must know that begins in the middle of a recording: the session so far, its steps thinned."""

from __future__ import annotations

from collections.abc import Iterator

from gpumon.session.frame import Frame, RankFrame, StepRecord
from gpumon.session.limits import StoreLimits
from gpumon.session.rank import facts_of
from gpumon.session.store import SessionStore
from gpumon_agent import wire
from gpumon_agent.wire.evidence import parts
from gpumon_agent.wire.thinning import kept
from gpumon_agent.wire.trained import layers

STEPS_MAX = 256
"""Old steps of all ranks together: 30 kB compressed, a twelfth of a frame."""

READINGS_MAX = 4
"""Of the host."""


class State:
    """Takes every message, and says it all again in short."""

    def __init__(self) -> None:
        self._store = SessionStore(StoreLimits(host_samples=READINGS_MAX))
        self._stride: dict[str, int] = {}  # by source

    def take(self, received: wire.Received) -> None:
        self._store.apply(received)

    def frame(self, unix_ns: int) -> Frame:
        return self._store.frame(unix_ns)

    def messages(self, unix_ns: int) -> Iterator[wire.Received]:
        frame = self._store.frame(unix_ns)
        at_most = max(1, STEPS_MAX // max(1, len(frame.ranks)))
        for rank in frame.ranks:
            for event in self._of(rank, at_most):
                yield wire.Received(rank.source, rank.heard_unix_ns, event, -1, True)
        hosts = {rank.hello.host: rank.host_samples for rank in frame.ranks}
        for name, samples in hosts.items():
            for sample in samples:
                yield wire.Received(f"host:{name}", sample.unix_ns, sample.host)

    def _of(self, rank: RankFrame, at_most: int) -> Iterator[wire.Event]:
        yield rank.hello
        for known in rank.models:
            yield known.model
            yield from known.modules
        yield from rank.heartbeats
        if rank.heartbeat is not None and rank.heartbeat.number is None:
            yield rank.heartbeat
        for step in self._steps(rank, at_most):
            phases = step.phases[-wire.PHASES_PER_STEP_MAX :]
            assert step.closed is not None
            yield wire.PastStep(step.closed, phases, step.ledgers[-wire.LEDGERS_PER_PAST_STEP :])
        if rank.steps:
            newest = rank.steps[-1].step
            thinned = wire.Thinned(newest, newest, self._stride[rank.source])
            self._store.apply(wire.Received(rank.source, rank.heard_unix_ns, thinned))
            yield thinned
        for record in rank.layers:
            yield from layers(record.model, record.device, record.step, record.layers, record.elsewhere)
        yield from rank.outlooks
        yield from rank.censuses
        yield from rank.checkpoints
        for read in rank.segments:
            each = tuple(parts(read.segments))
            for number, segments in enumerate(each):
                about = read.device, read.number, read.step, read.phase, read.t_ns, read.reason
                more = read.spent_ns, read.holders, read.walked
                yield wire.Segments(*about, number, len(each), segments, *more)
        if rank.snapshot is not None:
            yield rank.snapshot
        if rank.progress is not None:
            yield rank.progress
        if rank.oom is not None:
            yield rank.oom
        yield from rank.notices
        if rank.goodbye is not None:
            yield rank.goodbye
        if rank.synced:
            yield wire.Synced(0)

    def _steps(self, rank: RankFrame, at_most: int) -> list[StepRecord]:
        """At most so many, chosen like the agent's history."""
        records = {r.step: r for r in (*rank.older, *rank.steps) if r.closed is not None}
        about = [facts_of(record) for _, record in sorted(records.items())]
        stride = self._stride.get(rank.source, 1)
        while True:
            chosen = kept(about, stride)
            if len({step // stride for step in chosen}) <= at_most:
                break
            stride *= 2
        self._stride[rank.source] = stride
        return [records[step] for step in sorted(chosen)]
