"""The `--json` side of `gpumon attach` and `gpumon replay`: one JSON object per line on stdout."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpumon.analysis.reports import ROOM_PATIENCE_S
from gpumon.cli.printing import say
from gpumon.export import jsonl
from gpumon.export.objects import Objects, Stated
from gpumon.session.rank import refused
from gpumon_agent import wire

if TYPE_CHECKING:
    from gpumon.host.sampler import Sampler
    from gpumon.link.machines import Readings
    from gpumon_agent.endpoint import Descriptor

_LINES_WAITING_MAX = 50_000  # objects for a slow reader; beyond it the agents are not read either
ReadingsOf = Callable[[Callable[[], Collection[int]]], "Sampler | Readings"]
"""Reads the machine of these pids, or other machines, for ever."""

_ONCE = ("hello", "model", "answer", "finding", "oom", "progress", "step", "goodbye")


def attach_json(
    find: Callable[[], tuple[Descriptor, ...]],
    rank: int | None,
    once: bool,
    steps: int | None,
    seconds: float | None,
    readings: ReadingsOf,
) -> int:
    """`gpumon attach --json` for the agents that `find` returns. Returns the exit code."""
    from gpumon import link

    try:
        targets = find()
    except link.LinkError as error:
        return _sorry(str(error))
    return run(targets, once=once, steps=steps, seconds=seconds, rank=rank, readings=readings)


def run(
    targets: Sequence[Descriptor],
    *,
    once: bool = False,
    steps: int | None = None,
    seconds: float | None = None,
    rank: int | None = None,
    readings: ReadingsOf,
) -> int:
    """Prints until every rank has ended or a limit is reached. Returns the exit code."""
    wanted = [target for target in targets if rank is None or target.rank in (rank, None)]
    until = Until(once=once, steps=steps, seconds=seconds, ranks=len(wanted))
    return print_objects(lambda: live(wanted, readings), Objects(rank=rank), until)


def run_replay(
    path: Path | str,
    *,
    once: bool = False,
    steps: int | None = None,
    seconds: float | None = None,
    rank: int | None = None,
) -> int:
    """Prints a recording's objects without delays. Returns the exit code."""
    from gpumon import link

    try:
        replay = link.replay(path)
    except link.LinkError as error:
        return _sorry(str(error))
    until = Until(once=once, steps=steps, seconds=seconds, ranks=None)
    code = print_objects(lambda: aiter(replay), Objects(replaying=True, rank=rank), until)
    if replay.cut is not None:
        say(f"gpumon: {replay.cut}", err=True)
    return code


class Until:
    """When to stop printing.

    After `steps` live steps per rank, or `seconds` from the first object. With `once`: when hello, model and the newest
    step of each of `ranks` processes are there (None: at the stream's end). Replayed steps do not count.
    """

    def __init__(self, *, once: bool, steps: int | None, seconds: float | None, ranks: int | None) -> None:
        self.once = once
        self.steps = steps
        self.seconds = seconds
        self._ranks = ranks
        self._live_steps: dict[str, tuple[int, int]] = {}  # source → live steps, number of the newest
        self._ended: set[str] = set()
        self._synced: set[str] = set()
        self._newest: dict[str, dict[tuple[str, str], Stated]] = {}
        self._answer: Stated | None = None

    def take(self, stated: Stated) -> list[Stated]:
        """The object, if it must be printed now."""
        kind = stated.kind
        if kind == "goodbye":
            self._ended.add(stated.source)
        if self.once:
            if kind in _ONCE:
                self._newest.setdefault(stated.source, {})[(kind, str(stated.part))] = stated
            if kind == "answer":
                self._answer = stated
            return []
        if kind == "step" and stated.live and self.steps is not None:
            count, newest = self._live_steps.get(stated.source, (0, -1))
            if stated.object["step"] != newest:
                count, newest = count + 1, stated.object["step"]
                self._live_steps[stated.source] = (count, newest)
            if count > self.steps:
                return []
        return [stated]

    def synced(self, source: str) -> None:
        self._synced.add(source)

    @property
    def reached(self) -> bool:
        if self.once:
            complete = [
                source
                for source in self._synced | self._ended
                if source in self._ended or any(key[0] == "step" for key in self._newest.get(source, ()))
            ]
            return self._ranks is not None and len(complete) >= self._ranks
        if self.steps is None or self._ranks is None:
            return False
        full = {source for source, (count, _) in self._live_steps.items() if count >= self.steps} | self._ended
        return len(full) >= self._ranks and full >= self._live_steps.keys()

    def last(self, now: Iterable[Stated]) -> list[Stated]:
        """With `once`: everything to print, by rank. `now`: the objects valid at the end."""
        for each in self._newest.values():
            for key in [key for key in each if key[0] in ("finding", "step")]:
                del each[key]
        for stated in now:
            self.take(stated)
        ranks = sorted(self._newest.values(), key=_rank_of)
        kept = [each[key] for each in ranks for key in sorted(each, key=lambda key: (_ONCE.index(key[0]), key[1]))]
        said = [each for each in kept if each.kind != "answer"]
        first = next((at for at, each in enumerate(said) if each.kind not in ("hello", "model")), len(said))
        return [*said[:first], *([self._answer] if self._answer is not None else []), *said[first:]]


def _rank_of(kept: dict[tuple[str, str], Stated]) -> tuple[int, int]:
    first = next(iter(kept.values())).object
    return (-1 if first["rank"] is None else first["rank"], first["pid"])


# --------------------------------------------------------------------------------------------------------- the runner


def print_objects(stream: Callable[[], AsyncIterator[wire.Received]], objects: Objects, until: Until) -> int:
    """Until the stream ends or `until` is met. Returns the exit code."""
    from gpumon import link

    try:
        out = _Writer(sys.stdout.fileno())
        asyncio.run(_print(stream(), objects, until, out))
        out.close()
    except link.LinkError as error:
        return _sorry(str(error))
    except BrokenPipeError:  # the reader closed the pipe: not a failure
        _give_up_stdout()
    except OSError as error:
        _give_up_stdout()
        return _sorry(f"the output cannot be written: {error.strerror}")
    except KeyboardInterrupt:
        return 130
    return 0


async def _print(stream: AsyncIterator[wire.Received], objects: Objects, until: Until, out: _Writer) -> None:
    began: float | None = None
    ended = False
    links: dict[str, str | None] = {}  # machine → why its link is lost
    refusals: set[str] = set()  # kinds of events, each reported once
    until_room: float | None = None  # `once`: the first device reading is matched with the next phase
    while not ended and not (until.reached and (not until.once or objects.room_known)):
        left = None if began is None or until.seconds is None else began + until.seconds - time.monotonic()
        if until.reached:
            until_room = until_room or time.monotonic() + ROOM_PATIENCE_S
            left = min(until_room - time.monotonic(), ROOM_PATIENCE_S if left is None else left)
        try:
            received = await asyncio.wait_for(anext(stream), left)
        except (asyncio.TimeoutError, StopAsyncIteration):
            break
        for stated in objects.take(received):
            began = began or time.monotonic()
            for chosen in until.take(stated):
                out.write(jsonl.line(chosen.object))
        while out.waiting > _LINES_WAITING_MAX:
            await asyncio.sleep(0.05)
        if isinstance(received.event, wire.Synced):
            until.synced(received.source)
        elif isinstance(received.event, wire.Link):
            link_to = received.event
            if link_to.lost is None or links.get(link_to.host) is None:
                how = "restored" if link_to.lost is None else f"lost, trying again: {link_to.lost}"
                say(f"gpumon: link to {link_to.host} {how}", err=True)
            links[link_to.host] = link_to.lost
        elif isinstance(received.event, wire.Notice) and not received.replayed:
            say(f"gpumon: {received.event.text}", err=True)
        elif isinstance(received.event, wire.Unread) and received.event.why and received.event.kind not in refusals:
            refusals.add(received.event.kind)
            say(f"gpumon: {refused(received.event)}", err=True)
        ended = left is not None and left <= 0
    for stated in until.last(objects.now(time.time_ns()) if until.once else ()):
        out.write(jsonl.line(stated.object))
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


class _Writer:
    """Writes lines to a file descriptor in its own thread.

    While the reader pauses (a pager, a full pipe), the agents must still be read: once a training has ended, nothing is
    repeated. An OSError is raised by the next `write`, or by `close`.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="gpumon-json", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return 0 if self._error is not None else self._lines.qsize()

    def write(self, line: bytes) -> None:
        if self._error is not None:
            raise self._error
        self._lines.put(line)

    def close(self) -> None:
        """Returns when all lines are written."""
        self._lines.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                while line:
                    line = line[os.write(self._fd, line) :]
        except OSError as error:
            self._error = error


async def live(targets: Sequence[Descriptor], readings: ReadingsOf) -> AsyncGenerator[wire.Received, None]:
    """Agents' events and host readings, until the agents have ended. Raises LinkError."""
    from gpumon import link
    from gpumon.cli.budget_sender import BudgetSender
    from gpumon_agent.endpoint import pid_namespace

    budgets = BudgetSender(targets)
    here = pid_namespace()
    foreign = {target.nonce for target in targets if target.pid_ns not in ("", here)}  # their pids mean other processes
    pids = {target.pid for target in targets if target.nonce not in foreign}
    waiting: asyncio.Queue[wire.Received | None] = asyncio.Queue()
    read = asyncio.Event()  # the host, once
    first: list[wire.Received] = []  # that reading: it goes before the first step

    async def pass_on(received: wire.Received) -> None:
        waiting.put_nowait(received)
        await waiting.join()  # until it is processed: the link holds what comes meanwhile, up to its own limit

    async def listen() -> None:
        async with contextlib.aclosing(link.subscribe(targets)) as stream:
            async for received in stream:
                if isinstance(received.event, wire.Hello) and received.event.nonce not in foreign:
                    pids.add(received.event.pid)
                budgets.take(received)
                await pass_on(received)

    async def look() -> None:
        async with readings(lambda: pids) as sampler:
            async for received in sampler:
                budgets.take(received)
                sampler.hurry(budgets.wanted(received.unix_ns))
                if read.is_set():
                    await pass_on(received)
                else:
                    first.append(received)
                    read.set()

    listening, looking = asyncio.create_task(listen()), asyncio.create_task(look())
    listening.add_done_callback(lambda _: waiting.put_nowait(None))
    try:
        while (received := await waiting.get()) is not None:
            if received.seq >= 0 and not read.is_set():  # without it nobody knows what the device has free
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(read.wait(), ROOM_PATIENCE_S)
                read.set()
            while first and (received.seq >= 0 or isinstance(received.event, wire.Host)):
                yield first.pop()
            yield received
            waiting.task_done()
        await listening
    finally:
        for task in (listening, looking):
            task.cancel()
        await asyncio.gather(listening, looking, return_exceptions=True)


def _sorry(what: str) -> int:
    say(f"Error: {what}", err=True)
    return 1


def _give_up_stdout() -> None:
    """Stdout to /dev/null: Python flushes it at exit, without a reader."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
