"""The agents' notices, lost events, ends of ranks, and the viewer's own messages, by time. Below, where that goes to a
file, what the training prints.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

import msgspec
from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpumon.analysis.job import ending
from gpumon.analysis.units import size
from gpumon.tui.monitor import Monitor
from gpumon.tui.screens.base import MonitorScreen
from gpumon.tui.status_log import written
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, chop, clip, words
from gpumon.tui.training_output import LINE_CHARS_MAX, LINES_MAX, TrainingOutput
from gpumon.tui.view import View
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.prose import Prose
from gpumon_agent import wire

OUTPUT_BELOW = (
    f"Below are the last {LINES_MAX:,} lines of the file that the training's output goes to. Python passes on what it "
    "prints in blocks of 8 KiB unless it is flushed; with PYTHONUNBUFFERED=1 each line comes at once."
)
OUTPUT_ELSEWHERE = (
    "What the training prints is not here: its output does not go to a file of this machine, and gpumon does not stand "
    "between a training and its terminal. `gpumon run train.py > train.log` shows it here, as do `gpumon demo` and "
    "`gpumon dryrun`."
)


class Entry(msgspec.Struct, frozen=True):
    unix_ns: int
    who: str
    text: str
    role: str = "text"


def entries(view: View) -> tuple[Entry, ...]:
    made = [Entry(said.unix_ns, "gpumon", said.text, "dim") for said in view.said]
    for rank in view.frame.ranks:
        who = rank.label
        made += [
            Entry(rank.unix_ns(n.t_ns), who, f"step {n.step:,}: {n.text}" if n.step is not None else n.text)
            for n in rank.notices
        ]
        if rank.oom is not None:
            o = rank.oom
            text = f"out of memory in {o.phase}, step {o.step:,}: {size(o.requested)} requested. {o.message}"
            made.append(Entry(rank.unix_ns(o.t_ns), who, text, "bad"))
        if rank.snapshot is not None:
            made.append(Entry(rank.unix_ns(rank.snapshot.t_ns), who, written(rank)))
        if rank.lost_events:
            made.append(
                Entry(rank.heard_unix_ns, who, f"{rank.lost_events:,} events did not reach this viewer", "warn")
            )
        if rank.heartbeat and rank.heartbeat.dropped:
            text = f"{rank.heartbeat.dropped:,} events were dropped in the agent's queue"
            made.append(Entry(rank.heard_unix_ns, who, text, "warn"))
        if rank.goodbye is not None:
            role = "text" if rank.goodbye.reason == "finished" else "warn"
            made.append(Entry(rank.unix_ns(rank.goodbye.t_ns), who, ending(rank) or "", role))
    return tuple(sorted(made, key=lambda e: e.unix_ns))


def output_of(monitor: Monitor) -> TrainingOutput | None:
    """What the shown rank prints; None: gpumon cannot see it. A replay's process may run, but that is another time."""
    view = monitor.view
    return monitor.outputs.of(view.rank if view.position is None or view.now is not None else None)


class Log(Prose):
    """The log; follows new lines until scrolled up."""

    NAME = "Log"
    TITLES = 1
    TERMS = ("lost events", "sampled")

    def pick(self, view: View) -> tuple[Entry, ...]:
        return entries(view)

    def sums(self) -> list[str]:
        return [OUTPUT_ELSEWHERE if output_of(self.monitor) is None else OUTPUT_BELOW]

    def compose_lines(self, slice_: tuple[Entry, ...], width: int, glyphs: Glyphs) -> list[Line]:
        lines: list[Line] = [((" Log", "title"),)]
        if not slice_:
            lines.append(((" no messages yet", "dim"),))
        for entry in slice_:
            clock = datetime.fromtimestamp(entry.unix_ns / 1e9).strftime("%H:%M:%S")
            lead = f" {clock}  {entry.who:<10} "
            room = max(20, width - len(lead) - 1)
            text = " ".join(part for word in entry.text.split() for part in chop(word, room))  # a path stays whole
            rows = words(text, entry.role, room) or [((" ", ""),)]
            lines.append(((lead, "dim"), *rows[0]))
            lines += [((" " * len(lead), ""), *row) for row in rows[1:]]
        return lines


class Output(Prose):
    """What the training prints; follows new lines until scrolled up."""

    NAME = "Output"
    TITLES = 1

    def pick(self, view: View) -> tuple[str, ...]:
        output = output_of(self.monitor)
        return output.lines() if output is not None else ()

    def sums(self) -> list[str]:
        return [OUTPUT_BELOW]

    def compose_lines(self, slice_: tuple[str, ...], width: int, glyphs: Glyphs) -> list[Line]:
        output = output_of(self.monitor)
        title = "" if output is None else wire.clean(output.whose, LINE_CHARS_MAX)
        lines: list[Line] = [((" Output", "title"), ("  ", ""), (clip(title, width - 9), "dim"))]
        if not slice_:
            lines.append(((" nothing printed yet", "dim"),))
        for text in slice_:
            lines += [((" ", ""), (row, "text")) for row in chop(text, max(20, width - 2))]
        return lines


class LogScreen(MonitorScreen):
    AUTO_FOCUS = "#log"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "copy_path", "Copy", id="log.copy",
                tooltip="Copy the path of the newest snapshot; without one, the answer and finding"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield Log(tail=True, id="log")
        yield Output(tail=True, id="output")
        yield KeyLine(id="keys")

    def show(self, view: View) -> None:
        for output in self.query(Output):  # none while the app shuts down
            output.display = output_of(self.monitor) is not None
        super().show(view)

    async def action_copy_path(self) -> None:
        written = [
            (rank.unix_ns(rank.snapshot.t_ns), rank.snapshot.path)
            for rank in self.monitor.view.frame.ranks
            if rank.snapshot is not None and rank.snapshot.path is not None
        ]
        if not written:
            await self.run_action("app.copy")
            return
        _, path = max(written)
        self.app.copy_to_clipboard(path)
        self.notify(f"Copied {path}", markup=False)
