"""All ranks of the job beside one another: where each stands, how high it peaks, how far it is from the others."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from gpumon.tui.ink import Glyphs
from gpumon.tui.spans import Line
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel
from gpumon.tui.widgets.rank_lines import rank_lines
from gpumon.tui.widgets.rank_rows import ORDERS, Peaks, RankPage, rank_page


class RankTable(Panel):
    """Ranks; the cursor's one opens on the Overview."""

    NAME = "Ranks"
    TERMS = ("step", "it/s", "peak", "spread", "reserved", "slack", "buckets", "headroom", "device")
    CALM = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False, id="ranks.up", tooltip="The rank above"),
        Binding("down,j", "move(1)", "Down", show=False, id="ranks.down", tooltip="The rank below"),
        Binding("left,h", "across(-1)", "Left", show=False, id="ranks.left", tooltip="The column of ranks to the left"),
        Binding("right,l", "across(1)", "Right", show=False, id="ranks.right",
                tooltip="The column of ranks to the right"),
        Binding("enter", "open", "Open", id="ranks.open", tooltip="Show this rank on the Overview"),
        Binding("o", "order(1)", "Order", id="ranks.order",
                tooltip="Sort by the next figure: peak, reserved, slack, headroom, step, s/step, findings, rank"),
        Binding("O", "reverse", "Reverse", show=False, id="ranks.reverse", tooltip="Sort the other way round"),
    ]  # fmt: skip

    class Opened(Message):
        """The person wants to see this rank."""

        def __init__(self, source: str, device: int | None) -> None:
            super().__init__()
            self.source = source
            self.device = device

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._cursor = 0
        self._stride = 1
        self._order = "rank"
        self._reverse = False
        self._peaks = Peaks()

    def pick(self, view: View) -> RankPage:
        return rank_page(view, self._peaks, self._order, self._reverse)

    def draw(self, slice_: RankPage, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        self._cursor = max(0, min(self._cursor, len(slice_.rows) - 1))
        drawn = rank_lines(slice_, self._cursor, width, height, glyphs)
        self._stride = drawn.stride
        return drawn.lines

    def action_move(self, by: int) -> None:
        self._cursor += by
        self._redraw()

    def action_across(self, by: int) -> None:
        if self._stride > 1:
            self.action_move(by * self._stride)

    def action_order(self, by: int) -> None:
        names = list(ORDERS)
        self._order = names[(names.index(self._order) + by) % len(names)]
        self._again()

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._again()

    def _again(self) -> None:
        """The same rank stays under the cursor."""
        page: RankPage = self._slice or RankPage()
        here = page.rows[self._cursor] if page.rows else None
        self.show(self.monitor.view)
        fresh: RankPage = self._slice or RankPage()
        for at, row in enumerate(fresh.rows):
            if here is not None and (row.source, row.device, row.rank) == (here.source, here.device, here.rank):
                self._cursor = at
        self._redraw()

    def action_open(self) -> None:
        page: RankPage = self._slice or RankPage()
        if page.rows and (row := page.rows[self._cursor]).source is not None:
            self.post_message(self.Opened(row.source, row.device))
