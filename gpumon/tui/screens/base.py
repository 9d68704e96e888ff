"""What all screens share: they hand a View to their panels."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from textual.screen import Screen

from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel

if TYPE_CHECKING:
    from gpumon.tui.app import MonitorApp


class MonitorScreen(Screen[None]):
    """A screen made of panels."""

    @property
    def monitor(self) -> MonitorApp:
        return cast("MonitorApp", self.app)

    def show(self, view: View, *, calm: bool) -> None:
        """Hand the view on; tables only when `calm` (at half the rate)."""
        for panel in self.query(Panel):
            if calm or not panel.CALM:
                panel.show(view)

    def on_screen_resume(self) -> None:
        self.monitor.redraw()
