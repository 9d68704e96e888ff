"""The first screen: one rank's memory, phase by phase, beside what it should be and what comes next."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal

from gpumon.tui.screens.base import MonitorScreen
from gpumon.tui.widgets.device_bar import DeviceBar
from gpumon.tui.widgets.estimate_table import EstimateTable
from gpumon.tui.widgets.findings_strip import FindingsStrip
from gpumon.tui.widgets.forecast_panel import ForecastPanel
from gpumon.tui.widgets.header import Header
from gpumon.tui.widgets.host_line import HostLine
from gpumon.tui.widgets.key_line import KeyLine
from gpumon.tui.widgets.panel import Panel
from gpumon.tui.widgets.phase_table import PhaseTable
from gpumon.tui.widgets.timeline import Timeline


class OverviewScreen(MonitorScreen):
    """Overview."""

    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e,enter", "explain", "Explain", id="overview.explain", key_display="e",
                tooltip="What the focused panel's numbers mean, and their formulas"),
        Binding("plus,equals_sign", "zoom(-1)", "Zoom", id="overview.closer", key_display="+/-",
                tooltip="Fewer steps in the timeline"),
        Binding("minus", "zoom(1)", "Wider", show=False, id="overview.wider",
                tooltip="More steps in the timeline; each column then shows its highest step"),
        Binding("left", "rank(-1)", "Previous rank", show=False, id="overview.previous_rank",
                tooltip="Show the rank before this one"),
        Binding("right", "rank(1)", "Rank", id="overview.next_rank", key_display="←/→",
                tooltip="Show the next rank"),
        Binding("d", "device", "Device", id="overview.device", tooltip="Show the process's next device"),
        Binding("down,tab", "app.focus_next", "Next panel", show=False, id="overview.next_panel",
                tooltip="Focus the next panel"),
        Binding("up,shift+tab", "app.focus_previous", "Previous panel", show=False, id="overview.previous_panel",
                tooltip="Focus the panel before"),
    ]  # fmt: skip

    def compose(self) -> ComposeResult:
        yield Header(id="header")
        yield DeviceBar(id="device")
        with Horizontal(id="middle"):
            yield PhaseTable(id="phases")
            yield Timeline(id="timeline")
        with Horizontal(id="lower"):
            yield EstimateTable(id="estimate")
            yield ForecastPanel(id="forecast")
        yield FindingsStrip(id="findings")
        yield HostLine(id="host")
        yield KeyLine(id="keys")

    def action_explain(self) -> None:
        from gpumon.tui.screens.help import ExplainScreen

        panel = self.focused if isinstance(self.focused, Panel) else self.query_one(DeviceBar)
        self.app.push_screen(ExplainScreen(panel))

    def action_zoom(self, by: int) -> None:
        self.monitor.zoom(by)

    def action_rank(self, by: int) -> None:
        self.monitor.next_rank(by)

    def action_device(self) -> None:
        self.monitor.next_device()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "rank":
            return len(self.monitor.view.frame.ranks) > 1
        if action == "device":
            report = self.monitor.view.report
            return report is not None and len(report.devices) > 1
        return True
