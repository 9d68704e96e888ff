"""The last line: the screens, the shown one marked, and the keys that work now, from the bindings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from textual.app import App
from textual.binding import ActiveBinding, Binding
from textual.events import Click

from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, flow, width
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel

FIRST = ("app.quit", "page.close", "app.help", "home.open", "home.back", "app.finding")
"""These come first, at the same place on every screen; then the screens, all jobs, the screen's own keys, a replay's,
and those that every screen has."""


class Key(NamedTuple):
    written: str
    what: str
    key: str
    shown: bool = False  # the screen that is shown


class KeyLine(Panel):
    """Screens and keys; a click is as good as the key."""

    can_focus = False

    def pick(self, view: View) -> tuple[Key, ...]:
        mode = self.app.current_mode
        return keys(self.screen.active_bindings, self.monitor.get_key_display, mode)

    def draw(self, slice_: tuple[Key, ...], width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return flow([key_item(each) for each in slice_], width, gap=0)[:1]

    async def on_click(self, event: Click) -> None:
        at = 0
        for each in self._slice or ():
            size = width(key_item(each))
            if at <= event.x < at + size:
                self.app.simulate_key(each.key)
                return
            at += size


def key_item(each: Key) -> Line:
    if each.shown:
        return ((f" [{each.written} {each.what}]", "title"),)
    return ((f" {each.written} ", "key"), (each.what, "dim"))


def keys(active: Mapping[str, ActiveBinding], display: Callable[[Binding], str], mode: str = "") -> tuple[Key, ...]:
    """Every shown and enabled binding, each action once, and that of the shown screen."""
    found: dict[str, Key] = {}

    def order(each: ActiveBinding) -> tuple[int, str]:
        binding = each.binding
        if binding.id in FIRST:
            return FIRST.index(binding.id), ""
        if "mode(" in binding.action:
            return 50, binding.key
        if binding.id == "app.home":
            return 60, ""
        if (binding.id or "").startswith("replay."):
            return 80, ""
        return (99 if isinstance(each.node, App) else 70), ""

    for each in sorted(active.values(), key=order):
        binding = each.binding
        here = binding.action.endswith(f"mode('{mode}')")
        if binding.show and (each.enabled or here) and binding.action not in found:
            found[binding.action] = Key(display(binding), binding.description, binding.key, here)
    return tuple(found.values())
