"""A scripted training run as wire messages, and the app driven by it: only the reader and the clock are replaced."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from textual.pilot import Pilot

from gpumon.session.store import SessionStore
from gpumon.tui.app import MonitorApp, Options
from gpumon_agent import wire

GIB = 1 << 30
MIB = 1 << 20
START_NS = 1_790_000_000_000_000_000
STEP_NS = 312_000_000


@dataclass
class Run:
    """One rank's run, written down event by event: a transformer on an H200 unless told otherwise."""

    name: str = "train.py"
    pid: int = 41873
    rank: int | None = None
    world_size: int | None = None
    device: str = "NVIDIA H200"
    total: int = round(139.8 * GIB)
    extra: int = 0  # bytes that this run's peak is higher
    shrink: int = 1  # the model is so many times smaller
    events: list[wire.Received] = field(default_factory=list)
    t_ns: int = 5_000_000_000
    seq: int = 0
    reserved: int = 0

    @property
    def source(self) -> str:
        return f"nonce-{self.pid}"

    @property
    def uuid(self) -> str:
        return f"GPU-00000000-0000-0000-0000-{self.rank or 0:012d}"

    def say(self, event: wire.Event, *, numbered: bool = False, replayed: bool = False) -> None:
        seq = -1
        if numbered:
            seq, self.seq = self.seq, self.seq + 1
        self.events.append(wire.Received(self.source, START_NS + self.t_ns, event, seq, replayed))

    def hello(self, **changes: object) -> Run:
        fields: dict[str, object] = {
            "protocol": (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR),
            "agent": "0.1.0",
            "nonce": self.source,
            "name": self.name,
            "host": "node1",
            "pid": self.pid,
            "start_time": 1,
            "boot_id": "b",
            "argv": (self.name,),
            "python": "3.11",
            "clock": wire.Clock(0, START_NS),
            "backend": "cuda",
            "torch": "2.15.0+cu132",
            "devices": (wire.Device(0, self.uuid, self.device, self.total),),
            "rank": self.rank,
            "world_size": self.world_size,
        }
        self.say(wire.Hello(**{**fields, **changes}))  # type: ignore[arg-type]
        return self

    def model(self) -> Run:
        size = round(12.1 * GIB) // self.shrink
        optimizer = wire.Optimizer("AdamW", size // 4, size, 2 * size, foreach=True)
        self.say(wire.Model(0, 0, "GPT", "GPT", size // 4, size // 4, size, size, 0, 0, (0,), (optimizer,)))
        return self

    def step(self, step: int, *, leak: int = 0, replayed: bool = False, sampled: bool = True) -> Run:
        """One iteration: forward, backward, optimizer, between."""
        w = round(12.1 * GIB) // self.shrink
        base = 4 * w + 160 * MIB // self.shrink + leak
        wiggle = (step * 7919 % 13) * 9 * MIB // self.shrink
        up = round(12.2 * GIB) // self.shrink + wiggle + self.extra
        self.reserved = reserved = max(round(62.0 * GIB) // self.shrink, base + up + 400 * MIB // self.shrink)
        shape = [
            ("between", base - w, base, 18_000_000),
            ("forward", base - w + up, base - w + up + 300 * MIB // self.shrink, 96_000_000),
            ("backward", base, base + up + 200 * MIB // self.shrink, 151_000_000),
            ("optimizer", base, base + round(0.4 * w), 47_000_000),
        ]
        for phase, end, peak, took in shape:
            self.t_ns += took
            self.say(
                wire.Phase(
                    step,
                    phase,
                    0,
                    0,
                    self.t_ns,
                    took,
                    allocated=end,
                    allocated_peak=peak,
                    reserved=reserved,
                    reserved_peak=reserved,
                    active=end,
                    inactive_split=0,
                    requested=end - 90 * MIB // self.shrink,
                    allocations=900,
                    retries=0,
                    ooms=0,
                    flags=wire.SAMPLED if sampled else 0,
                ),
                numbered=True,
                replayed=replayed,
            )
        if sampled:
            self.say(
                wire.Ledger(
                    step,
                    "optimizer",
                    0,
                    0,
                    base,
                    base - 90 * MIB // self.shrink,
                    reserved,
                    weights=w,
                    buffers=0,
                    gradients=w,
                    optimizer=2 * w,
                    inputs=2 * MIB,
                    activations=0,
                    workspaces=32 * MIB // self.shrink,
                ),
                numbered=True,
                replayed=replayed,
            )
            peak = base + up + 200 * MIB // self.shrink
            self.say(
                wire.Ledger(
                    step,
                    "backward",
                    0,
                    0,
                    peak,
                    peak - 90 * MIB // self.shrink,
                    reserved,
                    weights=w,
                    gradients=w,
                    optimizer=2 * w,
                    inputs=2 * MIB,
                    activations=up,
                    workspaces=32 * MIB // self.shrink,
                    peak=True,
                    module="blocks.23.mlp",
                ),
                numbered=True,
                replayed=replayed,
            )
        self.say(
            wire.Step(step, self.t_ns, STEP_NS, input_bytes=2 * MIB, input_shapes=((8, 1024),), phases=4),
            numbered=True,
            replayed=replayed,
        )
        return self

    def steps(self, first: int, count: int, **how: object) -> Run:
        for step in range(first, first + count):
            self.step(step, **how)  # type: ignore[arg-type]
        return self

    def beat(self, step: int, phase: str = "forward", age_ns: int = 40_000_000) -> Run:
        self.say(wire.Heartbeat(self.t_ns, step, phase, age_ns, rss=round(3.2 * GIB)))
        return self

    def synced(self) -> Run:
        self.say(wire.Synced(self.seq - 1))
        return self

    def host(self, **changes: object) -> Run:
        """A reading of the machine, as the viewer makes it."""
        context = 540 * MIB
        reserved = self.reserved
        fields: dict[str, object] = {
            "uuid": self.uuid,
            "name": self.device,
            "total": self.total,
            "free": self.total - reserved - context,
            "used": reserved + context,
            "processes": (wire.DeviceProcess(self.pid, reserved + context, "python"),),
            "utilization_percent": 83,
            "temperature_c": 61,
            "power_mw": 412_000,
            "power_limit_mw": 700_000,
        }
        children = tuple(wire.ChildProcess(self.pid + i, "python", 310 * MIB) for i in range(1, 5))
        host = wire.Host(
            "node1",
            self.t_ns,
            driver="580.1",
            devices=(wire.DeviceReading(**{**fields, **changes}),),  # type: ignore[arg-type]
            processes=(wire.ProcessReading(self.pid, round(3.2 * GIB), 104.0, 60, children),),
            memory_total=256 * GIB,
            memory_available=190 * GIB,
        )
        self.events.append(wire.Received("host:node1", START_NS + self.t_ns, host))
        return self

    def notice(self, text: str) -> Run:
        self.say(wire.Notice(self.t_ns, text, 12_400), numbered=True)
        return self

    def leaking(self) -> Run:
        """A run whose memory grows until an allocation fails."""
        self.hello().model()
        for step in range(12_192, 12_432):
            self.step(step, leak=(step - 12_192) * 300 * MIB)
        self.host().step(12_432, leak=240 * 300 * MIB).beat(12_433, "backward").synced()
        self.say(wire.Oom(12_433, "backward", 0, self.t_ns, 2 * GIB, self.total, 900 * MIB), numbered=True)
        return self

    def goodbye(self, reason: str, step: int, phase: str, detail: str = "") -> Run:
        self.say(wire.Goodbye(reason, self.t_ns, step, phase, detail), numbered=True)
        return self

    def usual(self, steps: int = 240, last: int = 12_431) -> Run:
        """A healthy run in full swing."""
        self.hello().model().steps(last - steps + 1, steps - 1).host().step(last)
        return self.beat(last + 1, "forward").synced().host()


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

    def make(*runs: Run, reader: Reader | None = None, **options: object) -> MonitorApp:
        reader = reader or Reader(*runs)
        made = Options(**options)  # type: ignore[arg-type]
        app = MonitorApp(lambda: reader(), clock=reader.clock, options=made)
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
