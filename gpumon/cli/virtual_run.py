"""One run of a user's command on virtual devices: start, subscribe, stop, and the devices' peak use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from gpumon import link, virtual_gpu
from gpumon.analysis.dryrun_result import DryRunResult, Ended, Outcome, Space
from gpumon.cli.budget_sender import BudgetSender
from gpumon.cli.subreaper import under_subreaper
from gpumon.link.discovery import LOOK_S
from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor

LAST_WORDS_S = 15.0
"""How long agents are read after the command has ended."""

POLITE_S = 10.0
FIRM_S = 5.0
FORCE_S = 15.0
"""Time for the command to end after SIGINT, then after SIGTERM, then for the subreaper to kill it."""


class VirtualRun:
    """`argv` in its own process group, with every agent of its session followed by a `DryRunResult`.

    `environment`: from gpumon.virtual_gpu, with the agent's shim. Stdout and stderr are copied to the file descriptors
    `out` and `err`, until we stop the command. The context manager's exit stops it and removes its session.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], *, out: int, err: int, steps: int | None = None
    ) -> None:
        self.trial = DryRunResult()
        self.notes: list[str] = []
        """Failed subscriptions, and why."""
        self._argv = list(argv)
        self._environment = {**environment, "GPUMON_AWAIT_VIEWER": "1", "GPUMON_GOVERNOR": "off"}
        if steps is not None:
            self._environment["GPUMON_HOLD_AFTER"] = str(steps)
        self._session = environment["VGPU_SESSION"]
        self._steps = steps
        self._ended: Ended | None = None  # why we stopped it
        self._missed: virtual_gpu.Absence | None = None
        self._ending: threading.Thread | None = None
        self._targets = (out, err)
        self._copies: list[threading.Thread] = []
        self._budgets = BudgetSender()
        self._pids: set[int] = set()

    def __enter__(self) -> VirtualRun:
        # a shell starts background jobs with SIGINT ignored, but we stop the command by it
        previous = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            under_subreaper(self._argv),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for us: we stop the command, then report
        )
        signal.signal(signal.SIGINT, previous)
        for pipe, target in zip((self.process.stdout, self.process.stderr), self._targets, strict=True):
            assert pipe is not None
            self._copies.append(threading.Thread(target=self._copy, args=(pipe, target), daemon=True))
            self._copies[-1].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end("left")
        virtual_gpu.remove_session(self._session)

    # -------------------------------------------------------------------------------------------------- listening

    async def messages(self, *, machine: bool) -> AsyncGenerator[wire.Received, None]:
        """Messages of all agents (with `machine` also host readings), until the command has ended.

        Stops the command when every rank has done the requested steps.
        """
        waiting: asyncio.Queue[wire.Received | None] = asyncio.Queue(maxsize=1024)
        tasks = [asyncio.create_task(self._follow(waiting))]
        if machine:
            tasks.append(asyncio.create_task(self._read_machine(waiting)))
        try:
            while (received := await waiting.get()) is not None:
                self.trial.take(received)
                self._budgets.take(received)
                yield received
                if self._steps is not None and self.trial.steps >= self._steps:
                    self.end_soon("steps")
            await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_machine(self, waiting: asyncio.Queue[wire.Received | None]) -> None:
        async with contextlib.aclosing(self.machine(lambda: self._pids)) as readings:
            async for received in readings:
                await waiting.put(received)

    async def _follow(self, waiting: asyncio.Queue[wire.Received | None]) -> None:
        """One subscription per job of the session, until `LAST_WORDS_S` after the command's end."""
        jobs: dict[tuple[object, ...], asyncio.Task[None]] = {}
        heard: set[str] = set()
        deadline: float | None = None
        try:
            while True:
                if self.process.poll() is not None:
                    deadline = deadline or time.monotonic() + LAST_WORDS_S
                    if all(task.done() for task in jobs.values()) or time.monotonic() > deadline:
                        break
                found: dict[tuple[object, ...], list[Descriptor]] = {}
                for descriptor in self._agents():
                    if descriptor.nonce not in heard:  # its key changes once it knows its rank
                        found.setdefault(descriptor.key, []).append(descriptor)
                        heard.add(descriptor.nonce)
                for key in found.keys() - jobs.keys():
                    jobs[key] = asyncio.create_task(self._listen(found[key], waiting))
                await asyncio.sleep(LOOK_S)
        finally:
            for task in jobs.values():
                task.cancel()
            await asyncio.gather(*jobs.values(), return_exceptions=True)
        await waiting.put(None)

    async def _listen(self, descriptors: list[Descriptor], waiting: asyncio.Queue[wire.Received | None]) -> None:
        try:
            async with contextlib.aclosing(link.subscribe(descriptors)) as stream:
                async for received in stream:
                    if isinstance(received.event, wire.Hello):
                        self._pids.add(received.event.pid)
                    await waiting.put(received)
        except link.LinkError as error:
            self.notes.append(str(error))

    def _agents(self) -> list[Descriptor]:
        """Agents whose processes were started in this session."""
        return [descriptor for descriptor in link.discover() if _session_of(descriptor.pid) == self._session]

    def await_agent(self) -> bool:
        """Waits for an agent; False if the command ended before."""
        while not self._agents():
            if self.process.poll() is not None:
                return False
            time.sleep(LOOK_S)
        return True

    async def machine(self, pids: Callable[[], Collection[int]]) -> AsyncGenerator[wire.Received, None]:
        """Host readings. Reads the virtual driver if this process has the session's environment."""
        from gpumon.host import Sampler

        async with Sampler(pids) as sampler:
            async for received in sampler:
                sampler.hurry(self._budgets.wanted(received.unix_ns))
                yield received

    # ----------------------------------------------------------------------------------------------------- the end

    def end_soon(self, why: Ended) -> None:
        """Stops the command in the background."""
        if self._ending is None and self.process.poll() is None:
            self._missed = virtual_gpu.absence(self._session)  # from here on ranks end because of us
            self._ended = why
            self._ending = threading.Thread(target=self._end, daemon=True)
            self._ending.start()

    def end(self, why: Ended) -> None:
        """Returns after the end, with all output copied."""
        self.end_soon(why)
        if self._ending is not None:
            self._ending.join()
        for copy in self._copies:
            copy.join(LAST_WORDS_S)  # an orphan may keep the pipes open forever

    def _end(self) -> None:
        """SIGINT, SIGTERM, SIGHUP, at last SIGKILL."""
        self.process.send_signal(signal.SIGINT)
        # SIGHUP goes to the subreaper alone: only it knows ranks in other process groups
        for patience, number in ((POLITE_S, signal.SIGTERM), (FIRM_S, signal.SIGHUP), (FORCE_S, signal.SIGKILL)):
            try:
                self.process.wait(patience)
                break
            except subprocess.TimeoutExpired:
                self._signal_all(number)
        self.process.wait()
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGHUP:
                os.kill(self.process.pid, number)
            else:
                os.killpg(self.process.pid, number)

    def _copy(self, pipe: IO[bytes], target: int) -> None:
        readable = True
        while data := os.read(pipe.fileno(), 65536):
            try:
                while data and readable and self._ended is None:
                    data = data[os.write(target, data) :]
            except OSError:  # the reader is gone: the command must not block
                readable = False

    def outcome(self) -> Outcome:
        """The verdict, after the end."""
        code = self.process.returncode
        ended: Ended = self._ended or ("finished" if code == 0 else "failed")
        devices = tuple(
            Space(name, record.capacity, record.used, record.contexts)
            for name, record in zip(_names(self._environment), virtual_gpu.records(self._session), strict=False)
        )
        missed = self._missed if self._ended else virtual_gpu.absence(self._session)
        return self.trial.outcome(
            ended, None if self._ended else code, devices, steps=self._steps, missed=_sentence(missed)
        )


def _sentence(missed: virtual_gpu.Absence | None) -> str:
    if missed is None:
        return ""
    if missed.ended:
        return f"rank {missed.rank} ended while other ranks waited for it, and they went on without it"
    return f"rank {missed.rank} did not reach a collective within {missed.seconds} s, and the others went on without it"


def _names(environment: Mapping[str, str]) -> list[str]:
    return [device.partition("|")[0] for device in environment["VGPU_DEVICES"].split(";")]


def _session_of(pid: int) -> str | None:
    """The virtual GPU session of a process; None if unreadable."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = b"VGPU_SESSION="
    return next((entry.removeprefix(prefix).decode() for entry in entries if entry.startswith(prefix)), None)
