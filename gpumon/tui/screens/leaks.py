"""What grows, its tensors, and what holds them."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType

from gpumon.tui.screens.base import RankScreen
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.checkpoint_lines import CheckpointsData
from gpumon.tui.widgets.findings_strip import LeakFindings
from gpumon.tui.widgets.growth_plot import GrowthPlot
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.leak_table import LeakTable
from gpumon_agent import wire


class LeaksScreen(RankScreen):
    AUTO_FOCUS = "#held"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "census", "Census", id="leaks.census",
                tooltip="Search now for live tensors without a known owner, and for what holds them; this may pause"
                        " the training once, for at most 100 ms"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield LeakFindings(id="leak-findings")
        yield GrowthPlot(id="growth")
        yield LeakTable(id="held")
        yield CheckpointsData(id="checkpoints")
        yield KeyLine(id="keys")

    def action_census(self) -> None:
        self.monitor.ask(wire.CENSUS)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "census":
            return self.monitor.view.cannot_ask is None
        return super().check_action(action, parameters)
