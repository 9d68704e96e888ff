"""Scrolling text: help, explain pages, the log."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel


class Prose(Panel):
    """A page of lines, the first `TITLES` of which stay. `tail`: follows the end until scrolled up."""

    TITLES = 0

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_lines(-1)", "Up", show=False, id="prose.up", tooltip="One line up"),
        Binding("down,j", "scroll_lines(1)", "Down", show=False, id="prose.down", tooltip="One line down"),
        Binding("pageup", "scroll_pages(-1)", "Page up", show=False, id="prose.page_up", tooltip="One page up"),
        Binding("pagedown", "scroll_pages(1)", "Page down", show=False, id="prose.page_down", tooltip="One page down"),
        Binding("home,g", "scroll_lines(-1000000)", "Top", show=False, id="prose.top", tooltip="To the beginning"),
        Binding("end,G", "scroll_lines(1000000)", "End", show=False, id="prose.end", tooltip="To the end"),
    ]

    def __init__(self, *, tail: bool = False, id: str | None = None) -> None:
        super().__init__(id=id)
        self._tail = tail
        self._top: int | None = None if tail else 0
        self._all = 0

    def pick(self, view: View) -> Any:
        return self._slice

    def compose_lines(self, slice_: Any, width: int, glyphs: Glyphs) -> list[Line]:
        raise NotImplementedError

    def draw(self, slice_: Any, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        lines = self.compose_lines(slice_, width, glyphs)
        titles, lines = lines[: self.TITLES], lines[self.TITLES :]
        height -= len(titles)
        self._all = len(lines)
        last = max(0, len(lines) - height)
        top = last if self._top is None else min(self._top, last)
        if self._top is not None:
            self._top = None if self._tail and top == last else top
        shown = list(lines[top : top + height])
        below = len(lines) - top - height
        if below > 0 and shown:
            shown[-1] = ((f" … {below + 1} more lines (arrows, page keys)", "dim"),)
        return titles + shown

    def action_scroll_lines(self, by: int) -> None:
        last = max(0, self._all + self.TITLES - self.size.height)
        top = last if self._top is None else self._top
        self._top = max(0, min(last, top + by))
        self._redraw()

    def action_scroll_pages(self, by: int) -> None:
        self.action_scroll_lines(by * max(1, self.size.height - 2))

    def on_mouse_scroll_down(self) -> None:
        self.action_scroll_lines(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_scroll_lines(-3)
