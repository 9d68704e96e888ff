"""Event sources as the app sees them: live, replay and demo are all async iterators."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Hashable, Sequence
from typing import TypeVar

import msgspec

from gpumon.session.incoming import Incoming as One
from gpumon.session.incoming import singly
from gpumon_agent import wire

T = TypeVar("T")

Incoming = One | list[One]
"""One message or run of messages, or a batch of them."""

Feed = Callable[[], AsyncIterable[Incoming]]
"""Starts listening. Called once, inside the app's loop."""

HostFeed = Callable[[Callable[[], Collection[int]]], AsyncIterable[wire.Received]]
"""Starts reading this machine; at each reading it asks for the pids to look at."""


Ask = Callable[[str, str, int], Awaitable[wire.Reply]]
"""Sends a request about a device to the agent of a source. Raises LinkError."""


class ProcessFacts(msgspec.Struct, frozen=True):
    """What the system knows of a process of this machine; None: it does not tell."""

    user: str | None = None
    command: tuple[str, ...] = ()
    cwd: str | None = None
    began_unix: float | None = None


class JobChoice(msgspec.Struct, frozen=True):
    """A job of this machine that can be opened. `sources`: its agents, as its messages name them."""

    name: str
    sources: frozenset[str]
    group: Hashable  # equal for the ranks that a launcher starts anew
    feed: Feed
    """Follows later jobs of the same name."""
    listen: Feed
    """Ends with the job."""
    arguments: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()  # of this pid namespace
    began_unix: float | None = None


class Machine(msgspec.Struct, frozen=True):
    """What the Home screen looks at."""

    jobs: Callable[[], Sequence[JobChoice]]
    """All jobs now, the oldest first."""
    files: Callable[[], Hashable]
    """Equal to the one before if no agent came or went; cheap."""
    facts: Callable[[int], ProcessFacts]
    here: bool = True
    """False: the jobs run on other machines, whose processes are not listed."""


@contextlib.asynccontextmanager
async def closing(events: AsyncIterable[T]) -> AsyncIterator[AsyncIterator[T]]:
    """The iterator, always closed at the end: it owns sockets and a child process."""
    iterator = aiter(events)
    try:
        yield iterator
    finally:
        close = getattr(iterator, "aclose", None)
        if close is not None:
            await close()


class Pace:
    """Plays a recording at `speed` times its own, or at once (0). Idle gaps are cut to `IDLE_S`."""

    IDLE_S = 2.0

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.held = False
        self._woken = False
        self._changed = asyncio.Event()

    def change(self, factor: float) -> None:
        """Multiplies the speed, within 1/16 and 4096."""
        if self.speed:
            self.speed = min(4096.0, max(1 / 16, self.speed * factor))
            self._changed.set()

    def finish(self) -> None:
        self.speed = 0.0
        self._changed.set()

    def hold(self, held: bool) -> None:
        self.held = held
        self._changed.set()

    def wake(self) -> None:
        """Ends a wait."""
        self._woken = True
        self._changed.set()

    async def play(self, events: AsyncIterator[Incoming]) -> AsyncIterator[wire.Received]:
        last_ns: int | None = None
        async for heard in events:
            for received in singly(heard if isinstance(heard, list) else (heard,)):
                if last_ns is not None and not received.replayed:
                    await self.wait(max(0.0, (received.unix_ns - last_ns) / 1e9))
                last_ns = received.unix_ns if last_ns is None else max(last_ns, received.unix_ns)
                yield received

    async def wait(self, recorded_s: float) -> None:
        """So long as it took when it was recorded, and while it is held; until `wake`."""
        recorded_s = min(self.IDLE_S, recorded_s)
        self._woken = False
        while not self._woken and (self.held or (self.speed and recorded_s > 0.001)):
            self._changed.clear()
            speed, began, held = self.speed, asyncio.get_running_loop().time(), self.held
            try:
                await asyncio.wait_for(self._changed.wait(), None if held else recorded_s / speed)
            except asyncio.TimeoutError:
                return
            if not held:
                recorded_s -= (asyncio.get_running_loop().time() - began) * speed
