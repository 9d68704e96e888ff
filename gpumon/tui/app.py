"""The app: applies events and passes a View to the screen a few times per second. Long: key bindings and actions."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterable
from math import ceil
from pathlib import Path
from typing import ClassVar

from msgspec.structs import replace
from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, Screen
from textual.timer import Timer

from gpumon.analysis import RankReport, Reporter
from gpumon.analysis.answer import NOBODY, Answer, answer, line
from gpumon.analysis.job_findings import JobFinding, job_findings
from gpumon.link.errors import LinkError
from gpumon.session.frame import Frame
from gpumon.session.store import SessionStore, StoreLimits
from gpumon.tui.cursor import Cursor
from gpumon.tui.feed import Ask, Feed, HostFeed, Machine, Pace, closing
from gpumon.tui.home import Home
from gpumon.tui.ingest import Tasks, take_events, take_host
from gpumon.tui.modes import MODES
from gpumon.tui.monitor import Monitor
from gpumon.tui.playback import Playback, Recorded
from gpumon.tui.screens.base import MonitorScreen
from gpumon.tui.screens.overview import OverviewScreen
from gpumon.tui.status_log import StatusLog
from gpumon.tui.terminal import HUNG_UP, TerminalWatch, leave_by_force
from gpumon.tui.themed_app import TOLD_S, Options, ThemedApp
from gpumon.tui.themes import NAMES
from gpumon.tui.training_output import Outputs
from gpumon.tui.view import DEFAULT_SPAN, MANY, SPANS, WHOLE_RUN, Said, View, choose, newest_step
from gpumon.tui.widgets.findings_strip import details_of
from gpumon.tui.widgets.home_rows import HomePage
from gpumon.tui.widgets.timeline import Timeline
from gpumon_agent import wire

TICK_S = 0.25
LIVE_TICKS, REPLAY_TICKS = 4, 2
"""Ticks between two pictures. Nobody reads figures that change more often than once a second, and a picture costs a
slow line 3 kB."""

TURNS = 4
"""Table updates, at most, until each of many ranks is analysed again."""

SAID_MAX = 200
ASKED = {
    wire.CENSUS: ("Take census", "Live tensors without a known owner, and what holds them: on the Leaks screen"),
    wire.BLOCKS: ("Read blocks", "The allocator's segments and blocks: on the Blocks screen"),
    wire.SNAPSHOT_FILE: ("Snapshot", "A file for PyTorch's memory_viz page, on the machine that trains"),
}

PAGE_STEPS = 100
"""By which the arrows move a replay."""

STEPS_IN_ALL = 2_240
"""Closed steps kept over all ranks: 2 kB each, the budget is 64 MB."""

STEPS_AT_LEAST = 280
"""Minimum per rank, enough for forecasts, findings and the default timeline."""


USUAL = Options()


class MonitorApp(ThemedApp):
    """The monitor. Its result is the exit code; `failure` says why the feed failed."""

    ENABLE_COMMAND_PALETTE = True
    MODES: ClassVar[dict[str, Callable[[], Screen[None]]]] = MODES  # type: ignore[assignment]
    DEFAULT_MODE = "overview"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "leave", "Quit", id="app.quit", tooltip="Quit; the training goes on unaffected"),
        Binding("ctrl+c,ctrl+q", "leave", "Quit", show=False, id="app.interrupt", tooltip="Like q", priority=True),
        Binding("question_mark", "help", "Help", id="app.help", key_display="?", tooltip="All keys, all words"),
        Binding("space", "pause", "Pause", id="app.pause", tooltip="Freeze the picture; events are still received"),
        Binding("1", "mode('overview')", "Overview", id="app.overview", tooltip="The Overview screen"),
        Binding("2", "mode('ranks')", "Ranks", id="app.ranks", tooltip="The Ranks screen: all ranks in one table"),
        Binding("3", "mode('layers')", "Layers", id="app.layers", tooltip="The Layers screen: module by module"),
        Binding("4", "mode('leaks')", "Leaks", id="app.leaks", tooltip="The Leaks screen: what grows, what holds it"),
        Binding("5", "mode('estimate')", "Estimate", id="app.estimate", tooltip="The Estimate screen: line by line"),
        Binding("6", "mode('blocks')", "Blocks", id="app.blocks", tooltip="The Blocks screen: the allocator as a map"),
        Binding("7", "mode('log')", "Log", id="app.log", tooltip="The Log screen: notices, lost events, messages"),
        Binding("J", "home", "Jobs", id="app.home", tooltip="The Home screen: all jobs of this machine"),
        Binding("n", "finding", "Finding", id="app.finding",
                tooltip="Read the most important finding in full; n and N go on to the others"),
        Binding("s", "snapshot", "Snapshot", id="app.snapshot",
                tooltip="Write a snapshot for PyTorch's memory_viz page, on the machine that trains; the path is shown"
                        " here and in the log"),
        Binding("y", "copy", "Copy", id="app.copy",
                tooltip="Copy the answer and the most important finding as Markdown (the terminal must allow OSC 52)"),
        Binding("S", "picture", "Picture", id="app.picture",
                tooltip="Save this screen as an SVG picture in the current directory"),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, id="app.suspend",
                tooltip="Back to the shell; fg continues"),
        Binding("escape", "up", "Overview", show=False, id="app.up",
                tooltip="Back to the newest step, or to the Overview"),
        Binding("t", "theme", "Theme", id="app.theme", tooltip="Dark, light, or the terminal's own colours"),
        Binding("greater_than_sign", "speed(2)", "Speed", id="replay.faster", key_display="</>",
                tooltip="Replay twice as fast"),
        Binding("less_than_sign", "speed(0.5)", "Slower", show=False, id="replay.slower",
                tooltip="Replay half as fast"),
        Binding("full_stop", "step(1)", "Step", id="replay.next", key_display=",/.",
                tooltip="One step more, and hold; in a live run up to the newest, where it is live again"),
        Binding("comma", "step(-1)", "Step back", show=False, id="replay.previous",
                tooltip="Back by one step, and hold: Overview, Layers, Leaks and Estimate show that step"),
        Binding("right,shift+right", "page(1)", "Page", show=False, id="replay.page",
                tooltip="Forwards by one column of the plot, in a replay by 100 steps; with several ranks shift+right"),
        Binding("left,shift+left", "page(-1)", "Page back", show=False, id="replay.page_back",
                tooltip="Back by one column of the plot, in a replay by 100 steps; with several ranks shift+left"),
        Binding("right_square_bracket", "moment(1)", "Event", id="replay.event", key_display="[/]",
                tooltip="To the next event: leak found, out of memory, growth, checkpoint, new shape"),
        Binding("left_square_bracket", "moment(-1)", "Event before", show=False, id="replay.event_before",
                tooltip="To the event before"),
        Binding(
            "colon", "go_to", "Go to", id="replay.go", key_display=":", tooltip="To a step by its number",
            priority=True,  # else the digits that follow it at once still reach the screen below
        ),
        Binding("home", "start", "To the start", show=False, id="replay.start",
                tooltip="To the first step that is kept"),
        Binding("end", "finish", "To the end", show=False, id="replay.end",
                tooltip="Replay: to the last step; back to live from a past step"),
    ]  # fmt: skip

    def __init__(
        self,
        feed: Feed | None = None,
        *,
        machine: Machine | None = None,
        host: HostFeed | None = None,
        asker: Ask | None = None,
        pace: Pace | None = None,
        recording: Recorded | None = None,
        clock: Callable[[], int] = time.time_ns,
        options: Options = USUAL,
        watch_terminal: bool = False,
        seen: Callable[[Frame], object] | None = None,
    ) -> None:
        """`machine`: for the Home screen, which is the first without a `feed`. `seen`: called with every frame that the
        tables are drawn from.
        """
        super().__init__(options)
        self.outputs = Outputs()
        """What trainings print."""
        self.failure: str | None = None
        self.ending: Callable[[], str | None] | None = None
        """Called at the feed's end for a log message."""
        self._playback = Playback(recording, pace or Pace()) if recording is not None else None
        self.view = View(Frame(0, ()), position=self._playback.position if self._playback is not None else None)
        self._live = self.view
        """The newest state, also while the view is of a past step."""
        self._cursor = Cursor(STEPS_IN_ALL)
        self._drawn_soon = False
        self._feed = feed
        self._host = host
        self._asker = asker
        self._pace = self._playback.pace if self._playback is not None else pace
        self._clock = clock
        self._options = options
        self._store = self._new_store()
        self._reporter = Reporter()
        self._source: str | None = None
        self._device: int | None = None
        self._rank_wanted = options.rank
        self._span = DEFAULT_SPAN
        self._paused = False
        self._said: tuple[Said, ...] = ()
        self._ticks = 0
        self._turn = 0
        self._timer: Timer | None = None
        self._changes = StatusLog()
        self._seen = seen
        self._watch = TerminalWatch() if watch_terminal else None
        self._tasks = Tasks(lambda error: self.call_later(_raise, error))
        self._following: asyncio.Task[None] | None = None
        self._reading = False  # this machine
        self._before_home = self.DEFAULT_MODE
        self._home: Home | None = None
        if machine is not None:
            self._home = Home(machine, self._tasks, self._small_store, clock, lambda: self._live, self._home_changed)

    # -------------------------------------------------------------------------------------------------- life

    def on_load(self) -> None:
        """Before there is a screen, so that its first picture has figures."""
        if self._feed is not None:
            self._listen(self._feed)

    def on_mount(self) -> None:
        self._timer = self.set_interval(TICK_S, self.tick)
        if self._watch is not None:
            for number in (signal.SIGHUP, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        if self._playback is not None:
            self._following = self._tasks.start(self._play(self._playback))
            self._tasks.start(self._playback.look())
        elif self._feed is None and self._home is not None:
            self.action_home()

    def _signalled(self, number: int) -> None:
        leave_by_force(128 + number)
        self.exit(128 + number)

    def _new_store(self) -> SessionStore:
        limits = StoreLimits(steps_in_all=STEPS_IN_ALL, steps_at_least=STEPS_AT_LEAST)
        return SessionStore(limits, replaying=self._pace is not None)

    def _small_store(self) -> SessionStore:
        """For each job of the Home screen."""
        return SessionStore(StoreLimits(steps_in_all=STEPS_AT_LEAST, steps_at_least=STEPS_AT_LEAST))

    def _listen(self, feed: Feed) -> None:
        self._following = self._tasks.start(self._follow(feed))
        self._read_machine()

    def _read_machine(self) -> None:
        if self._host is not None and not self._reading:
            self._reading = True
            self._tasks.start(take_host(self._host, self._take_reading, self._alive, TICK_S))

    def _take_reading(self, received: wire.Received) -> None:
        self._store.apply(received)
        if self._home is not None:
            self._home.hear(received)

    def _alive(self) -> list[int]:
        beside = self._home.pids() if self._home is not None else []
        return [rank.hello.pid for rank in self._live.frame.ranks if rank.status != "ended"] + beside

    async def on_unmount(self) -> None:
        await self._tasks.stop()

    async def _play(self, playback: Playback) -> None:
        def at_end() -> None:
            self.say((self.ending() if self.ending else None) or "end of the recording")
            self.redraw()

        def show(store: SessionStore) -> None:
            if store is not self._store:
                self._store, self._reporter = store, Reporter()
                self._live = self.view = replace(self._live, answer=NOBODY)
            self.redraw()

        await playback.run(self._store, self._new_store, show, at_end)

    async def _follow(self, feed: Feed) -> None:
        try:
            async with closing(feed()) as events:
                await take_events(events if self._pace is None else self._pace.play(events), self._store, self.redraw)
        except (LinkError, wire.WireError) as error:
            self.failure = str(error)
            if not self._store.frame(self._clock()).ranks and self._home is not None and feed is not self._feed:
                self.tell(str(error))
                self.action_home()
                return
            if not self._store.frame(self._clock()).ranks:
                self.call_later(self.exit, 1)
                return
            self.say(str(error))
        if self._pace is not None:
            self.say((self.ending() if self.ending else None) or "end of the recording")
        self.redraw()

    def say(self, text: str) -> None:
        self._said = (*self._said, Said(self._clock(), text))[-SAID_MAX:]

    # -------------------------------------------------------------------------------------------------- ticks

    def tick(self) -> None:
        """Every `TICK_S`. Until there is a step to show, every tick draws all that there is."""
        if self._watch is not None and self._watch.gone():
            self._watch = None
            if self._timer is not None:
                self._timer.stop()
            leave_by_force(HUNG_UP)
            self.exit(HUNG_UP)
            return
        self._ticks += 1
        if self.at_home:  # that is drawn when it has something new
            return
        rank = self.view.rank
        known = rank is not None and newest_step(rank) is not None
        if not known or self._ticks % (LIVE_TICKS if self._playback is None else REPLAY_TICKS) == 0:
            self._show()

    def redraw(self) -> None:
        """Redraws everything at once, e.g. after a key press."""
        if self.is_running:
            self._show()

    def _redraw_soon(self) -> None:
        """After the keys that already wait: a past step costs up to 0.4 s of analysis, and a held key sends many."""
        if not self._drawn_soon:
            self._drawn_soon = True
            self.call_later(self._redraw_now)

    def _redraw_now(self) -> None:
        self._drawn_soon = False
        self.redraw()

    def _show(self) -> None:
        if not self._paused:
            frame = self._store.frame(self._clock())
            self._note_changes(frame)
            for text in self._changes.answers(frame):  # the agent's message is already in the log
                self.toast(text)
            if self._seen is not None:
                self._seen(frame)
            due = self._due(frame)
            reports = self._reporter.report(frame, due, self._shown(frame) if frame.ranks else None)
            self._cursor.note(frame, reports)
            self._live = self._look_at(frame, reports, answer(frame, reports, self._live.answer))
        elif self._live.paused != self._paused:
            self._live = self._look_at(self._live.frame, self._live.reports, self._live.answer)
        self.view = self._live if self.at_home else self._cursor.shown(self._live)
        stack = self.screen_stack
        if not stack:  # a last tick while the app shuts down
            return
        screen = stack[-1]
        if isinstance(screen, MonitorScreen) and screen.is_mounted:
            with self.batch_update():
                screen.show(self.view)

    def _due(self, frame: Frame) -> frozenset[str] | None:
        """Sources to analyse (None: all): some in turn, and the shown one. 40 steps at once cost less than 4 × 10."""
        turns = min(TURNS, ceil(len(frame.ranks) / MANY))
        if turns <= 1:
            return None
        self._turn = (self._turn + 1) % turns
        return frozenset([rank.source for rank in frame.ranks[self._turn :: turns]] + [self._shown(frame)])

    def _shown(self, frame: Frame) -> str:
        return self._source or frame.ranks[0].source

    def _look_at(self, frame: Frame, reports: tuple[RankReport, ...], answered: Answer) -> View:
        if self._rank_wanted is not None:
            wanted = next((r for r in frame.ranks if r.hello.rank == self._rank_wanted), None)
            if wanted is not None:
                self._source, self._rank_wanted = wanted.source, None
        cannot = None
        if self._asker is None:
            cannot = "this is a replay" if self._pace is not None else "this viewer sends no requests"
        position = self._playback.position if self._playback is not None else None
        view = choose(
            frame, reports, self._source, self._device, span=self._span,
            paused=self._paused or (position is not None and position.held and not position.ended),
            said=self._said, answered=answered, cannot_ask=cannot,
        )  # fmt: skip
        return view if position is None else replace(view, position=position)

    def _note_changes(self, frame: Frame) -> None:
        """Logs status changes; follows the shown rank through a restart."""
        for text in self._changes.look(frame):
            self.say(text)
        shown = next((r for r in frame.ranks if r.source == self._source), None)
        if self._source is not None and shown is None and frame.ranks:
            was = self._live.rank
            same = [r for r in frame.ranks if was is not None and r.hello.rank == was.hello.rank]
            self._source = (same or list(frame.ranks))[0].source

    # -------------------------------------------------------------------------------------------------- actions

    def zoom(self, by: int) -> None:
        """Fewer (−1) or more (+1) steps in the timeline."""
        steps = self._live.rank.steps if self._live.rank is not None else ()
        shown = min(self._span, steps[-1].step - steps[0].step + 1 if steps else self._span)
        closer = max((span for span in SPANS if span < shown), default=SPANS[0])
        wider = min((span for span in SPANS if span > self._span), default=SPANS[-1])
        self._span = closer if by < 0 else wider
        self._again()

    def next_rank(self, by: int) -> None:
        ranks = self.view.frame.ranks
        if len(ranks) > 1:
            at = next((i for i, r in enumerate(ranks) if r is self.view.rank), 0)
            self._source, self._device = ranks[(at + by) % len(ranks)].source, None
            self._again()

    def next_device(self) -> None:
        devices = self.view.report.devices if self.view.report else ()
        if len(devices) > 1:
            at = next((i for i, d in enumerate(devices) if d is self.view.device), 0)
            self._device = devices[(at + 1) % len(devices)].device
            self._again()

    def open_rank(self, source: str, device: int | None, mode: str = "overview") -> None:
        self._source, self._device = source, device
        self.action_mode(mode)
        self._again()

    # -------------------------------------------------------------------------------------------------- home

    @property
    def at_home(self) -> bool:
        return self.current_mode == "home"

    @property
    def has_job(self) -> bool:
        """Whether a job is open."""
        return self._following is not None

    @property
    def home_page(self) -> HomePage:
        return self._home.page if self._home is not None else HomePage()

    def _home_changed(self) -> None:
        if self.at_home and len(self.screen_stack) == 1:
            self.redraw()

    def action_home(self) -> None:
        """To the Home screen, which listens only while it is open."""
        if self._home is None or self.at_home or len(self.screen_stack) > 1:
            return
        self._before_home = self.current_mode
        self._home.listen(True)
        self._read_machine()
        self.switch_mode("home")

    def leave_home(self) -> None:
        self.action_mode(self._before_home)

    def open_job(self, job: str, source: str | None, device: int | None) -> None:
        """A row of the Home screen: follows its job, unless that is the one that is open."""
        if self._home is None:
            return
        chosen = self._home.choice_of(job)
        if chosen is not None:
            if self._following is not None:
                self._following.cancel()
            self._store, self._reporter, self._changes = self._new_store(), Reporter(), StatusLog()
            self._live = self.view = View(Frame(0, ()))
            self._cursor, self.failure, self._paused = Cursor(STEPS_IN_ALL), None, False
            self._source, self._device = source, device
            self.action_mode("overview")
            self._listen(chosen.feed)
        elif any(rank.source == source for rank in self._live.frame.ranks):
            self._source, self._device = source, device
            self.leave_home()
        else:
            self.notify("This job has ended, and nobody recorded it.", timeout=TOLD_S, markup=False)

    def open_finding(self, each: JobFinding | None = None) -> None:
        """A page with one finding in full; by default the most important one."""
        from gpumon.tui.screens.help import FindingScreen

        found = job_findings(self.view.frame, self.view.reports)
        if each is not None and all(other.finding.key != each.finding.key for other in found):
            found = (each,)
        at = next((i for i, other in enumerate(found) if each is not None and other.finding.key == each.finding.key), 0)
        if found:
            self.push_screen(FindingScreen(found, at, self._open_details))

    def _open_details(self, each: JobFinding) -> None:
        mode = details_of(each)
        shown = self.view.rank
        if mode is not None and (shown is None or shown.source not in each.sources):
            self.open_rank(each.sources[0], None, mode)
        elif mode is not None:
            self.action_mode(mode)

    def tell(self, text: str) -> None:
        """Shows a message over the screen and logs it."""
        self.say(text)
        self.toast(text)

    def ask(self, what: str, *, quietly: bool = False) -> None:
        """Sends a request about the shown device to the rank's agent. The result arrives as an event.

        `quietly`: nobody pressed a key for it, so only a failure is said.
        """
        rank, why_not = self.view.rank, self.view.cannot_ask
        if rank is None or why_not is not None or self._asker is None:
            self.toast(f"No request is possible: {why_not or 'no agent is connected'}.")
            return
        self._tasks.start(self._ask(self._asker, rank.source, what, self.view.index or 0, quietly=quietly))

    async def _ask(self, asker: Ask, source: str, what: str, device: int, *, quietly: bool) -> None:
        try:
            reply = await asker(source, what, device)
        except LinkError as error:
            self.tell(str(error))
            return
        if reply.accepted:
            if not quietly:
                self.toast(f"{what}: {reply.why}")
        else:
            self.tell(f"{what}: {reply.why}")

    def _again(self) -> None:
        if self._paused:
            self._live = self._look_at(self._live.frame, self._live.reports, self._live.answer)
        self.redraw()

    def action_leave(self) -> None:
        self.exit(0)

    def action_pause(self) -> None:
        if self._playback is not None:
            self._playback.pace.hold(not self._playback.pace.held)
        else:
            self._paused = not self._paused
        self._again()

    def action_mode(self, name: str) -> None:
        if len(self.screen_stack) > 1:  # a popup is open
            return
        if self._home is not None and name != "home":
            self._home.listen(False)
        self.switch_mode(name)
        self.redraw()

    def action_finding(self) -> None:
        if len(self.screen_stack) == 1:
            self.open_finding()

    def action_copy(self) -> None:
        from gpumon.tui.screens.help import markdown

        found = job_findings(self.view.frame, self.view.reports)
        self.copy_to_clipboard(f"{line(self.view.answer)}\n\n{markdown(found[0]) if found else ''}".strip() + "\n")
        self.toast("Copied as Markdown.")

    def action_picture(self) -> None:
        rank = self.view.rank
        step = newest_step(rank) if rank is not None else None
        name = Path(rank.hello.name).stem if rank is not None else "gpumon"
        file = Path.cwd() / f"gpumon-{name}-{self.current_mode}{'' if step is None else f'-{step}'}.svg"
        try:
            file.write_text(self.export_screenshot(), encoding="utf-8")
        except OSError as error:
            self.tell(f"The picture cannot be saved: {error.strerror} ({file}).")
            return
        self.tell(f"Saved {file}")

    def action_up(self) -> None:
        if self._can_look_back and self._cursor.step is not None:
            self.action_finish()
        else:
            self.action_mode("overview")

    def action_snapshot(self) -> None:
        self.ask(wire.SNAPSHOT_FILE)

    def action_speed(self, factor: float) -> None:
        if self._pace is not None:
            self._pace.change(factor)
            self.say(f"replay at {self._pace.speed:g} times its speed")

    def action_finish(self) -> None:
        if self._playback is not None:
            self._playback.finish()
        elif self._pace is not None:
            self._pace.finish()
        else:
            self._cursor.finish()
            self.redraw()

    @property
    def _can_look_back(self) -> bool:
        """Whether past steps of a live run can be shown here."""
        live = self._pace is None and not self.at_home and len(self.screen_stack) == 1
        return live and self._live.rank is not None and bool(self._live.rank.steps)

    def action_start(self) -> None:
        self.go_to_step(0)

    def action_step(self, by: int) -> None:
        steps = self._live.rank.steps if self._live.rank is not None else ()
        if self._playback is not None and by == -1 and len(steps) > 1 and self._playback.position.going_to is None:
            by = steps[-2].step - steps[-1].step  # those between were not read
        (self._playback or self._cursor).go_by(by)
        self._redraw_soon()

    def action_page(self, by: int) -> None:
        if self._playback is not None:
            self.action_step(by * PAGE_STEPS)
            return
        if self.current_mode != "overview":
            self.action_step(by)
            return
        plot = self.screen.query_one(Timeline)
        beside = plot.beside(self._cursor.step, by)
        if beside is not None:
            self.go_to_step(beside)
        elif by > 0 and plot.drawn:
            self.action_finish()
        else:
            self.action_step(by)

    def action_moment(self, by: int) -> None:
        found = (self._playback or self._cursor).go_to_moment(by)
        if found is None:
            self.toast(f"No event {'after' if by > 0 else 'before'} this step is known.")
        self.redraw()

    def action_go_to(self) -> None:
        from gpumon.tui.screens.goto import GotoScreen

        self.push_screen(GotoScreen(), self._go_to)

    def _go_to(self, step: int | None) -> None:
        steps = self._live.rank.steps if self._live.rank is not None else ()
        if step is None:
            return
        if self._playback is None and steps and step < steps[0].step:
            self.toast(f"The oldest step that is kept in full is {steps[0].step:,}.")
        self.go_to_step(step)

    def go_to_step(self, step: int) -> None:
        """A replay goes there and holds; of a live run it is shown while new ones arrive."""
        if self._playback is not None:
            self._playback.pace.hold(True)
            self._playback.go(step)
        elif self._can_look_back:
            self._cursor.go(step)
        self._redraw_soon()

    def explain(self, title: str, sums: list[str], terms: tuple[str, ...]) -> None:
        from gpumon.tui.screens.help import FiguresScreen

        self.push_screen(FiguresScreen(title, sums, terms))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "speed" or (action == "finish" and self._pace is not None):
            return self._pace is not None
        if action == "finish":
            return self._can_look_back and self._cursor.step is not None
        if action in ("step", "page", "moment", "go_to", "start"):
            return self._can_look_back or (self._playback is not None and len(self.screen_stack) == 1)
        if action == "theme":
            return not self.colourless
        if action == "up" and self._can_look_back and self._cursor.step is not None:
            return True
        if action == "up":
            return self.current_mode not in ("overview", "home") and not isinstance(self.screen, ModalScreen)
        if action == "copy":
            return self.view.rank is not None
        if action == "finding":
            return bool(job_findings(self.view.frame, self.view.reports))
        if action == "snapshot":
            return self.view.rank is not None and self.view.cannot_ask is None
        if action == "home":
            return self._home is not None and not self.at_home
        if action == "mode":
            if parameters == ("home",):
                return self.check_action("home", ())
            if self.at_home and not self.has_job:
                return False
            ranks = self.view.frame.ranks  # a rank that is heard alone may be one of many
            several = len(ranks) > 1 or any((rank.hello.world_size or 1) > 1 for rank in ranks)
            if parameters == (self.current_mode,):
                return None
            return parameters != ("ranks",) or several
        return True

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Palette commands for the key actions."""
        yield SystemCommand("Quit", "Quit; the training goes on unaffected", self.action_leave)
        yield SystemCommand("Help", "All keys, all words", self.action_help)
        yield SystemCommand("Picture", "Save this screen as an SVG picture", self.action_picture)
        if self.check_action("copy", ()):
            yield SystemCommand("Copy", "The answer and the most important finding, as Markdown", self.action_copy)
        if self.check_action("finding", ()):
            yield SystemCommand("Finding", "The most important finding in full", self.action_finding)
        yield SystemCommand("Pause", "Hold the picture still, or let it go on", self.action_pause)
        for name in self.MODES:
            if self.check_action("mode", (name,)):
                yield SystemCommand(
                    name.capitalize(), f"The {name.capitalize()} screen", lambda n=name: self.action_mode(n)
                )
        if self.view.rank is not None and self.view.cannot_ask is None:
            for what, doing in ASKED.items():
                yield SystemCommand(doing[0], doing[1], lambda w=what: self.ask(w))
        if isinstance(screen, OverviewScreen):
            yield SystemCommand("Explain", "What the focused panel's numbers mean", screen.action_explain)
            for span in SPANS:
                which = "the whole run" if span == WHOLE_RUN else f"{span} steps"
                yield SystemCommand(f"Timeline: {which}", "", lambda s=span: self._zoom_to(s))
        if not self.colourless:
            for theme in NAMES:
                yield SystemCommand(f"Theme: {theme.removeprefix('gpumon-')}", "", lambda t=theme: self.look(t))

    def _zoom_to(self, span: int) -> None:
        self._span = span
        self._again()


_monitor: type[Monitor] = MonitorApp  # checked only by mypy


def _raise(error: BaseException) -> None:
    raise error
