"""Plays a recording: at its pace, or at once to a step, to an event or to the end, forwards and backwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol

from gpumon.link.recording_index import Index
from gpumon.session.store import SessionStore
from gpumon.tui.feed import Pace
from gpumon.tui.ingest import APPLIED_A_TURN
from gpumon.tui.position import Moment, Position
from gpumon_agent import wire

NEAR = 5_000
"""Steps ahead to which it reads on; to farther ones it jumps, which costs about as much as that."""


class Recorded(Protocol):
    """A recording that can be read from any step on."""

    cut: str | None

    def __iter__(self) -> Iterator[wire.Received]: ...
    def near(self, step: int) -> Iterator[wire.Received]: ...
    def index(self) -> Index: ...


class Playback:
    def __init__(self, recording: Recorded, pace: Pace) -> None:
        self.pace = pace
        self.unix_ns = 0
        self.step = -1
        self.ended = False
        self._recording = recording
        self._index: Index | None = None
        self._moments: tuple[Moment, ...] = ()
        self._wanted: int | None = None
        self._wake = asyncio.Event()
        self._first_ns = 0
        self._shown = 0, -1  # time and step of the picture

    @property
    def position(self) -> Position:
        index = self._index
        first, last, steps = (index.first_ns, index.last_ns, index.last_step) if index is not None else (0, 0, -1)
        if self._wanted is None:
            self._shown = self.unix_ns, self.step
        return Position(
            *self._shown, min(first or self._first_ns, self._first_ns or first), last, steps,
            self.pace.speed, self.pace.held, self.ended, self._wanted, self._moments,
        )  # fmt: skip

    # -------------------------------------------------------------------------------------------------- wishes

    def go(self, step: int) -> None:
        """To this step, or to the recording's end if it has fewer."""
        self._wanted = max(0, step)
        self._wake.set()
        self.pace.wake()

    def go_by(self, steps: int) -> None:
        """Forwards or backwards; stays there."""
        self.pace.hold(True)
        if steps < 0 or not self.ended:
            self.go((self.step if self._wanted is None else self._wanted) + steps)

    def go_to_moment(self, by: int) -> Moment | None:
        """The next (1) or the previous (−1) one; None: there is none, or they are not known yet."""
        here = self.step if self._wanted is None else self._wanted
        found = [each for each in self._moments if (each.step > here if by > 0 else each.step < here)]
        if not found:
            return None
        chosen = found[0] if by > 0 else found[-1]
        self.pace.hold(True)
        self.go(chosen.step)
        return chosen

    def finish(self) -> None:
        """To the end."""
        self.go(self._index.last_step + 1 if self._index is not None else 1 << 60)

    # -------------------------------------------------------------------------------------------------- playing

    async def look(self) -> None:
        """Finds the recording's length and its events, beside the play."""
        self._index = index = await asyncio.to_thread(self._recording.index)
        self._moments = tuple(Moment(mark.kind, mark.step, mark.unix_ns) for mark in index.marks)

    async def run(
        self,
        store: SessionStore,
        renew: Callable[[], SessionStore],
        show: Callable[[SessionStore], object],
        at_end: Callable[[], object],
    ) -> None:
        """Until it is cancelled. `renew`: an empty store; `show`: this one is to be shown now."""
        events = iter(self._recording)
        while True:
            step = self._wanted
            if step is None:
                await self._play(events, store)
                if self._wanted is None:
                    self.ended = True
                    at_end()
                    await self._wake.wait()
                continue
            self._wake.clear()
            if not self.step < step <= self.step + NEAR or self.ended:
                events, store = self._recording.near(step), renew()
                self.ended, self.unix_ns, self.step = False, 0, -1
            reached = await self._catch_up(events, store, step)
            if self._wanted == step:
                self._wanted = None
                show(store)
                self.ended = not reached
                if self.ended:
                    at_end()
                    await self._wake.wait()

    async def _play(self, events: Iterator[wire.Received], store: SessionStore) -> None:
        """To the end, or until something is wanted."""
        last_ns: int | None = self.unix_ns or None
        for applied, received in enumerate(events, 1):
            if last_ns is not None and not received.replayed:
                await self.pace.wait(max(0.0, (received.unix_ns - last_ns) / 1e9))
            last_ns = max(last_ns or 0, received.unix_ns)
            self._apply(received, store)
            if applied % APPLIED_A_TURN == 0:
                await asyncio.sleep(0)
            if self._wanted is not None:
                return

    async def _catch_up(self, events: Iterator[wire.Received], store: SessionStore, step: int) -> bool:
        """At once, until this step is closed. False: the recording ended before."""
        for applied, received in enumerate(events, 1):
            self._apply(received, store)
            if isinstance(received.event, wire.Step) and received.event.step >= step:
                return True
            if applied % APPLIED_A_TURN == 0:
                await asyncio.sleep(0)
                if self._wanted != step:
                    return True
        return False

    def _apply(self, received: wire.Received, store: SessionStore) -> None:
        store.apply(received)
        self._first_ns = self._first_ns or received.unix_ns
        self.unix_ns = max(self.unix_ns, received.unix_ns)
        if isinstance(received.event, wire.Step):
            self.step = max(self.step, received.event.step)
