"""All ranks of the job; Enter opens one in the Overview."""

from __future__ import annotations

from textual.app import ComposeResult

from gpumon.tui.screens.base import MonitorScreen
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.host_line import HostLine
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.rank_table import RankTable


class RanksScreen(MonitorScreen):
    AUTO_FOCUS = "#ranks"

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield RankTable(id="ranks")
        yield HostLine(id="host")
        yield KeyLine(id="keys")

    def on_rank_table_opened(self, message: RankTable.Opened) -> None:
        self.monitor.open_rank(message.source, message.device)
