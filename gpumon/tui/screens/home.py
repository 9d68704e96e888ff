"""All jobs of this machine; Enter opens one, J or Esc goes back to the one that is open."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpumon.tui.screens.base import MonitorScreen
from gpumon.tui.widgets.home_table import HomeTable
from gpumon.tui.widgets.key_line import KeyLine


class HomeScreen(MonitorScreen):
    AUTO_FOCUS = "#jobs"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,J", "back", "Back", id="home.back", key_display="esc", tooltip="Back to the job that is open")
    ]

    def compose(self) -> ComposeResult:
        yield HomeTable(id="jobs")
        yield KeyLine(id="keys")

    def on_home_table_opened(self, message: HomeTable.Opened) -> None:
        row = message.row
        self.monitor.open_job(row.job, row.source, row.device)

    def action_back(self) -> None:
        self.monitor.leave_home()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.monitor.has_job if action == "back" else True
