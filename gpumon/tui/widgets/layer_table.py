"""The model as a module tree: weights, gradients, optimizer state and activations of each."""

from __future__ import annotations

from typing import ClassVar

from msgspec.structs import replace
from textual.binding import Binding, BindingType

from gpumon.analysis.layer_repeats import sentence
from gpumon.analysis.layers import Tree
from gpumon.analysis.layers import trees as trees_of
from gpumon.session.frame import LayersRecord, ModelRecord
from gpumon.tui.styles import UNICODE, Glyphs
from gpumon.tui.table import TablePanel, moves, next_of
from gpumon.tui.text_layout import Line
from gpumon.tui.view import View, uncounted
from gpumon.tui.widgets.layer_lines import (
    FOOT,
    LayersData,
    explanation,
    layer_lines,
    lines_above,
    order_at,
)  # fmt: skip
from gpumon.tui.widgets.layer_rows import ORDERS, Key, LayerRow, LayerView, Rows, all_keys, opened_at_first, rows_of


class LayerTable(TablePanel):
    NAME = "Layers"
    TERMS = ("module", "parameters", "weights", "buffers", "gradients", "optimizer", "activations", "total", "share",
             "tied", "sampled")  # fmt: skip
    BINDINGS: ClassVar[list[BindingType]] = [
        *moves("layers", "module"),
        Binding("enter", "turn_over", "Open", id="layers.toggle",
                tooltip="Open or close the module; of equal modules in one row (0–15 × 16), show or hide each"),
        Binding("right,l", "open", "Open", show=False, id="layers.open", tooltip="Open the module"),
        Binding("left,h", "close", "Close", show=False, id="layers.close",
                tooltip="Close the module; if closed, go to its parent"),
        Binding("asterisk", "open_all", "Open all", show=False, id="layers.open_all", key_display="*",
                tooltip="Open or close all modules"),
        Binding("o", "order(1)", "Sort", id="layers.order", tooltip="Sort by the next column, the largest first"),
        Binding("O", "order(-1)", "Sort back", show=False, id="layers.order_back", tooltip="Sort by the column before"),
        Binding("i", "turn", "Turn", show=False, id="layers.turn", tooltip="Reverse the order: the smallest first"),
        Binding("f", "flat", "Flat", id="layers.flat",
                tooltip="One list of all modules, each with its own bytes; or the tree again"),
    ]  # fmt: skip

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._models: tuple[ModelRecord, ...] | None = None
        self._records: tuple[LayersRecord, ...] | None = None
        self._trees: tuple[Tree, ...] = ()
        self._most = ""
        self._device: int | None = None
        self._choice: LayerView | None = None
        self._rows: Rows | None = None
        self._made_of: tuple[object, object] | None = None

    # ----------------------------------------------------------------------------------------------------- what it is

    def pick(self, view: View) -> LayersData:
        rank = view.rank
        if rank is None:
            return LayersData((), None)
        if rank.models is not self._models or rank.layers is not self._records or view.index != self._device:
            self._models, self._records, self._device = rank.models, rank.layers, view.index
            self._trees = tuple(tree for tree in trees_of(rank) if tree.device == view.index)
            self._most = sentence(self._trees)
        read = view.device.peak if view.device is not None else None
        step = rank.steps[-1].step if rank.steps else None
        peak = read.allocated if read is not None else None
        return LayersData(self._trees, view.index, step, peak, uncounted(view), self._most)

    @property
    def rows(self) -> Rows:
        """Recomputed only when the trees or the user's choice change."""
        slice_: LayersData = self._slice or LayersData((), None)
        if self._choice is None and any(tree.root.children for tree in slice_.trees):
            room, height = self.size
            above = lines_above(slice_, rows_of(slice_.trees, LayerView()), LayerView(), room, height, UNICODE)
            below = max(6, height - len(above) - 1 - FOOT)
            self._choice = LayerView(opened=opened_at_first(slice_.trees, below))
        choice = self._choice or LayerView()
        if self._rows is None or self._made_of != (slice_.trees, choice):
            self._rows, self._made_of = rows_of(slice_.trees, choice), (slice_.trees, choice)
        return self._rows

    @property
    def choice(self) -> LayerView:
        return self._choice or LayerView()

    def choose(self, choice: LayerView) -> None:
        """Applies a choice. A new order or filter starts at the top."""
        if replace(choice, opened=self.choice.opened) != self.choice:
            self.from_top()
        self._choice = choice
        self._redraw()

    def want(self, text: str) -> None:
        """Only modules with this in their path or kind."""
        self.choose(replace(self.choice, wanted=text.strip()))

    @property
    def here(self) -> LayerRow | None:
        rows = self.rows.rows
        return rows[self._at] if self._at < len(rows) else None

    def sums(self) -> list[str]:
        here = self.here
        return explanation(here, self._trees[here.key[0]]) if here is not None else []

    # ----------------------------------------------------------------------------------------------- how it looks

    def keys(self) -> list[Key]:
        return [row.key for row in self.rows.rows]

    def draw(self, slice_: LayersData, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        above = 1 + len(lines_above(slice_, self.rows, self.choice, width, height, glyphs))
        self.scroll(height - above - (FOOT if height >= 12 else 0), above)
        return layer_lines(slice_, self.rows, self.choice, self._at, self._top, width, height, glyphs)

    def heading_at(self, x: int) -> str | None:
        return order_at(x, self.size.width, self.choice.order)

    def sort(self, order: str) -> None:
        """Sorts by this column; again: reverses it."""
        again = self.choice.order == order
        self.choose(replace(self.choice, order=order, upwards=again and not self.choice.upwards))

    # ------------------------------------------------------------------------------------------------------------ keys

    def press(self) -> None:
        self.action_turn_over()

    def action_turn_over(self) -> None:
        here = self.here
        if here is not None and not here.leaf:
            self.choose(replace(self.choice, opened=self.choice.opened ^ {here.key}))

    def action_open(self) -> None:
        here = self.here
        if here is not None and not here.leaf:
            if here.open:
                self.action_move(1)
            else:
                self.choose(replace(self.choice, opened=self.choice.opened | {here.key}))

    def action_close(self) -> None:
        here, rows = self.here, self.rows.rows
        if here is None:
            return
        if here.open and not self.choice.wanted:
            self.choose(replace(self.choice, opened=self.choice.opened - {here.key}))
            return
        self.go(next((at for at in range(self._at - 1, -1, -1) if rows[at].depth < here.depth), self._at))

    def action_open_all(self) -> None:
        every = all_keys(self._trees)
        roots = frozenset((at, "") for at in range(len(self._trees)))
        self.choose(replace(self.choice, opened=roots if self.choice.opened >= every else every))

    def action_order(self, by: int) -> None:
        self.choose(replace(self.choice, order=next_of(ORDERS, self.choice.order, by), upwards=False))

    def action_turn(self) -> None:
        self.choose(replace(self.choice, upwards=not self.choice.upwards))

    def action_flat(self) -> None:
        self.choose(replace(self.choice, flat=not self.choice.flat))
