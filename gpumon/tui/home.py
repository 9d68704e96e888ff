"""Listens to all jobs of this machine while the Home screen is open, and makes its page every two seconds.

Each job has a session of its own, which keeps as few steps as analysis needs. The job that is opened is not listened to
twice: its rows are made from the app's view. A job that ended stays on the page, without its session.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

import msgspec

from gpumon.analysis import RankReport, Reporter
from gpumon.analysis.answer import NOBODY, Answer, answer
from gpumon.link.errors import LinkError
from gpumon.session.store import SessionStore
from gpumon.tui.feed import JobChoice, Machine, ProcessFacts, closing
from gpumon.tui.ingest import Tasks, take_events
from gpumon.tui.view import View
from gpumon.tui.widgets.home_rows import HomePage, JobRow, about, hidden, job_rows, process_rows
from gpumon_agent import wire

EVERY_S = 2.0
"""Four jobs take 2.3 % of a core on a busy machine, and 2.6 % with twice as many pages."""

TURNS = 2
"""A job's answer is as old as so many pages: analysis at each page would be most of what it costs."""

LOOK_AGAIN = 5
"""Pages until the jobs are looked up again though no agent came or went: one that was killed left its file."""

ENDED_MAX = 20
"""Ended jobs that stay on the page: the newest ones, about a page of them at 80x24."""


class Watch(msgspec.Struct):
    """One job that is listened to."""

    choice: JobChoice
    key: str
    facts: ProcessFacts
    store: SessionStore
    task: asyncio.Task[None] | None = None
    reporter: Reporter = msgspec.field(default_factory=Reporter)
    reports: tuple[RankReport, ...] = ()
    turn: int = 0
    answer: Answer = NOBODY
    failure: str | None = None
    rows: list[JobRow] = msgspec.field(default_factory=list)

    @property
    def sources(self) -> frozenset[str]:
        return self.choice.sources.union(self.store.sources())

    def has(self, choice: JobChoice) -> bool:
        """The same job: it has a rank in common, or ranks that its launcher started anew."""
        return choice.group == self.choice.group or bool(choice.sources & self.sources)


class Home:
    def __init__(
        self,
        machine: Machine,
        tasks: Tasks,
        new_store: Callable[[], SessionStore],
        clock: Callable[[], int],
        view: Callable[[], View],
        changed: Callable[[], None],
    ) -> None:
        """`view`: of the opened job; `changed`: called after each new page."""
        self.page = HomePage()
        self._machine = machine
        self._tasks = tasks
        self._new_store = new_store
        self._clock = clock
        self._view = view
        self._changed = changed
        self._watches: list[Watch] = []
        self._ended: list[list[JobRow]] = []
        self._gone: set[str] = set()  # sources of those
        self._choices: list[JobChoice] = []
        self._files: Hashable = None  # that these were read from
        self._looks = 0
        self._facts: dict[int, ProcessFacts] = {}
        self._host: wire.Received | None = None
        self._task: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()

    def listen(self, on: bool) -> None:
        """Begins or ends listening; may be called again and again."""
        if on and self._task is None:
            self._task = self._tasks.start(self._run())
        elif not on and self._task is not None:
            for task in (self._task, *(watch.task for watch in self._watches)):
                if task is not None:
                    task.cancel()
            self._task, self._watches = None, []

    def hear(self, received: wire.Received) -> None:
        """A reading of this machine."""
        if self._machine.here:
            if self._host is None:
                self._soon.set()
            self._host = received
        for watch in self._watches:
            watch.store.apply(received)

    def pids(self) -> list[int]:
        """Processes to read."""
        return [pid for watch in self._watches for pid in watch.choice.pids]

    def choice_of(self, job: str) -> JobChoice | None:
        """None if it has ended, or is the opened one."""
        return next((watch.choice for watch in self._watches if watch.key == job), None)

    async def _run(self) -> None:
        while True:
            self._look()
            self._soon.clear()
            try:
                await asyncio.wait_for(self._soon.wait(), EVERY_S)
            except asyncio.TimeoutError:
                continue

    def _look(self) -> None:
        files = self._machine.files()
        self._looks += 1
        if files != self._files or self._looks % LOOK_AGAIN == 0:
            self._files, self._choices = files, list(self._machine.jobs())
        view = self._view()
        opened = {rank.source for rank in view.frame.ranks}
        self._meet(opened)
        self._bury(opened)
        host = self._host.event if self._host is not None else None
        assert host is None or isinstance(host, wire.Host)
        rows: list[JobRow] = []
        shown = False
        for choice in self._choices:
            if choice.sources & opened:
                rows += [] if shown else self._opened_rows(view)
                shown = True
            for watch in self._watches:
                if watch.choice is choice:
                    self._update(watch)
                    rows += watch.rows
        if opened and not shown:
            rows += self._opened_rows(view)
        for ended in reversed(self._ended):
            rows += ended
        agents = {pid for choice in self._choices for pid in choice.pids}
        self.page = HomePage(
            tuple(rows),
            tuple(process_rows(host, agents, self._known(host, agents))),
            hidden(host),
            host is not None and bool(host.devices),
            ready=True,
        )
        self._changed()

    def _meet(self, opened: set[str]) -> None:
        self._gone &= {source for choice in self._choices for source in choice.sources}
        for choice in self._choices:
            known = next((watch for watch in self._watches if watch.has(choice)), None)
            if known is not None:
                known.choice = choice  # it may have ranks that it did not have before
                continue
            if choice.sources & opened or choice.sources <= self._gone:
                continue
            watch = Watch(choice, min(choice.sources), self._facts_of(choice), self._new_store())
            watch.turn = len(self._watches)  # not all at the same page
            if self._host is not None:
                watch.store.apply(self._host)
            watch.task = self._tasks.start(self._follow(watch))
            self._watches.append(watch)

    def _bury(self, opened: set[str]) -> None:
        """Ended jobs lose their session, and the opened one its second."""
        for watch in list(self._watches):
            if watch.sources & opened:
                self._watches.remove(watch)
                if watch.task is not None:
                    watch.task.cancel()
            elif watch.task is not None and watch.task.done() and watch.failure is None:
                self._update(watch, at_once=True)
                self._watches.remove(watch)
                self._gone |= watch.sources
                if watch.rows:
                    self._ended = [*self._ended, watch.rows][-ENDED_MAX:]
            elif watch.failure is not None and not any(choice.sources & watch.sources for choice in self._choices):
                self._watches.remove(watch)

    def _update(self, watch: Watch, at_once: bool = False) -> None:
        frame = watch.store.frame(self._clock())
        watch.turn += 1
        if at_once or len(watch.reports) != len(frame.ranks) or watch.turn % TURNS == 0:
            watch.reports = watch.reporter.report(frame)
            watch.answer = answer(frame, watch.reports, watch.answer)
        if not frame.ranks and watch.failure is not None:
            watch.answer = Answer("unknown", watch.failure)
        said = self._about(watch.choice, watch.facts)
        watch.rows = job_rows(watch.key, watch.choice.name, said, frame, watch.reports, watch.answer)

    def _opened_rows(self, view: View) -> list[JobRow]:
        sources = {rank.source for rank in view.frame.ranks}
        first = view.frame.ranks[0]
        choice = next((each for each in self._choices if each.sources & sources), None)
        if choice is not None:
            said = self._about(choice, self._facts_of(choice))
        else:
            said = about(ProcessFacts(), first.hello.argv[1:], first.hello.pid, self._clock())
        return job_rows(min(sources), first.hello.name, f"opened · {said}", view.frame, view.reports, view.answer)

    def _about(self, choice: JobChoice, facts: ProcessFacts) -> str:
        return about(facts, choice.arguments, choice.pids[0] if choice.pids else None, self._clock())

    def _facts_of(self, choice: JobChoice) -> ProcessFacts:
        """Of its first process; in another pid namespace only since when its agent runs."""
        if not choice.pids:
            return ProcessFacts(began_unix=choice.began_unix)
        return self._machine.facts(choice.pids[0])

    def _known(self, host: wire.Host | None, agents: set[int]) -> dict[int, ProcessFacts]:
        """The facts of all GPU processes without an agent, each asked for once."""
        devices = host.devices if host is not None else ()
        pids = {each.pid for device in devices for each in device.processes or ()} - agents
        self._facts = {pid: self._facts.get(pid) or self._machine.facts(pid) for pid in pids}
        return self._facts

    async def _follow(self, watch: Watch) -> None:
        try:
            async with closing(watch.choice.listen()) as events:
                await take_events(events, watch.store, self._soon.set)
        except (LinkError, wire.WireError) as error:
            watch.failure = str(error)
        self._soon.set()
