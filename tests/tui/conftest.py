"""The app driven by a written-down run: only the reader and the clock are replaced."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from textual.pilot import Pilot
from watched import START_NS, Run

from gpumon.session.store import SessionStore
from gpumon.tui.app import MonitorApp, Options
from gpumon.tui.feed import Ask, Pace
from gpumon_agent import wire


class Reader:
    """Plays events to the app; more can be added while it listens."""

    def __init__(self, *runs: Run) -> None:
        self._queue: asyncio.Queue[wire.Received | None] = asyncio.Queue()
        self.now_ns = START_NS
        for run in runs:
            self.add(run)

    def add(self, run: Run) -> None:
        for received in run.events:
            self._queue.put_nowait(received)
            self.now_ns = max(self.now_ns, received.unix_ns)
        run.events = []

    async def __call__(self) -> AsyncIterator[wire.Received]:
        while (received := await self._queue.get()) is not None:
            yield received
            if self._queue.empty():
                await asyncio.sleep(0)

    def clock(self) -> int:
        return self.now_ns

    @property
    def taken(self) -> bool:
        """Everything was handed to the app."""
        return self._queue.empty()


MakeApp = Callable[..., MonitorApp]


class Asked:
    """Stands for the agent's control socket: keeps what was asked for, and replies with what it was given."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str, int]] = []
        self.reply: wire.Reply | Exception = wire.Reply(True, "at the next phase boundary")

    async def __call__(self, source: str, what: str, device: int) -> wire.Reply:
        self.heard.append((source, what, device))
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def new_run() -> Callable[..., Run]:
    return Run


@pytest.fixture
def reader_of() -> Callable[..., Reader]:
    return Reader


@pytest.fixture
def readers() -> list[Reader]:
    return []


@pytest.fixture
def app_of(readers: list[Reader]) -> MakeApp:
    """An app that plays the runs; its clock stands where they end."""

    def make(
        *runs: Run, reader: Reader | None = None, asker: Ask | None = None, pace: Pace | None = None, **options: object
    ) -> MonitorApp:
        reader = reader or Reader(*runs)
        made = Options(**options)  # type: ignore[arg-type]
        app = MonitorApp(lambda: reader(), clock=reader.clock, options=made, asker=asker, pace=pace)
        readers.append(reader)
        return app

    return make


@pytest.fixture
def settled(app_of: MakeApp, readers: list[Reader]) -> Callable[[Pilot[int]], Awaitable[None]]:
    """Waits until the app has taken every event and drawn it, however busy the machine is."""

    async def wait(pilot: Pilot[int]) -> None:
        while not all(reader.taken for reader in readers):
            await pilot.pause(0.02)
        await pilot.pause()
        for _ in range(3):  # heights may follow what is shown
            pilot.app.redraw()  # type: ignore[attr-defined]
            await pilot.pause(0.05)

    return wait


@pytest.fixture
def store_of() -> Callable[..., SessionStore]:
    def make(*runs: Run) -> SessionStore:
        store = SessionStore()
        for run in runs:
            for received in run.events:
                store.apply(received)
        return store

    return make


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures must not depend on who looks."""
    for name in list(os.environ):
        if name in ("NO_COLOR", "TEXTUAL", "TEXTUAL_THEME", "TZ"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    return
