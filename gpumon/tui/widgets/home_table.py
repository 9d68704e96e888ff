"""All jobs of this machine with their ranks, then GPU processes without an agent."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from gpumon.tui.styles import Glyphs
from gpumon.tui.table import TablePanel, moves
from gpumon.tui.text_layout import Line
from gpumon.tui.view import View
from gpumon.tui.widgets.home_lines import HINT, home_lines
from gpumon.tui.widgets.home_rows import HomePage, JobRow, Key


class HomeTable(TablePanel):
    NAME = "Jobs"
    TERMS = (
        "answer", "memory", "peak", "capacity", "reserved", "other processes", "step", "it/s", "headroom", "age",
        "no agent", "device",
    )  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = [
        *moves("home", "job"),
        Binding("enter", "open", "Open", id="home.open", tooltip="Open this job, or this rank of it"),
    ]

    class Opened(Message):
        def __init__(self, row: JobRow) -> None:
            super().__init__()
            self.row = row

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._drawn_rows: tuple[int, ...] = ()
        self._moved = False

    def pick(self, view: View) -> HomePage:
        return self.page if view.paused and self._fresh else self.monitor.home_page

    @property
    def page(self) -> HomePage:
        return self._slice or HomePage()

    def keys(self) -> list[Key]:
        return [row.key for row in self.page.rows]

    def draw(self, slice_: HomePage, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        if not self._moved:  # whatever is known first
            self.from_top()
        self.find_row()
        drawn = home_lines(slice_, self._at, width, height, glyphs, self.title_role)
        self._drawn_rows, self._space = drawn.rows, max(1, drawn.space // 2)
        return drawn.lines

    def row_at(self, y: int) -> int | None:
        row = self._drawn_rows[y] if y < len(self._drawn_rows) else -1
        return row if row >= 0 else None

    def go(self, at: int) -> None:
        self._moved = True
        super().go(at)

    def press(self) -> None:
        self.action_open()

    def action_open(self) -> None:
        rows = self.page.rows
        if not rows:
            return
        row = rows[self._at]
        if isinstance(row, JobRow):
            self.post_message(self.Opened(row))
        else:
            self.app.notify(f"Process {row.pid}: {HINT}.", markup=False)
