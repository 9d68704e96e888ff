"""Background tasks that move events from the feeds into the store; failed tasks are reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine

from gpumon.session.incoming import MessageRun
from gpumon.session.store import SessionStore
from gpumon.tui.feed import HostFeed, Incoming, closing
from gpumon_agent import wire

APPLIED_A_TURN = 512
"""Events applied before yielding to the loop, so that keys work meanwhile."""


class Tasks:
    """Tasks in the app's loop. `failed` gets an exception: a frozen screen must not look live."""

    def __init__(self, failed: Callable[[BaseException], object]) -> None:
        self._failed = failed
        self._running: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    async def stop(self) -> None:
        """Cancels all, to close sockets and child processes."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def take_events(events: AsyncIterator[Incoming], store: SessionStore, picture: Callable[[], None]) -> None:
    """All events into the store. `picture` is called at the first Hello and Synced."""
    awaited: tuple[type, ...] = (wire.Hello, wire.Synced)  # for further ranks the next tick is soon enough
    applied = 0
    apply = store.apply
    async for heard in events:
        for each in heard if isinstance(heard, list) else (heard,):
            if isinstance(each, MessageRun):
                store.apply_run(*each)
                applied += len(each.events)
                continue
            apply(each)
            applied += 1
            if awaited and isinstance(each.event, awaited):
                awaited = awaited[1:] if isinstance(each.event, wire.Hello) else ()
                picture()
        if applied >= APPLIED_A_TURN:
            applied = 0
            await asyncio.sleep(0)


async def take_host(
    host: HostFeed, take: Callable[[wire.Received], object], pids: Callable[[], Collection[int]], after_s: float
) -> None:
    """Passes the machine's readings on, after `after_s`, so that the screen is drawn first."""
    await asyncio.sleep(after_s)
    async with closing(host(pids)) as events:
        async for received in events:
            take(received)
