"""The model's modules as a tree, with what each of them keeps on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpumon.tui.screens.base import RankScreen
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.layer_table import LayerTable

if TYPE_CHECKING:
    from textual.widgets import Input

    from gpumon.tui.widgets.filter_line import FilterLine


class LayersScreen(RankScreen):
    """Layers."""

    AUTO_FOCUS = "#layers"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "Filter", id="layers.filter", key_display="/",
                tooltip="Only modules whose path or kind has a text in it; esc shows all again"),
        Binding("escape", "show_all", "Show all", show=False, id="layers.show_all", key_display="esc",
                tooltip="Drop the filter"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield LayerTable(id="layers")
        yield KeyLine(id="keys")

    @property
    def table(self) -> LayerTable:
        return self.query_one(LayerTable)

    def action_filter(self) -> None:
        from gpumon.tui.widgets.filter_line import FilterLine

        found = self.query(FilterLine)
        if not found:
            self.mount(FilterLine(self.table.choice.wanted, id="filter"), after=self.table)
        else:
            found.first().focus()

    def on_input_changed(self, message: Input.Changed) -> None:
        self.table.want(message.value)

    async def on_filter_line_done(self, message: FilterLine.Done) -> None:
        """Enter keeps the filter, esc drops it."""
        message.stop()
        if not message.kept:
            self.table.want("")
        await self._close()

    async def _close(self) -> None:
        from gpumon.tui.widgets.filter_line import FilterLine

        await self.query(FilterLine).remove()
        self.table.focus()

    def action_show_all(self) -> None:
        self.table.want("")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "show_all":
            return bool(self.table.choice.wanted)
        return super().check_action(action, parameters)
