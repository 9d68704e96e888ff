"""The process beside a training that `gpumon run --log-to` or `--summary` starts: a viewer without a screen.

It writes a few figures into the experiment trackers that the training uses, every `EVERY_S` seconds, and a card at the
end. A tracker's library may wait, start threads or print: so each has a thread of its own here, and whatever it prints
is dropped. What it raises is said in one sentence at the end, and the figures of the others go on.

Stdin is a pipe from `gpumon run` that is closed when the training has ended. Each line on stdout is said by `gpumon
run`, on stderr, after the training's output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable

from gpumon import link
from gpumon.analysis import Reporter
from gpumon.cli.attach import this_machine
from gpumon.cli.attach_json import live
from gpumon.cli.run import AUTO
from gpumon.export import trackers
from gpumon.export.run_figures import Figures, RunFigures, card
from gpumon.session.store import SessionStore
from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor
from gpumon_agent.wire.masking import masked

FIND_S = 0.25
"""Between two looks for the training's agent."""
LOOK_S = 1.0
EVERY_S = 10.0
"""Between two writes. They are few and small: no tracker's server may limit a run for gpumon's sake."""
LAST_MESSAGES_S = 1.0
"""For the training's last messages, after its end: its helper reads them ten times a second."""
FLUSH_S = 5.0
"""For what the trackers still write, after the training's end. `gpumon run` waits a little longer."""


class _Logged:
    """One tracker's run, in a thread of its own."""

    def __init__(self, used: wire.Tracker, folder: str, name: str) -> None:
        self.kind = used.kind
        self.error: str | None = None
        self._waiting: queue.SimpleQueue[Callable[[trackers.Sink], None]] = queue.SimpleQueue()
        self._last = False
        self._thread = threading.Thread(target=self._run, args=(used, folder, name), daemon=True)
        self._thread.start()

    def log(self, figures: Figures) -> None:
        self._waiting.put(lambda sink: sink.log(figures))

    def finish(self, run: RunFigures) -> None:
        def last(sink: trackers.Sink) -> None:
            self._last = True
            sink.finish(run.summary(), run.findings)

        self._waiting.put(last)

    def join(self, seconds: float) -> str | None:
        """Waits for the last write. What went wrong, as a sentence."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return f"{self.kind}: the last figures were not written within {FLUSH_S:.0f} s"
        return None if self.error is None else f"{self.kind}: {self.error}"

    def _run(self, used: wire.Tracker, folder: str, name: str) -> None:
        try:
            sink = trackers.open_run(used, folder, name)
            while not self._last:
                self._waiting.get()(sink)
        except trackers.Unusable as reason:
            self.error = str(reason)
        except Exception as error:  # noqa: BLE001 — a tracker's library may raise anything
            first = next(masked((str(error).strip().partition("\n")[0],)))
            self.error = f"logging ended by {type(error).__name__}" + (f": {first}" if first else "")


class _Beside:
    """Follows the job of one process, writes its figures, and says how it ended."""

    def __init__(self, pid: int, wanted: tuple[str, ...]) -> None:
        self._pid = pid
        self._wanted = wanted
        self._store = SessionStore()
        self._reporter = Reporter()
        self._figures = RunFigures()
        self._logged: dict[str, _Logged] = {}
        self._written_s = 0.0

    async def follow(self, ended: asyncio.Event) -> None:
        """Until the training has ended, and its last messages are there."""
        looking = asyncio.create_task(self._look_on())
        following = asyncio.create_task(self._follow())
        await ended.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(following, LAST_MESSAGES_S)
        looking.cancel()
        for failure in await asyncio.gather(looking, return_exceptions=True):
            if isinstance(failure, Exception):
                raise failure
        self._look(last=True)

    def card(self) -> tuple[str, ...]:
        return card(self._figures)

    def finish(self) -> Iterable[str]:
        """Ends the trackers' runs. Yields what has to be said."""
        if not self._figures.steps:
            yield f"gpumon: no step was seen, so {'nothing was logged' if self._wanted else 'there is no summary'}"
            return
        for each in self._logged.values():
            each.finish(self._figures)
        end = time.monotonic() + FLUSH_S
        for each in self._logged.values():
            wrong = each.join(max(0.0, end - time.monotonic()))
            if wrong is not None:
                yield f"gpumon: --log-to {wrong}"
        for kind in self._wanted:
            if kind != AUTO and kind not in self._logged:
                yield f"gpumon: --log-to {kind}: the training did not use it, so nothing was logged to it"
        if AUTO in self._wanted and not self._logged:
            yield f"gpumon: --log-to {AUTO}: the training used no tracker of {', '.join(trackers.NEEDS)}"

    async def _follow(self) -> None:
        found = await self._find()
        async with contextlib.aclosing(live(found, this_machine)) as stream:
            async for received in stream:
                self._store.apply(received)

    async def _find(self) -> tuple[Descriptor, ...]:
        while True:
            try:
                return link.resolve(str(self._pid))
            except link.SeveralJobs as several:
                return several.jobs[0].descriptors
            except link.LinkError:
                await asyncio.sleep(FIND_S)

    async def _look_on(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look()

    def _look(self, *, last: bool = False) -> None:
        frame = self._store.frame(time.time_ns())
        self._figures.look(frame, self._reporter.report(frame))
        for rank in frame.ranks:
            for used in rank.trackers.used if rank.trackers is not None else ():
                if used.kind not in self._logged and self._wants(used.kind):
                    folder = rank.trackers.folder if rank.trackers is not None else ""
                    self._logged[used.kind] = _Logged(used, folder, self._figures.name)
        if not self._logged or (time.monotonic() - self._written_s < EVERY_S and not last):
            return
        figures = self._figures.take()
        if figures is not None:
            self._written_s = time.monotonic()
            for each in self._logged.values():
                each.log(figures)

    def _wants(self, kind: str) -> bool:
        if kind not in trackers.NEEDS:
            return False  # of a newer agent
        return kind in self._wanted or (AUTO in self._wanted and trackers.installed(kind))


def main(pid: int, wanted: tuple[str, ...]) -> None:
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # a tracker's own words would stand in the training's output
        os.dup2(nowhere, stream)

    def say(lines: Iterable[str]) -> None:
        for line in lines:
            print(" ".join(line.split("\n")), file=out, flush=True)

    sys.excepthook = lambda kind, error, _: say(
        (f"gpumon: what --log-to started has failed: {kind.__name__}: {error}",)
    )
    beside = _Beside(pid, wanted)
    asyncio.run(_until_the_end(beside))
    say(beside.card())
    say(beside.finish())
    os._exit(0)  # a library's threads may still wait for their server


async def _until_the_end(beside: _Beside) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)  # nothing is ever written to it: readable is closed
    await beside.follow(ended)
