"""The exporter: finds jobs, subscribes to them, analyses them once per second, and serves metrics.

Only the event loop touches stores; a scrape, in its own thread, reads the tuple that the loop made last.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import sys
import time
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

import msgspec

from gpumon import link
from gpumon.analysis import Reporter
from gpumon.analysis.reports import ROOM_PATIENCE_S, room_known
from gpumon.cli.printing import say
from gpumon.export.prometheus import JobReports, Jobs
from gpumon.export.serving import Scrapes, removed_at_the_end
from gpumon.link.discovery import jobs, listing
from gpumon.session.store import SessionStore
from gpumon_agent import wire

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from gpumon.link import DiscoveredJob

LOOK_S = 1.0
ENDED_KEPT_S = 300.0
"""How long an ended job is kept, so that its last state is scraped; slower scrapers miss it."""
ONCE_PATIENCE_S, ONCE_PATIENCE_MAX_S = 5.0, 120.0
"""How long --once waits for a job that sends nothing of its past, and for one that still sends."""


class _Followed(msgspec.Struct):
    """One job: its session and its subscription task."""

    name: str
    run: str
    store: SessionStore
    began: float
    pids: set[int] = msgspec.field(default_factory=set)
    reporter: Reporter = msgspec.field(default_factory=Reporter)
    task: asyncio.Task[None] | None = None
    ended: float | None = None
    heard: float = msgspec.field(default_factory=time.monotonic)
    synced: set[str] = msgspec.field(default_factory=set)

    @property
    def complete(self) -> bool:
        """It has sent its past."""
        return self.ended is not None or len(self.synced) >= len(self.pids)

    def look(self) -> JobReports:
        frame = self.store.frame(time.time_ns())
        return JobReports(self.name, self.run, frame, self.reporter.report(frame))


class Exporter:
    def __init__(self) -> None:
        self.watched: Sequence[JobReports] = ()
        self._followed: dict[tuple[object, ...], _Followed] = {}
        self._files: frozenset[object] | None = None

    async def run(self) -> None:
        looking = asyncio.create_task(self._host())
        try:
            while True:
                self.find()
                self.look()
                await asyncio.sleep(LOOK_S)
        finally:
            tasks = [looking, *(each.task for each in self._followed.values() if each.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """For the next scrapes."""
        for key, each in list(self._followed.items()):
            if each.ended is not None and time.monotonic() - each.ended > ENDED_KEPT_S:
                del self._followed[key]
        self.watched = tuple(each.look() for each in self._followed.values())

    @property
    def incomplete(self) -> list[_Followed]:
        """Jobs that have not yet sent their past."""
        return [each for each in self._followed.values() if not each.complete]

    async def pasts(self) -> None:
        """Waits until every job has sent its past; says so of one that does not."""
        end = time.monotonic() + ONCE_PATIENCE_MAX_S
        await asyncio.sleep(0.3)
        while (left := self.incomplete) and (now := time.monotonic()) < end:
            if now - max(each.heard for each in left) > ONCE_PATIENCE_S:
                break
            await asyncio.sleep(0.05)
        for each in left:
            say(f"gpumon: {each.name} has not sent its whole past: its figures may be old", err=True)

    def find(self) -> None:
        """Follows new and returned jobs."""
        files = listing()
        if files == self._files and not any(each.ended is not None for each in self._followed.values()):
            return
        self._files = files
        for found in jobs(link.discover()):
            key = found.descriptors[0].key
            pids = {descriptor.pid for descriptor in found.descriptors}
            live = (each for each in self._followed.values() if each.ended is None and each.pids & pids)
            known = self._followed.get(key) or next(live, None)
            if known is None:
                known = self._followed[key] = self._new(found)
            if known.task is None or known.task.done():
                known.ended = None
                known.pids |= {descriptor.pid for descriptor in found.descriptors}
                known.task = asyncio.create_task(self._follow(known, found))

    def _new(self, found: DiscoveredJob) -> _Followed:
        """Reuses the numbers of ended runs of that name, to limit the label values."""
        for key, each in list(self._followed.items()):
            if each.name == found.name and each.ended is not None:
                del self._followed[key]
        taken = {each.run for each in self._followed.values() if each.name == found.name}
        run = next(number for number in map(str, count()) if number not in taken)
        return _Followed(found.name, run, SessionStore(), time.monotonic())

    async def _follow(self, job: _Followed, found: DiscoveredJob) -> None:
        try:
            async with contextlib.aclosing(link.subscribe(found.descriptors)) as stream:
                async for received in stream:
                    job.store.apply(received)
                    job.heard = time.monotonic()
                    if isinstance(received.event, wire.Hello):
                        job.pids.add(received.event.pid)
                    elif isinstance(received.event, wire.Synced):
                        job.synced.add(received.source)
        except (link.LinkError, wire.WireError) as error:
            say(f"gpumon: {job.name}: {error}", err=True)
        job.ended = time.monotonic()

    async def _host(self) -> None:
        from gpumon.host import Sampler

        async with Sampler(self._pids) as sampler:
            async for received in sampler:
                for each in self._followed.values():
                    each.store.apply(received)

    def _pids(self) -> set[int]:
        return {pid for each in self._followed.values() if each.ended is None for pid in each.pids}


def serve(listening: socket.socket, token: bytes | None) -> int:
    """Serves until a signal. Returns the exit code."""
    from prometheus_client import CollectorRegistry

    exporter = Exporter()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Jobs(lambda: exporter.watched))
    with listening, removed_at_the_end(listening):
        return asyncio.run(_until_signal(exporter, registry, listening, token))


def _announce(listening: socket.socket, token: bytes | None) -> None:
    if listening.family == socket.AF_UNIX:
        say(f"serving {listening.getsockname()}; ctrl-c stops it", err=True)
        return
    host, port = listening.getsockname()[:2]
    at = f"[{host}]" if ":" in host else host
    say(f"serving http://{at}:{port}/metrics; ctrl-c stops it", err=True)
    if token is None and not ipaddress.ip_address(host).is_loopback:
        say("gpumon: everyone who can reach this address can read the metrics; --token-file requires a token", err=True)


async def _until_signal(
    exporter: Exporter, registry: CollectorRegistry, listening: socket.socket, token: bytes | None
) -> int:
    loop = asyncio.get_running_loop()
    stopped: asyncio.Future[int] = loop.create_future()

    def stop(code: int) -> None:
        if not stopped.done():
            stopped.set_result(code)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop, 0)
    running = asyncio.create_task(exporter.run())
    running.add_done_callback(lambda task: stop(1))
    serving = asyncio.create_task(Scrapes(registry, token).serve(listening))
    serving.add_done_callback(lambda task: stop(1))
    _announce(listening, token)
    code = await stopped
    for task in (running, serving):
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(running, serving, return_exceptions=True)
    return code


def print_once() -> int:
    """Prints one scrape, once every job has sent its past. Returns the exit code."""
    from prometheus_client import CollectorRegistry, generate_latest

    exporter = Exporter()

    async def settle() -> None:
        running = asyncio.create_task(exporter.run())
        await exporter.pasts()
        end = time.monotonic() + ONCE_PATIENCE_S
        exporter.look()
        while not all(each.frame.hosts for each in exporter.watched) and time.monotonic() < end:
            await asyncio.sleep(0.1)  # the first reading of the machine
            exporter.look()
        end = time.monotonic() + ROOM_PATIENCE_S
        while not all(room_known(each.frame, each.reports) for each in exporter.watched) and time.monotonic() < end:
            await asyncio.sleep(0.1)
            exporter.look()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(settle())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Jobs(lambda: exporter.watched))
    sys.stdout.write(generate_latest(registry).decode())
    return 0
