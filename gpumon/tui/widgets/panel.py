"""Base class of the widgets: takes its slice of the View, draws lines, repaints only changed lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from gpumon.tui.monitor import Monitor
from gpumon.tui.styles import Glyphs, Ink, ink
from gpumon.tui.text_layout import EMPTY, Line, fit, in_ascii, width
from gpumon.tui.view import View


def joined(parts: Iterable[tuple[str, Style]]) -> list[Segment]:
    """One segment for neighbours that look the same: each costs the terminal some 40 bytes of colours."""
    made: list[tuple[str, Style]] = []
    for text, style in parts:
        if not text:
            continue
        if made:
            before, its = made[-1]
            if style == its or (text.isspace() and _only_background(style, its)):
                made[-1] = before + text, its
                continue
            if before.isspace() and _only_background(its, style):
                made[-1] = before + text, style
                continue
        made.append((text, style))
    return [Segment(text, style) for text, style in made]


def _only_background(blank: Style, other: Style) -> bool:
    """Whether a space looks the same in both."""
    drawn = (blank.underline, blank.reverse, blank.strike, other.underline, other.reverse, other.strike)
    return blank.bgcolor == other.bgcolor and not any(drawn)


class Panel(Widget, can_focus=True):
    """A part of the screen. Subclasses select data (`pick`) and write it as lines (`draw`).

    `pick` returns something that compares by value: an equal slice is not redrawn. `draw` is pure.
    """

    DEFAULT_CSS = "Panel { height: 1fr; width: 1fr; }"  # a Line-API widget has no size of its own

    NAME: ClassVar[str] = ""
    """Title of its explain page."""

    TERMS: ClassVar[tuple[str, ...]] = ()
    """Glossary terms on its explain page."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._slice: Any = None
        self._fresh = False
        self._lines: list[Line] = []
        self._strips: dict[int, Strip] = {}
        self._ink: Ink | None = None

    def pick(self, view: View) -> Any:
        raise NotImplementedError

    def draw(self, slice_: Any, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        raise NotImplementedError

    def terms(self) -> tuple[str, ...]:
        """Glossary terms for what is shown now."""
        return self.TERMS

    def sums(self) -> list[str]:
        """The panel's formulas with numbers, for its explain page."""
        return []

    @property
    def monitor(self) -> Monitor:
        return cast("Monitor", self.app)

    @property
    def title_role(self) -> str:
        return "title" if self.has_focus else "strong"

    def show(self, view: View) -> None:
        """Takes the new view; repaints lines that differ."""
        picked = self.pick(view)
        if self._fresh and picked == self._slice:
            return
        self._slice, self._fresh = picked, True
        self._redraw()

    def _redraw(self) -> None:
        room, height = self.size
        if not self._fresh or room <= 0 or height <= 0:
            return
        old, self._lines = self._lines, self.draw(self._slice, room, height, self.monitor.glyphs)[:height]
        rows = max(len(old), len(self._lines))
        changed = [
            y
            for y in range(rows)
            if y >= len(old) or y >= len(self._lines) or old[y] != self._lines[y]
        ]  # fmt: skip
        for y in changed:
            self._strips.pop(y, None)
        if changed:
            self.refresh(*(Region(0, y, room, 1) for y in changed))

    def render_lines(self, crop: Region) -> list[Strip]:
        """The strips without Textual's borders, padding and opacity, which a panel does not use. Those cost four strips
        per line, which cache each other and stay until they are collected.
        """
        strips = [self.render_line(y) for y in crop.line_range]
        if crop.column_span == (0, self.size.width):
            return strips
        return [strip.crop(*crop.column_span) for strip in strips]

    def render_line(self, y: int) -> Strip:
        strip = self._strips.get(y)
        if strip is None:
            strip = self._strips[y] = self._strip(y)
        return strip

    def _strip(self, y: int) -> Strip:
        if self._ink is None:
            self._ink = ink(self.monitor.palette, self.rich_style, self._filter())
        room = self.size.width
        styles, base = self._ink.styles.get, self._ink.base
        line = fit(self._lines[y], room) if y < len(self._lines) else EMPTY
        if not self.monitor.glyphs.braille:
            line = tuple([(in_ascii(text), role) for text, role in line])
        segments = [(text, styles(role, base)) for text, role in line]
        segments.append((" " * (room - width(line)), base))
        return Strip(joined(segments), self.size.width)

    def _filter(self) -> Callable[[Style], Style]:
        """What Textual's line filters (NO_COLOR is one) make of a style."""
        filters, background = self.get_line_filters(), self.background_colors[1]

        def filtered(style: Style) -> Style:
            segments = [Segment(" ", style)]
            for each in filters:
                segments = each.apply(segments, background)
            return segments[0].style or style

        return filtered

    def notify_style_update(self) -> None:
        """A theme or class changed: drop all colours."""
        super().notify_style_update()
        self._ink = None
        self._strips.clear()

    def on_resize(self) -> None:
        self._strips.clear()
        self._redraw()
        self.refresh()

    def on_focus(self) -> None:
        self._redraw()

    def on_blur(self) -> None:
        self._redraw()
