"""One table for all screens: columns that are dropped if there is no room, headings, a cursor that follows its row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
from textual import events
from textual.binding import Binding, BindingType

from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, left, right, width
from gpumon.tui.widgets.panel import Panel

R = TypeVar("R")
D = TypeVar("D")


class Column(msgspec.Struct, Generic[R, D], frozen=True):
    """A column of rows of type R; D: what formatting needs (units, glyphs). `to_left`: text."""

    name: str
    heading: str
    width: int
    rank: int
    """The highest is dropped first."""
    cell: Callable[[R, D], tuple[str | Line, str]]
    """Text and its role, or spans to show as they are."""
    to_left: bool = False

    def aligned(self, text: str) -> str:
        return f"  {left(text, self.width - 2)}" if self.to_left else f" {right(text, self.width - 1)}"


Columns = Sequence[Column[R, D]]


def place(columns: Columns[R, D], room: int, order: str = "") -> Columns[R, D]:
    """The columns that fit, in their own order: the sort column first, then by rank."""
    kept: list[Column[R, D]] = []
    for column in sorted(columns, key=lambda column: (column.name != order, column.rank)):
        if column.width > room:
            break
        kept.append(column)
        room -= column.width
    return [column for column in columns if column in kept]


def used(columns: Columns[R, D]) -> int:
    return sum(column.width for column in columns)


def heads(columns: Columns[R, D], order: str = "", mark: str = "") -> list[Span]:
    """The headings; `mark` is added to the sort column."""
    return [
        (column.aligned(column.heading + mark * (column.name == order)), "key" if column.name == order else "dim")
        for column in columns
    ]


def mark(glyphs: Glyphs, upwards: bool = False) -> str:
    return ("▴" if upwards else "▾") if glyphs.braille else ("^" if upwards else "v")


def row_cells(columns: Columns[R, D], row: R, with_: D, role: str | None = None) -> list[Span]:
    """A row's cells, all in `role` if given."""
    line: list[Span] = []
    for column in columns:
        text, own = column.cell(row, with_)
        if isinstance(text, str):
            line.append((column.aligned(text), role or own))
        else:
            line += [("  ", ""), *text, (" " * (column.width - 2 - width(text)), "")]
    return line


def column_at(columns: Columns[R, D], x: int) -> str | None:
    """The column at `x`, relative to the first."""
    for column in columns:
        if 0 <= x < column.width:
            return column.name
        x -= column.width
    return None


def moves(group: str, what: str) -> list[BindingType]:
    """The keys that move a table's cursor."""
    return [
        Binding("up,k", "move(-1)", "Up", show=False, id=f"{group}.up", tooltip=f"The {what} above"),
        Binding("down,j", "move(1)", "Down", show=False, id=f"{group}.down", tooltip=f"The {what} below"),
        Binding("pageup", "page(-1)", "Page up", show=False, id=f"{group}.page_up", tooltip="One page up"),
        Binding("pagedown", "page(1)", "Page down", show=False, id=f"{group}.page_down", tooltip="One page down"),
        Binding("home,g", "move(-1000000)", "First", show=False, id=f"{group}.first", tooltip=f"The first {what}"),
        Binding("end,G", "move(1000000)", "Last", show=False, id=f"{group}.last", tooltip=f"The last {what}"),
    ]


class TablePanel(Panel):
    """Rows with a cursor. It follows its row when the order changes or rows are added."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._at = 0
        self._top = 0
        self._key: Hashable = None
        self._space = 1
        self._first_y = 0

    def keys(self) -> Sequence[Hashable]:
        """A unique key per row, from top to bottom."""
        raise NotImplementedError

    def row_at(self, y: int) -> int | None:
        row = self._top + y - self._first_y
        return row if y >= self._first_y and row < len(self.keys()) else None

    def heading_at(self, x: int) -> str | None:
        """Order for a click on a heading."""
        return None

    def sort(self, order: str) -> None:
        """Sorts."""

    def press(self) -> None:
        """Called for a click on the row under the cursor."""

    def find_row(self) -> int:
        """Moves the cursor to its row; returns the row count."""
        keys = self.keys()
        if self._key in keys:
            self._at = keys.index(self._key)
        self._at = max(0, min(self._at, len(keys) - 1))
        self._key = keys[self._at] if keys else None
        return len(keys)

    def scroll(self, space: int, first_y: int) -> None:
        """Called before `space` rows are drawn from line `first_y` on: scrolls the cursor into view."""
        count = self.find_row()
        self._space, self._first_y = max(1, space), first_y
        self._top = max(0, min(self._top, count - self._space))
        self._top = min(max(self._top, self._at - self._space + 1), self._at)

    def from_top(self) -> None:
        """Back to the top, for a new order."""
        self._key, self._at = None, 0

    def go(self, at: int) -> None:
        keys = self.keys()
        if keys:
            self._at = max(0, min(at, len(keys) - 1))
            self._key = keys[self._at]
            self._redraw()

    def action_move(self, by: int) -> None:
        self.go(self._at + by)

    def action_page(self, by: int) -> None:
        self.go(self._at + by * max(1, self._space - 1))

    def on_click(self, event: events.Click) -> None:
        """On a heading: sort by it; on a row: go there; on the row under the cursor: `press`."""
        at = event.get_content_offset(self)
        if at is None:
            return
        row = self.row_at(at.y)
        if row is not None:
            if row == self._at:
                self.press()
            else:
                self.go(row)
        elif at.y == self._first_y - 1 and (order := self.heading_at(at.x)) is not None:
            self.sort(order)

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)


def next_of(names: Iterable[str], name: str, by: int) -> str:
    known = list(names)
    return known[(known.index(name) + by) % len(known)]
