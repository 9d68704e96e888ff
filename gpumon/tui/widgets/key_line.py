"""The last line: the keys that work now, from the bindings."""

from __future__ import annotations

from collections.abc import Callable

from textual.binding import ActiveBinding, Binding

from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, flow
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel

FIRST = ("app.quit", "page.close", "app.help", "app.pause")
"""These come first, at the same place on every screen."""


class KeyLine(Panel):
    """Keys of the screen and the app that are enabled now."""

    can_focus = False
    CALM = True

    def pick(self, view: View) -> tuple[tuple[str, str], ...]:
        return keys(self.screen.active_bindings, self.monitor.get_key_display)

    def draw(self, slice_: tuple[tuple[str, str], ...], width: int, height: int, glyphs: Glyphs) -> list[Line]:
        items: list[Line] = [((f" {key} ", "key"), (what, "dim")) for key, what in slice_]
        return flow(items, width, gap=1)[:1]


def keys(active: dict[str, ActiveBinding], display: Callable[[Binding], str]) -> tuple[tuple[str, str], ...]:
    """(key, what) of every shown and enabled binding, each action once."""
    seen: dict[str, tuple[str, str]] = {}
    ordered = sorted(
        active.values(), key=lambda found: FIRST.index(found.binding.id) if found.binding.id in FIRST else 99
    )
    for found in ordered:
        binding = found.binding
        if binding.show and found.enabled and binding.action not in seen:
            seen[binding.action] = (display(binding), binding.description)
    return tuple(seen.values())
