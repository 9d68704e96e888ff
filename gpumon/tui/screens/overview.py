"""The first screen: one rank's memory by phase, the estimate and the forecast."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from gpumon.tui.screens.base import RankScreen
from gpumon.tui.view import View
from gpumon.tui.widgets.answer_line import AnswerLine
from gpumon.tui.widgets.device_bar import DeviceBar
from gpumon.tui.widgets.estimate_table import EstimateTable
from gpumon.tui.widgets.findings_strip import FindingsStrip
from gpumon.tui.widgets.forecast_panel import ForecastPanel
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.host_line import HostLine
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.oom_panel import OomPanel
from gpumon.tui.widgets.phase_table import PhaseTable
from gpumon.tui.widgets.timeline import Timeline


class OverviewScreen(RankScreen):
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "explain", "Explain", show=False, id="overview.explain", tooltip="Like e"),
        Binding("o", "oom", "Out of memory", id="overview.oom",
                tooltip="Show the whole explanation of the failed allocation"),
        Binding("plus,equals_sign", "zoom(-1)", "Zoom", id="overview.closer", key_display="+/-",
                tooltip="Fewer steps in the timeline"),
        Binding("minus", "zoom(1)", "Wider", show=False, id="overview.wider",
                tooltip="More steps in the timeline; each column then shows its highest step"),
        Binding("down", "app.focus_next", "Next panel", show=False, id="overview.next_panel",
                tooltip="Focus the next panel"),
        Binding("up", "app.focus_previous", "Previous panel", show=False, id="overview.previous_panel",
                tooltip="Focus the previous panel"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield AnswerLine(id="answer")
        yield DeviceBar(id="device")
        with Horizontal(id="middle"):
            yield PhaseTable(id="phases")
            yield Timeline(id="timeline")
        yield OomPanel(id="oom")
        with Horizontal(id="lower"):
            yield EstimateTable(id="estimate")
            yield ForecastPanel(id="forecast")
        yield FindingsStrip(id="findings")
        yield HostLine(id="host")
        yield KeyLine(id="keys")

    def show(self, view: View) -> None:
        self.set_class(view.report is not None and view.report.oom is not None, "-oom")
        super().show(view)

    def action_oom(self) -> None:
        from gpumon.tui.screens.help import OomScreen

        report = self.monitor.view.report
        if report is not None and report.oom is not None:
            self.app.push_screen(OomScreen(report.oom))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "oom":
            report = self.monitor.view.report
            return report is not None and report.oom is not None
        return super().check_action(action, parameters)

    def action_zoom(self, by: int) -> None:
        self.monitor.zoom(by)
