"""The groups of the newest census, with a cursor, and who holds the chosen ones."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from gpumon.analysis.census import ORDERS, Row, rows_of
from gpumon.tui.ink import Glyphs
from gpumon.tui.spans import Line
from gpumon.tui.view import View
from gpumon.tui.widgets.leak_lines import HEADS, Leaks, column_at, explanation, foot_height, leak_lines
from gpumon.tui.widgets.panel import Panel


class LeakTable(Panel):
    """Groups, one a line."""

    NAME = "Held tensors"
    TERMS = ("census", "tensors", "grown", "bytes/step", "graph", "held by", "made at", "unexplained")
    CALM = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False, id="leaks.up", tooltip="The group above"),
        Binding("down,j", "move(1)", "Down", show=False, id="leaks.down", tooltip="The group below"),
        Binding("pageup", "move(-10)", "Page up", show=False, id="leaks.page_up", tooltip="Ten groups up"),
        Binding("pagedown", "move(10)", "Page down", show=False, id="leaks.page_down", tooltip="Ten groups down"),
        Binding("home,g", "move(-1000000)", "First", show=False, id="leaks.first", tooltip="The first group"),
        Binding("end,G", "move(1000000)", "Last", show=False, id="leaks.last", tooltip="The last group"),
        Binding("o", "order(1)", "Sort", id="leaks.order", tooltip="Sort by the next column, the largest first"),
        Binding("O", "order(-1)", "Sort back", show=False, id="leaks.order_back", tooltip="Sort by the column before"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.order = ORDERS[0]
        self._at = 0
        self._top = 0
        self._key: tuple[object, ...] | None = None
        self._seen: View | None = None

    def pick(self, view: View) -> Leaks:
        self._seen = view
        rank = view.rank
        if rank is None or rank.census is None:
            return Leaks(None, (), view.cannot_ask)
        before = rank.censuses[-2] if len(rank.censuses) > 1 else None
        rows = rows_of(rank.census, before, view.index, self.order)
        return Leaks(rank.census, rows, view.cannot_ask)

    @property
    def _rows(self) -> tuple[Row, ...]:
        slice_: Leaks | None = self._slice
        return slice_.rows if slice_ is not None else ()

    @property
    def here(self) -> Row | None:
        """The group under the cursor."""
        rows = self._rows
        return rows[self._at] if self._at < len(rows) else None

    def draw(self, slice_: Leaks, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        keys = [row.key for row in slice_.rows]
        if self._key in keys:
            self._at = keys.index(self._key)
        self._at = max(0, min(self._at, len(keys) - 1))
        self._key = keys[self._at] if keys else None
        foot = foot_height(slice_.rows, self._at, height)
        room = max(1, height - HEADS - foot - bool(slice_.census and slice_.census.cut))
        self._top = max(0, min(self._top, len(keys) - room))
        self._top = min(max(self._top, self._at - room + 1), self._at)
        return leak_lines(slice_, self.order, self._at, self._top, width, height, glyphs, self.title_role)

    def sums(self) -> list[str]:
        here, slice_ = self.here, self._slice
        return explanation(here, slice_.census) if here is not None else []

    def action_move(self, by: int) -> None:
        rows = self._rows
        if rows:
            self._at = max(0, min(self._at + by, len(rows) - 1))
            self._key = rows[self._at].key
            self._redraw()

    def action_order(self, by: int) -> None:
        self._sort(ORDERS[(ORDERS.index(self.order) + by) % len(ORDERS)])

    def _sort(self, order: str) -> None:
        """In another order one looks from the top on."""
        self.order, self._key, self._at = order, None, 0
        if self._seen is not None:
            self.show(self._seen)
            self._redraw()

    def on_click(self, event: events.Click) -> None:
        at = event.get_content_offset(self)
        if at is None:
            return
        if at.y == HEADS - 1:
            order = column_at(at.x, self.size.width, self.order)
            if order is not None:
                self._sort(order)
        elif at.y >= HEADS and self._top + at.y - HEADS < len(self._rows):
            self.action_move(self._top + at.y - HEADS - self._at)

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)
