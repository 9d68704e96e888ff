"""What gpumon's apps have in common: themes, colours, the style sheet, messages."""

from __future__ import annotations

import os

import msgspec
from textual.app import App

from gpumon.tui.screens.base import HEIGHTS, WIDTHS
from gpumon.tui.styles import ASCII, NONE, UNICODE, Glyphs, Palette
from gpumon.tui.stylesheet import StylesheetParsedOnce
from gpumon.tui.text_layout import in_ascii
from gpumon.tui.themes import NAMES, PALETTES, THEMES

TOLD_S = 8.0
"""How long a message is shown."""


class Options(msgspec.Struct, frozen=True):
    theme: str = NAMES[0]
    ascii: bool = False
    rank: int | None = None


class ThemedApp(App[int]):
    CSS_PATH = "gpumon.tcss"
    TITLE = "gpumon"
    AUTO_FOCUS = ""
    HORIZONTAL_BREAKPOINTS = WIDTHS
    VERTICAL_BREAKPOINTS = HEIGHTS

    def __init__(self, options: Options) -> None:
        self.palette: Palette = PALETTES[NAMES[0]]
        self.glyphs: Glyphs = ASCII if options.ascii else UNICODE
        self.colourless = False
        super().__init__(ansi_color=True if _no_colour() else None)
        for theme in THEMES:
            self.register_theme(theme)
        self.colourless = self.no_color
        self.theme = NAMES[2] if self.colourless else options.theme
        self.stylesheet = StylesheetParsedOnce(self.get_css_variables())
        self.set_class(options.ascii, "-ascii")
        self.palette = NONE if self.colourless else PALETTES[options.theme]

    def action_theme(self) -> None:
        at = NAMES.index(self.theme) if self.theme in NAMES else 0
        self.look(NAMES[(at + 1) % len(NAMES)])

    def look(self, theme: str) -> None:
        if not self.colourless:
            self.palette = PALETTES[theme]
            self.theme = theme

    def action_help(self) -> None:
        from gpumon.tui.screens.help import HelpScreen, keys_of

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(keys_of(self)))

    def toast(self, text: str) -> None:
        """Shows a message over the screen, instead of the one before."""
        self.clear_notifications()
        if not self.glyphs.braille:
            text = in_ascii(text)
        self.notify(text, timeout=TOLD_S, markup=False)


def _no_colour() -> bool:
    return bool(os.environ.get("NO_COLOR"))
