"""A run as its helper serves it: to a viewer that is there from the start, and to one that comes late."""

from __future__ import annotations

from collections.abc import Iterator

from synthetic import Run

from gpumon.session.frame import Frame
from gpumon.session.store import SessionStore
from gpumon_agent import wire
from gpumon_agent.transport.history import History
from gpumon_agent.transport.picture import Picture


class Served:
    """`go_on` by some steps; `early` is the store of who was there, `late` that of who comes now."""

    def __init__(self, run: Run, rss_per_step: int = 0) -> None:
        self.run = run
        self.rss_per_step = rss_per_step
        self.early = SessionStore()
        self._history = History()
        self._picture = Picture()
        self._newest: dict[str, wire.Received] = {}  # of the host
        self._step = 0
        for received in run.picture():
            self._hear(received.event)
        self.early.apply(self._unnumbered(wire.Synced(-1)))

    def go_on(self, steps: int) -> Frame:
        """The frame that an early viewer has then."""
        for _ in range(steps):
            for event in self.run.step_events(self._step):
                if isinstance(event, wire.Phase) and event.phase == "backward":
                    self._host(self.run.host(self._step))
                self._hear(event)
            thinned = self._history.thin()
            if thinned is not None:
                self.early.apply(self._unnumbered(thinned))
            if self._step % 20 == 0:  # a second
                beat = wire.Heartbeat(
                    self.run.time_ns(self._step), self._step, "forward", 0,
                    rss=(1 << 30) + self.rss_per_step * self._step, number=self._step // 20,
                )  # fmt: skip
                self._history.beat(beat)
                self.early.apply(self._unnumbered(beat))
            self._step += 1
        return self.early.frame(self._now)

    def late(self) -> Frame:
        store = SessionStore()
        for received in self._served():
            store.apply(received)
        for received in self._newest.values():
            store.apply(received)
        return store.frame(self._now)

    def arriving(self) -> Iterator[Frame]:
        """The frames of a viewer that comes now, as each step arrives."""
        store = SessionStore()
        for received in (*self._served(), *self._newest.values()):
            store.apply(received)
            if isinstance(received.event, (wire.Step, wire.Host)):
                yield store.frame(self._now)

    @property
    def _now(self) -> int:
        return self.run.unix_ns(self._step)

    def _host(self, received: wire.Received) -> None:
        self._newest[received.source] = received
        self.early.apply(received)

    def _hear(self, event: wire.Event) -> None:
        raw = wire.encode_event(event)
        if isinstance(event, wire.NumberedEvent):
            seq = self._history.newest + 1
            self._history.extend([(seq, raw)])
            self.early.apply(wire.Received(self.run.nonce, self._now, event, seq))
        else:
            self.early.apply(self._unnumbered(event))
        self._picture.add(event, raw)

    def _served(self) -> Iterator[wire.Received]:
        for raw in (*self._picture.events(), *self._history.past()):
            yield self._unnumbered(wire.decode_event(raw))
        for packet in self._history.packets():
            said = wire.decode_frame(wire.LIVE + packet)
            for seq, event in enumerate(said.events, said.seq):
                yield wire.Received(self.run.nonce, self._now, event, seq, True)
        yield self._unnumbered(wire.Synced(self._history.newest))

    def _unnumbered(self, event: wire.Event) -> wire.Received:
        return wire.Received(self.run.nonce, self._now, event, -1, True)
