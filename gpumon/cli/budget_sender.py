"""Sends each agent its memory budget (reserved + free), which it needs to predict whether a batch fits.

The agent makes no driver calls, and the viewer reads the driver anyway. The budget is sent at first and on changes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import TYPE_CHECKING

from gpumon.analysis.device_budget import available
from gpumon.session.frame import Frame, RankFrame
from gpumon.session.store import SessionStore
from gpumon_agent import wire

if TYPE_CHECKING:
    from gpumon.host import Sampler
    from gpumon.link.machines import Readings
    from gpumon_agent.endpoint import Descriptor

CHANGED_BYTES = 1 << 20
AGAIN_NS = 10_000_000_000  # repeated, since a busy agent may have missed it
WANTED_NS = 20_000_000_000  # for so long after a rank is first seen; later one reading per second is enough


class BudgetSender:
    """Receives a viewer's events (`take`) or, if it keeps a session anyway, its frames (`seen`)."""

    def __init__(self, known: Iterable[Descriptor] = ()) -> None:
        self._known = tuple(known)
        self._store = SessionStore()
        self._sent: dict[tuple[str, int], tuple[int, int]] = {}  # budget, and when it was sent
        self._open = False  # a new reading awaits the next step
        self._looked_at = 0  # newest reading already processed
        self._tasks: set[asyncio.Task[None]] = set()
        self._began: dict[str, int] = {}  # when each rank was first seen; 0: ended

    async def beside(self, sampler: Sampler | Readings) -> AsyncGenerator[wire.Received, None]:
        """The host's readings, faster while a budget is missing."""
        async with contextlib.aclosing(sampler) as readings:
            async for received in readings:
                sampler.hurry(self.wanted(received.unix_ns))
                yield received

    def seen(self, frame: Frame) -> None:
        """Called a few times per second, in the running loop."""
        for rank in frame.ranks:
            if rank.goodbye is not None:
                self._began[rank.source] = 0
            else:
                self._began.setdefault(rank.source, frame.unix_ns)
        newest = max((rank.host_unix_ns or 0 for rank in frame.ranks), default=0)
        if newest > self._looked_at:
            self._looked_at = newest
            for rank in frame.ranks:
                self._look(rank, frame.unix_ns)

    def take(self, received: wire.Received) -> None:
        """Must be called in the running loop, which sends the budgets."""
        event = received.event
        self._store.apply(received)
        if isinstance(event, wire.Host):
            self._open = True
        elif isinstance(event, wire.Hello):
            self._began.setdefault(received.source, received.unix_ns)
        elif isinstance(event, wire.Goodbye):
            self._began[received.source] = 0
        elif self._open and isinstance(event, wire.Step) and not received.replayed:
            self._open = False
            for source in self._store.sources():
                rank = self._store.rank(source, received.unix_ns)
                if rank is not None:
                    self._look(rank, received.unix_ns)

    def wanted(self, unix_ns: int) -> bool:
        """Whether a rank seen recently has no budget yet."""
        known = {source for source, _ in self._sent}
        return any(source not in known and unix_ns - met < WANTED_NS for source, met in self._began.items())

    def _look(self, rank: RankFrame, unix_ns: int) -> None:
        source = rank.source
        if rank.goodbye is not None or rank.hello.backend not in ("cuda", "hip"):
            return
        for device in {phase.device for phase in rank.steps[-1].phases} if rank.steps else ():
            budget = available(rank, device)
            if budget is None:
                continue
            sent = self._sent.get((source, device))
            if sent is not None and abs(sent[0] - budget) < CHANGED_BYTES and unix_ns - sent[1] < AGAIN_NS:
                continue
            self._sent[source, device] = budget, unix_ns
            task = asyncio.get_running_loop().create_task(self._send(source, device, budget))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _send(self, source: str, device: int, budget: int) -> None:
        from gpumon.link.control import Asker
        from gpumon.link.errors import LinkError

        try:
            await Asker(self._known)(source, wire.ROOM, device, budget)
        except LinkError:  # an older or ending agent; only its OOM prediction is lost
            return
