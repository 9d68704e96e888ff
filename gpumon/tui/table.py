"""One table for all screens: columns given up where there is no room, headings, and a cursor that stays on its row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from textual import events
from textual.binding import Binding, BindingType

from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, left, right, width
from gpumon.tui.widgets.panel import Panel

R = TypeVar("R")
D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Column(Generic[R, D]):
    """A figure of a row of type R, written with the help of D: units, glyphs. A text instead, if it is `to_left`."""

    name: str
    heading: str
    width: int
    rank: int
    """The highest is given up first."""
    cell: Callable[[R, D], tuple[str | Line, str]]
    """Text, or spans to be shown as they are, and the text's role."""
    to_left: bool = False

    def aligned(self, text: str) -> str:
        return f"  {left(text, self.width - 2)}" if self.to_left else f" {right(text, self.width - 1)}"


Columns = Sequence[Column[R, D]]


def place(columns: Columns[R, D], room: int, order: str = "") -> Columns[R, D]:
    """Those that have room, in their own order: what is sorted by first, then by rank."""
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
    """The headings; `mark` beside the one that is sorted by."""
    return [
        (column.aligned(column.heading + mark * (column.name == order)), "key" if column.name == order else "dim")
        for column in columns
    ]


def mark(glyphs: Glyphs, upwards: bool = False) -> str:
    return ("▴" if upwards else "▾") if glyphs.braille else ("^" if upwards else "v")


def row_cells(columns: Columns[R, D], row: R, with_: D, role: str | None = None) -> list[Span]:
    """A row's figures, all in one role if one is given."""
    line: list[Span] = []
    for column in columns:
        text, own = column.cell(row, with_)
        if isinstance(text, str):
            line.append((column.aligned(text), role or own))
        else:
            line += [("  ", ""), *text, (" " * (column.width - 2 - width(text)), "")]
    return line


def column_at(columns: Columns[R, D], x: int) -> str | None:
    """Whose heading is `x` cells right of where the columns begin."""
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
    """Rows with a cursor. It stays on its row, wherever another order or new rows put that."""

    CALM = True

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._at = 0
        self._top = 0
        self._key: Hashable = None
        self._space = 1
        self._first_y = 0

    def keys(self) -> Sequence[Hashable]:
        """What tells the rows apart, from top to bottom."""
        raise NotImplementedError

    def row_at(self, y: int) -> int | None:
        """The row that is drawn there."""
        row = self._top + y - self._first_y
        return row if y >= self._first_y and row < len(self.keys()) else None

    def heading_at(self, x: int) -> str | None:
        """What a click on the headings sorts by."""
        return None

    def sort(self, order: str) -> None:
        """Sort by it."""

    def press(self) -> None:
        """The row under the cursor was clicked once more."""

    def find_row(self) -> int:
        """Puts the cursor where its row is now; how many rows there are."""
        keys = self.keys()
        if self._key in keys:
            self._at = keys.index(self._key)
        self._at = max(0, min(self._at, len(keys) - 1))
        self._key = keys[self._at] if keys else None
        return len(keys)

    def scroll(self, space: int, first_y: int) -> None:
        """Before rows are drawn, `space` of them from the line `first_y` on: the cursor is in sight."""
        count = self.find_row()
        self._space, self._first_y = max(1, space), first_y
        self._top = max(0, min(self._top, count - self._space))
        self._top = min(max(self._top, self._at - self._space + 1), self._at)

    def from_top(self) -> None:
        """In another order one looks from the top on."""
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
        """On a heading: sort by it; on a row: go there; on the row under the cursor: press it."""
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
    """The order after this one, or before it."""
    known = list(names)
    return known[(known.index(name) + by) % len(known)]
