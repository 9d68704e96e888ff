"""`gpumon record`: writes a session to a file for `gpumon replay`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections import deque
from pathlib import Path

import click

from gpumon import link
from gpumon.analysis.units import duration, size
from gpumon.cli import progress
from gpumon.cli.budget_sender import BudgetSender
from gpumon.cli.printing import harmless, say
from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor

_FLUSH_S = 1.0  # `kill -9` of this command may lose this much
_SHOWN_S = 1.0
_LEAKS = ("tensor-leak", "retained-graph", "host-leak")
_RATE_OF = 10  # the rate is over so many of those


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1 << 10 * power for power, unit in enumerate("kmgt", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


def _size(_: click.Context, __: click.Parameter, value: str) -> int | None:
    from gpumon.link.recording import SIZE_MIN

    read = _SIZE.fullmatch(value.strip())
    if read is None:
        raise click.BadParameter(f"{value!r} is no size; write it as 500MB, 2GiB, or 0 for no limit")
    nbytes = round(float(read[1]) * _UNITS[(read[2] or "").lower()])
    if 0 < nbytes < SIZE_MIN:
        raise click.BadParameter(f"{value} is too little; the least is {size(SIZE_MIN)}")
    return nbytes or None


@click.command("record")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
@click.option(
    "--max-size", default="1GB", show_default=True, callback=_size, metavar="SIZE",
    help="When FILE reaches it, parts of the run between its beginning and its newest quarter are dropped until half of"
         " SIZE is left: the older, the fewer stay. 0: no limit.",
)  # fmt: skip
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("target", required=False, metavar="[PID|NAME|ENDPOINT]")
def command(force: bool, max_size: int | None, file: Path, target: str | None) -> None:
    """Record a job and its host's readings to FILE, until the job ends or ctrl-c.

    The file is compressed, about 250 bytes a step, and valid at every moment: `kill -9` loses the last second. Without
    a target: the only job, with all its ranks.
    """
    try:
        descriptors = link.resolve(target)
        with link.Recording(file, force=force, max_size=max_size) as recording:
            status = Status(descriptors, recording)
            try:
                asyncio.run(_record(descriptors, recording, status))
            finally:
                status.clear()
    except link.LinkError as error:
        raise click.ClickException(str(error)) from None
    say(status.end(), err=True)


class Status:
    """What is recorded, how much and how fast: one line at the start and at the end; on a terminal also between."""

    def __init__(self, descriptors: tuple[Descriptor, ...], recording: link.Recording) -> None:
        first, more = descriptors[0], len(descriptors) - 1
        others = f" and {more} more" if more else ""
        self._what = f"{first.name} (pid {first.pid}{others})"
        self._recording = recording
        self._began = time.monotonic()
        self._sizes: deque[tuple[float, int]] = deque(maxlen=_RATE_OF + 1)
        self._steps: dict[str, int] = {}  # newest, by rank
        self._shown = False

    def take(self, received: wire.Received) -> None:
        if isinstance(received.event, wire.Step):
            self._steps[received.source] = received.event.step

    def begin(self) -> None:
        say(f"recording {self._what} to {self._recording.path}; ctrl-c stops it", err=True)

    def line(self, now: float) -> str:
        """ "recording train.py (pid 812): 3.75 MiB, 21.4 KiB/s, step 1,776"."""
        nbytes = self._recording.nbytes
        self._sizes.append((now, nbytes))
        before, then = self._sizes[0]
        rate = f", {size(round((nbytes - then) / (now - before)))}/s" if now > before else ""
        step = f", step {max(self._steps.values()):,}" if self._steps else ", no step yet"
        return f"recording {self._what}: {size(nbytes)}{rate}{step}"

    def show(self) -> None:
        text = harmless(self.line(time.monotonic()))
        columns = _columns()
        if len(text) >= columns:  # a line that wraps cannot be overwritten
            text = text[: columns - 2] + "…"
        sys.stderr.write(f"\r\x1b[2K{text}")
        sys.stderr.flush()
        self._shown = True

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def end(self) -> str:
        recording = self._recording
        took = duration(time.monotonic() - self._began)
        thinned = " (the older ones with gaps, see --max-size)" if recording.thinned else ""
        step = f"to step {max(self._steps.values()):,}" if self._steps else "no step"
        return f"{recording.path}: {step}{thinned}, {size(recording.nbytes)} in {took}"


class LeakMarks:
    """Marks the steps at which a leak was found. The agent takes a census when memory grows; the finding follows."""

    def __init__(self, recording: link.Recording) -> None:
        self._recording = recording
        self._found: set[tuple[object, ...]] = set()

    def take(self, received: wire.Received) -> None:
        event = received.event
        if not isinstance(event, wire.Census) or event.reason != "growth":
            return
        from gpumon.analysis.report import report
        from gpumon.link.recording_index import LEAK

        for each in report(self._recording.known()):
            for finding in each.findings:
                known = (each.source, *finding.key)
                if finding.key[0] in _LEAKS and known not in self._found:
                    self._found.add(known)
                    self._recording.mark(LEAK, event.step)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


async def _record(descriptors: tuple[Descriptor, ...], recording: link.Recording, status: Status) -> None:
    """Until the job ends or a signal stops it. Raises LinkError."""
    pids = {descriptor.pid for descriptor in descriptors}
    budgets = BudgetSender(descriptors)
    loop = asyncio.get_running_loop()
    enough = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, enough.set)
    status.begin()
    agents = _agents(descriptors, recording, pids, budgets, status)
    ends = [asyncio.create_task(agents), asyncio.create_task(enough.wait())]
    beside = [asyncio.create_task(_host(recording, pids, budgets)), asyncio.create_task(_flush(recording))]
    if progress.shown():
        beside.append(asyncio.create_task(_show(status)))
    try:
        done, _ = await asyncio.wait([*ends, *beside], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in [*ends, *beside]:
            task.cancel()
        await asyncio.gather(*ends, *beside, return_exceptions=True)


async def _agents(
    descriptors: tuple[Descriptor, ...],
    recording: link.Recording,
    pids: set[int],
    budgets: BudgetSender,
    status: Status,
) -> None:
    leaks = LeakMarks(recording)
    async with contextlib.aclosing(link.subscribe(descriptors)) as stream:
        async for received in stream:
            recording.write(received)
            status.take(received)
            leaks.take(received)
            budgets.take(received)
            if isinstance(received.event, wire.Hello):
                pids.add(received.event.pid)


async def _host(recording: link.Recording, pids: set[int], budgets: BudgetSender) -> None:
    from gpumon.host import Sampler

    async with Sampler(lambda: pids) as sampler:
        async for received in sampler:
            recording.write(received)
            budgets.take(received)
            sampler.hurry(budgets.wanted(received.unix_ns))


async def _flush(recording: link.Recording) -> None:
    while True:
        await asyncio.sleep(_FLUSH_S)
        recording.flush()


async def _show(status: Status) -> None:
    while True:
        await asyncio.sleep(_SHOWN_S)
        status.show()
