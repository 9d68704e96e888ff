"""All ranks of the job; Enter opens one in the Overview."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from gpumon.tui.screens.base import MonitorScreen
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.filter_line import FilterLine
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.host_line import HostLine
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.rank_table import RankTable


class RanksScreen(MonitorScreen):
    AUTO_FOCUS = "#ranks"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "jump", "Go to", id="ranks.jump", key_display="/", priority=True,
                tooltip="Go to the rank with a number: /37"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield RankTable(id="ranks")
        line = FilterLine(id="filter")
        line.placeholder = "number of a rank"
        yield line
        yield HostLine(id="host")
        yield KeyLine(id="keys")

    def on_rank_table_opened(self, message: RankTable.Opened) -> None:
        self.monitor.open_rank(message.source, message.device)

    def action_jump(self) -> None:
        line = self.query_one(FilterLine)
        line.value = ""
        line.display = True
        self.set_focus(line)

    def on_input_changed(self, message: Input.Changed) -> None:
        self.query_one(RankTable).jump(message.value)

    def on_filter_line_done(self, message: FilterLine.Done) -> None:
        line, table = self.query_one(FilterLine), self.query_one(RankTable)
        if message.kept and line.value.strip() and not table.jump(line.value):
            self.notify(f"There is no rank {line.value.strip()}.", markup=False)
        line.display = False
        self.set_focus(table)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "jump":
            return not isinstance(self.focused, FilterLine)
        return super().check_action(action, parameters)
