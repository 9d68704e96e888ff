"""Base classes of the screens: they pass a View to their panels and explain the focused panel."""

from __future__ import annotations

from typing import ClassVar, cast

from textual.binding import Binding, BindingType
from textual.screen import Screen

from gpumon.tui.monitor import Monitor
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel
from gpumon.tui.widgets.replay_line import ReplayLine

WIDTHS = [(0, "-slim"), (46, "-column"), (76, "-narrow"), (100, "-wide")]
HEIGHTS = [(0, "-flat"), (12, "-low"), (20, "-short"), (32, "-tall")]
"""(cells, class of the screen from there on); gpumon.tcss hides what does not fit."""


class MonitorScreen(Screen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "explain", "Explain", id="screen.explain",
                tooltip="Explain the figures of the focused panel, or of its selected line: formulas, exact bytes"),
        Binding("tab", "app.focus_next", "Next panel", show=False, id="screen.next_panel",
                tooltip="Focus the next panel"),
        Binding("shift+tab", "app.focus_previous", "Previous panel", show=False, id="screen.previous_panel",
                tooltip="Focus the previous panel"),
    ]  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        for cells, breakpoints in ((self.app.size.width, WIDTHS), (self.app.size.height, HEIGHTS)):
            # Textual sets them later, and then has the styles of every widget computed twice
            self.add_class(max((least, name) for least, name in breakpoints if least <= cells)[1])

    @property
    def monitor(self) -> Monitor:
        return cast("Monitor", self.app)

    def on_mount(self) -> None:
        view = self.monitor.view
        if view.position is not None and view.now is None and self.query("#keys"):  # a replay's
            self.mount(ReplayLine(id="replay"), before="#keys")

    def show(self, view: View) -> None:
        for panel in self.query(Panel):
            panel.show(view)

    def on_screen_resume(self) -> None:
        self.monitor.redraw()

    def explained(self) -> Panel | None:
        """The panel that `e` explains: the focused one, else the first with a name."""
        if isinstance(self.focused, Panel):
            return self.focused
        return next((panel for panel in self.query(Panel) if panel.NAME), None)

    def action_explain(self) -> None:
        from gpumon.tui.screens.help import ExplainScreen

        panel = self.explained()
        if panel is not None:
            self.app.push_screen(ExplainScreen(panel))


class RankScreen(MonitorScreen):
    """A screen about one rank and one of its devices."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "rank(-1)", "Previous rank", show=False, id="screen.previous_rank",
                tooltip="Show the previous rank"),
        Binding("right", "rank(1)", "Rank", id="screen.next_rank", key_display="←/→", tooltip="Show the next rank"),
        Binding("d", "device", "Device", id="screen.device", tooltip="Show the process's next device"),
    ]  # fmt: skip

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
