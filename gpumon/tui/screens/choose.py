"""The job chooser."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.message import Message

from gpumon.tui.feed import JobChoice
from gpumon.tui.screens.base import MonitorScreen
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import EMPTY, Line, fit, left
from gpumon.tui.view import View
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.panel import Panel


class JobList(Panel):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", id="choose.up", key_display="↑", tooltip="The job above"),
        Binding("down,j", "move(1)", "Down", id="choose.down", key_display="↓", tooltip="The job below"),
        Binding("enter", "take", "Watch", id="choose.take", tooltip="Watch this job"),
    ]

    class Chosen(Message):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

    def __init__(self, choices: Sequence[JobChoice], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._choices = tuple(choices)
        self._cursor = 0

    def pick(self, view: View) -> Any:
        return self._cursor

    def draw(self, slice_: int, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        lines: list[Line] = [EMPTY, ((f" {len(self._choices)} jobs run here. Which one?", "strong"),), EMPTY]
        room = max((len(c.name) for c in self._choices), default=0)
        for i, c in enumerate(self._choices):
            here = i == slice_
            lines.append(
                fit(
                    [
                        (f"  {glyphs.now if here else ' '} ", "key"),
                        (left(c.name, min(room, max(8, width // 2))), "cursor" if here else "text"),
                        (f"   {c.detail}", "dim"),
                    ],
                    width,
                )
            )
        return lines

    def action_move(self, by: int) -> None:
        self._cursor = (self._cursor + by) % len(self._choices)
        self._slice = self._cursor
        self._redraw()

    def action_take(self) -> None:
        self.post_message(self.Chosen(self._cursor))


class ChooseScreen(MonitorScreen):
    AUTO_FOCUS = "#jobs"

    def __init__(self, choices: Sequence[JobChoice]) -> None:
        super().__init__()
        self._choices = choices

    def compose(self) -> ComposeResult:
        yield JobList(self._choices, id="jobs")
        yield KeyLine(id="keys")

    def on_job_list_chosen(self, message: JobList.Chosen) -> None:
        self.monitor.take(self._choices[message.index])
