"""Roles to colours and glyphs: the colour-blind-safe Okabe–Ito hues, each with its own glyph.

Colour is never the only cue: every category has a glyph, every state a word. Without colour (NO_COLOR) only bold, dim
and reverse are used; with `--ascii` every category is an ASCII character.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from rich.style import Style

ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILLION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"


class Palette(msgspec.Struct, frozen=True):
    """A theme's colours; None keeps the terminal's own."""

    text: str | None
    dim: str | None
    rule: str | None
    accent: str | None
    good: str | None
    warn: str | None
    bad: str | None
    lines: Mapping[str, str | None]  # by ledger line


_HUES: Final = {
    "weights": BLUE, "buffers": BLUE, "gradients": VERMILLION, "optimizer": GREEN, "buckets": ORANGE, "inputs": YELLOW,
    "activations": SKY, "temporaries": PURPLE, "workspaces": YELLOW, "checkpoints": ORANGE, "unexplained": VERMILLION,
    "unattributed": SKY, "context": PURPLE, "other_processes": YELLOW, "allocated": SKY, "reserved": ORANGE,
    "device": PURPLE, "capacity": VERMILLION, "other_models": GREEN, "variables": PURPLE, "held": SKY,
    "leak": VERMILLION,
}  # fmt: skip

_GREYS_DARK: Final = {"rounding": "#8b949e", "slack": "#6e7681", "free": "#3d444d"}
_GREYS_LIGHT: Final = {"rounding": "#6e7781", "slack": "#8c959f", "free": "#c4cad1"}
_ON_LIGHT: Final = {YELLOW: "#a89a00", SKY: "#2b8cc4", ORANGE: "#c27f00", PURPLE: "#b0568a"}
_ANSI: Final = {
    BLUE: "blue", VERMILLION: "red", GREEN: "green", ORANGE: "yellow", YELLOW: "bright_yellow", SKY: "cyan",
    PURPLE: "magenta",
}  # fmt: skip

DARK: Final = Palette(
    "#d7dde4", "#7f8b97", "#2b333c", SKY, "#2fbf93", ORANGE, "#ff7b3d", {**_HUES, **_GREYS_DARK, "weights": "#2f8fd0"}
)
LIGHT: Final = Palette(
    "#1f2328", "#68727d", "#d5dae0", "#0a69a8", "#007a59", "#9a6a00", "#b34700",
    {**{k: _ON_LIGHT.get(v, v) for k, v in _HUES.items()}, **_GREYS_LIGHT},
)  # fmt: skip
ANSI: Final = Palette(
    None, "bright_black", "bright_black", "cyan", "green", "yellow", "red",
    {**{k: _ANSI[v] for k, v in _HUES.items()}, **dict.fromkeys(_GREYS_DARK, "bright_black")},
)  # fmt: skip
NONE: Final = Palette(None, None, None, None, None, None, None, {})


class Glyphs(msgspec.Struct, frozen=True):
    lines: Mapping[str, str]
    live: str
    silent: str
    ended: str
    paused: str
    now: str
    warning: str
    info: str
    gone: str
    fits: str
    rule: str
    highest: str
    coming: str
    braille: bool


UNICODE: Final = Glyphs(
    lines={
        "weights": "█", "buffers": "▉", "gradients": "▓", "optimizer": "▒", "buckets": "▥", "inputs": "▪",
        "activations": "▚", "temporaries": "▞", "workspaces": "╳", "checkpoints": "▤", "unexplained": "?",
        "unattributed": "╱", "rounding": "∷", "slack": "┄", "context": "◆", "other_processes": "◇", "free": "·",
        "allocated": "⣿", "reserved": "⠤", "device": "⠄", "capacity": "╌", "other_models": "▦",
        "variables": "◫", "held": "▨", "leak": "L",
    },
    live="●", silent="◌", ended="■", paused="‖", now="▸", warning="▲", info="•", gone="✓", fits="✓",
    rule="─", highest="┊", coming="┆", braille=True,
)  # fmt: skip
ASCII: Final = Glyphs(
    lines={
        "weights": "W", "buffers": "B", "gradients": "G", "optimizer": "O", "buckets": "D", "inputs": "I",
        "activations": "A", "temporaries": "T", "workspaces": "K", "checkpoints": "C", "unexplained": "?",
        "unattributed": "U", "rounding": "r", "slack": "s", "context": "x", "other_processes": "o", "free": ".",
        "allocated": "#", "reserved": "-", "device": "=", "capacity": "~", "other_models": "M",
        "variables": "V", "held": "H", "leak": "L",
    },
    live="*", silent="?", ended="#", paused="=", now=">", warning="!", info="-", gone="+", fits="+",
    rule="-", highest=":", coming="|", braille=False,
)  # fmt: skip


class Ink(msgspec.Struct, frozen=True):
    """Role → style, on one background."""

    styles: Mapping[str, Style]
    base: Style

    def style(self, role: str) -> Style:
        return self.styles.get(role, self.base)


def ink(palette: Palette, base: Style, seen: Callable[[Style], Style] = lambda style: style) -> Ink:
    """Every role's style over `base` (the background); `seen` maps to what the terminal shows."""

    def over(color: str | None, *, bold: bool = False, dim: bool = False, reverse: bool = False) -> Style:
        return base + Style(color=color, bold=bold or None, dim=dim or None, reverse=reverse or None)

    colourless = palette.dim is None
    styles = {
        "text": over(palette.text),
        "strong": over(palette.text, bold=True),
        "title": over(palette.accent, bold=True),
        "dim": over(palette.dim, dim=colourless),
        "rule": over(palette.rule, dim=colourless),
        "good": over(palette.good),
        "warn": over(palette.warn, bold=True),
        "bad": over(palette.bad, bold=True),
        "key": over(palette.accent, bold=True),
        "cursor": over(palette.text, reverse=True),
    }
    styles.update({f"line:{line}": over(color) for line, color in palette.lines.items()})
    return Ink({role: seen(style) for role, style in styles.items()}, seen(base + Style(color=palette.text)))


def line_role(line: str) -> str:
    return f"line:{line}"
