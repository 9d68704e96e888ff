"""The model's modules as a tree, with the memory of each."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from gpumon.tui.screens.base import RankScreen
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.filter_line import FilterLine
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.layer_table import LayerTable


class LayersScreen(RankScreen):
    AUTO_FOCUS = "#layers"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", id="layers.filter", key_display="/", priority=True,
                tooltip="Show only modules whose path or kind contains a text; esc shows all again"),
        Binding("escape", "show_all", "Show all", show=False, id="layers.show_all", key_display="esc",
                tooltip="Remove the filter"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield LayerTable(id="layers")
        yield FilterLine(id="filter")
        yield KeyLine(id="keys")

    @property
    def table(self) -> LayerTable:
        return self.query_one(LayerTable)

    def action_filter(self) -> None:
        """Focuses the line at once (priority key, no focus message), so that no key is lost."""
        line = self.query_one(FilterLine)
        line.display = True
        self.set_focus(line)

    def on_input_changed(self, message: Input.Changed) -> None:
        self.table.want(message.value)

    def on_filter_line_done(self, message: FilterLine.Done) -> None:
        """Enter keeps it, esc clears it."""
        if not message.kept:
            self.action_show_all()
        self.query_one(FilterLine).display = False
        self.set_focus(self.table)

    def action_show_all(self) -> None:
        self.query_one(FilterLine).value = ""
        self.table.want("")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "filter":
            return not isinstance(self.focused, FilterLine)
        if action == "show_all":
            return bool(self.table.choice.wanted)
        return super().check_action(action, parameters)
