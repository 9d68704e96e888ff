"""Reads this machine once a second, or more often, as messages. A hanging driver is abandoned, not awaited."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from subprocess import DEVNULL, PIPE
from types import TracebackType

from gpumon.host.processes import Processes, machine_memory
from gpumon.host.protocol import ASK, DriverReading, decoder
from gpumon_agent import wire

PATIENCE_S = 2.0
"""A driver silent for this long is given up; each next attempt waits twice as long, up to the limit."""
PATIENCE_LIMIT_S = 60.0
BURIAL_S = 2.0
"""How long to wait for a killed child: if it ends later, asyncio prints an error about the closed loop."""
_ANSWER_LIMIT_BYTES = 16 << 20

_CHILD = "import sys; parent, *sys.path[:] = sys.argv[1:]; from gpumon.host.drivers import main; main(int(parent))"
"""The child uses this process's sys.path, not the current directory."""


def _child_command() -> list[str]:
    return [sys.executable, "-c", _CHILD, str(os.getpid()), *sys.path]


class _Pipe(asyncio.SubprocessProtocol):
    """The pipes to the child: one line in, one line out."""

    def __init__(self) -> None:
        self.transport: asyncio.SubprocessTransport | None = None
        self._line = bytearray()
        self._waiting: asyncio.Future[bytes] | None = None
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.SubprocessTransport)
        self.transport = transport

    def ask(self) -> asyncio.Future[bytes]:
        assert self.transport is not None
        stdin = self.transport.get_pipe_transport(0)
        assert isinstance(stdin, asyncio.WriteTransport)
        self._line.clear()
        self._waiting = asyncio.get_running_loop().create_future()
        if self.ended.is_set():
            self.process_exited()
        else:
            stdin.write(ASK)
        return self._waiting

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self._line += data
        if self._waiting is not None and not self._waiting.done():
            if self._line.endswith(b"\n"):
                self._waiting.set_result(bytes(self._line))
            elif len(self._line) > _ANSWER_LIMIT_BYTES:
                self._waiting.set_exception(ValueError("its answer has no end"))

    def process_exited(self) -> None:
        self.ended.set()
        if self._waiting is not None and not self._waiting.done():
            assert self.transport is not None
            self._waiting.set_exception(EOFError(f"exit code {self.transport.get_returncode()}"))

    def close(self) -> None:
        """Kills the child and closes its pipes, without waiting."""
        if self.transport is not None:
            self.transport.close()


class Driver:
    """The child process that reads the drivers (drivers.py): started at the first request, and again if it was lost."""

    def __init__(self, command: Callable[[], Sequence[str]] = _child_command, patience_s: float = PATIENCE_S) -> None:
        self._command = command
        self._patience = self._least_patience = patience_s
        self._pipe: _Pipe | None = None
        self._abandoned: _Pipe | None = None
        self._answer: asyncio.Task[DriverReading] | None = None
        self._requested_at = 0.0
        self._retry_at = 0.0
        self._why = ""

    async def read(self, wait_s: float) -> DriverReading:
        """The devices now; after `wait_s` seconds without an answer, a reading that says why."""
        if self._answer is None:
            if time.monotonic() < self._retry_at:
                return DriverReading(why=self._why)
            if self._abandoned is not None and not self._abandoned.ended.is_set():
                return DriverReading(why="the driver hangs, with a process that queried it")
            self._requested_at = time.monotonic()
            self._answer = asyncio.create_task(self._ask())
        await asyncio.wait({self._answer}, timeout=wait_s)
        if self._answer.done():
            return self._take(self._answer)
        silent = time.monotonic() - self._requested_at
        if silent >= self._patience:
            return self._give_up(f"the driver did not answer for {silent:.0f} s")
        return DriverReading(why="the driver has not answered yet")

    async def _ask(self) -> DriverReading:
        if self._pipe is None:
            loop = asyncio.get_running_loop()
            _, self._pipe = await loop.subprocess_exec(_Pipe, *self._command(), stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        return decoder.decode(await self._pipe.ask())

    def _take(self, answer: asyncio.Task[DriverReading]) -> DriverReading:
        self._answer = None
        try:
            reading = answer.result()
        except (OSError, EOFError, ValueError) as error:  # msgspec's DecodeError is a ValueError
            return self._give_up(f"the process that queries the driver failed: {error}")
        self._patience = self._least_patience
        return reading

    def _give_up(self, why: str) -> DriverReading:
        self._why = why
        self._retry_at = time.monotonic() + self._patience
        self._patience = min(2 * self._patience, PATIENCE_LIMIT_S)
        self.close()
        return DriverReading(why=why)

    def close(self) -> None:
        """Kills the child without waiting: one stuck in the kernel stays until the kernel releases it."""
        if self._answer is not None:
            self._answer.cancel()
            self._answer = None
        if self._pipe is not None:
            self._pipe.close()
            self._abandoned, self._pipe = self._pipe, None

    async def aclose(self) -> None:
        """Kills the child and waits a moment for its end, else asyncio warns that it still waits for it."""
        answer = self._answer
        self.close()
        if answer is not None:  # cancelled while starting the child: ends when the child does
            await asyncio.wait({answer}, timeout=BURIAL_S)
        if self._abandoned is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._abandoned.ended.wait(), BURIAL_S)


async def read_driver(patience_s: float = 10.0) -> DriverReading:
    """One reading of all devices, for callers that can wait."""
    driver = Driver(patience_s=patience_s)
    try:
        return await driver.read(patience_s)
    finally:
        await driver.aclose()


HURRIED = 5


class Sampler:
    """An endless async iterator of `wire.Host` messages, the first one at once.

    `pids` is called at each reading and returns the processes to read; drivers list all. Close it, or use `async with`.
    """

    def __init__(
        self,
        pids: Callable[[], Collection[int]] = tuple,
        *,
        period_s: float = 1.0,
        driver: Driver | None = None,
        host: str | None = None,
    ) -> None:
        self.host = host or socket.gethostname()
        self._pids = pids
        self._period = period_s
        self._driver = driver or Driver()
        self._processes = Processes()
        self._read_processes: tuple[wire.ProcessReading, ...] = ()
        self._pids_read: frozenset[int] = frozenset()
        self._processes_due = 0.0
        self._due = 0.0

    def __aiter__(self) -> Sampler:
        return self

    async def __anext__(self) -> wire.Received:
        await asyncio.sleep(max(0.0, self._due - time.monotonic()))
        self._due = time.monotonic() + self._period
        reading = await self.read()
        return wire.Received(f"host:{self.host}", time.time_ns(), reading)

    def hurry(self, hurries: bool) -> None:
        """Read five times as often while something waits for a reading; False: normally again."""
        period = self._period / HURRIED if hurries else self._period
        self._due = min(self._due, time.monotonic() + period)

    async def read(self) -> wire.Host:
        reading, _ = await asyncio.gather(self._driver.read(min(0.4, self._period)), self._look_at_processes())
        total, available = machine_memory()
        return wire.Host(
            self.host,
            time.monotonic_ns(),
            driver=reading.driver,
            devices=reading.devices,
            processes=self._read_processes,
            memory_total=total,
            memory_available=available,
            why=reading.why,
        )

    async def _look_at_processes(self) -> None:
        """At the normal rate even if the driver is read more often: its time grows with the ranks."""
        pids = frozenset(self._pids())
        now = time.monotonic()
        if now < self._processes_due and pids == self._pids_read:
            return
        self._processes_due, self._pids_read = now + 0.9 * self._period, pids
        self._read_processes = await asyncio.to_thread(self._processes.read, pids)

    async def aclose(self) -> None:
        """Ends the child process. Further readings start a new one."""
        await self._driver.aclose()

    async def __aenter__(self) -> Sampler:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()
