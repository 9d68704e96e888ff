"""All ranks of the job: step, peak, and difference from the other ranks."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from gpumon.tui.styles import Glyphs
from gpumon.tui.table import TablePanel, moves, next_of
from gpumon.tui.text_layout import Line
from gpumon.tui.view import View
from gpumon.tui.widgets.rank_lines import explanation, rank_lines
from gpumon.tui.widgets.rank_rows import ORDERS, PeakHistory, RankPage, rank_page


class RankTable(TablePanel):
    """Ranks; Enter opens one on the Overview."""

    NAME = "Ranks"
    TERMS = ("step", "it/s", "peak", "spread", "reserved", "cached", "buckets", "headroom", "device", "capacity",
             "finding", "fits · tight · OOM ahead")  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = [
        *moves("ranks", "rank"),
        Binding("left,h", "across(-1)", "Left", show=False, id="ranks.left", tooltip="The column of ranks to the left"),
        Binding("right,l", "across(1)", "Right", show=False, id="ranks.right",
                tooltip="The column of ranks to the right"),
        Binding("enter", "open", "Open", id="ranks.open", tooltip="Show this rank on the Overview"),
        Binding("o", "order(1)", "Order", id="ranks.order",
                tooltip="Sort by the next figure: peak, reserved, cached, headroom, step, s/step, findings, rank"),
        Binding("O", "reverse", "Reverse", show=False, id="ranks.reverse", tooltip="Reverse the order"),
    ]  # fmt: skip

    class Opened(Message):
        def __init__(self, source: str, device: int | None) -> None:
            super().__init__()
            self.source = source
            self.device = device

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._stride = 1
        self._lines_rows: tuple[int, ...] = ()
        self._order = "rank"
        self._reverse = False
        self._peaks = PeakHistory()

    def pick(self, view: View) -> RankPage:
        return rank_page(view, self._peaks, self._order, self._reverse)

    @property
    def page(self) -> RankPage:
        return self._slice or RankPage()

    def keys(self) -> list[tuple[str | None, int | None, int | None]]:
        return [(row.source, row.device, row.rank) for row in self.page.rows]

    def draw(self, slice_: RankPage, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        self.find_row()
        drawn = rank_lines(slice_, self._at, width, height, glyphs)
        self._stride, self._lines_rows, self._space = drawn.stride, drawn.rows, height // 2
        return drawn.lines

    def row_at(self, y: int) -> int | None:
        row = self._lines_rows[y] if y < len(self._lines_rows) else -1
        return row if row >= 0 else None

    def press(self) -> None:
        self.action_open()

    def action_across(self, by: int) -> None:
        if self._stride > 1:
            self.action_move(by * self._stride)

    def action_order(self, by: int) -> None:
        self.sort(next_of(ORDERS, self._order, by))

    def sort(self, order: str) -> None:
        self._order = order
        self._again()

    def jump(self, text: str) -> bool:
        """Goes to the rank with this number ("37", "rank 37"); False if there is none."""
        wanted = text.casefold().removeprefix("rank").strip()
        at = next((at for at, row in enumerate(self.page.rows) if str(row.rank) == wanted), None)
        if at is not None:
            self.go(at)
        return at is not None

    def sums(self) -> list[str]:
        rows = self.page.rows
        return explanation(rows[self._at]) if self._at < len(rows) else []

    def action_reverse(self) -> None:
        self._reverse = not self._reverse
        self._again()

    def _again(self) -> None:
        self.show(self.monitor.view)
        self._redraw()

    def action_open(self) -> None:
        rows = self.page.rows
        if rows and (row := rows[self._at]).source is not None:
            self.post_message(self.Opened(row.source, row.device))
