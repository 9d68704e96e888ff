"""Three themes: dark, light, and the terminal's own sixteen colours."""

from __future__ import annotations

from typing import Final

from textual.theme import BUILTIN_THEMES, Theme

from gpumon.tui.styles import ANSI, DARK, LIGHT, Palette

NAMES: Final = ("gpumon-dark", "gpumon-light", "gpumon-ansi")

THEMES: Final = (
    Theme(
        name="gpumon-dark", dark=True, primary="#56b4e9", secondary="#cc79a7", accent="#56b4e9", warning="#e69f00",
        error="#ff7b3d", success="#2fbf93", foreground="#d7dde4", background="#0f1419", surface="#151b22",
        panel="#1c242d",
    ),
    Theme(
        name="gpumon-light", dark=False, primary="#0a69a8", secondary="#b0568a", accent="#0a69a8", warning="#9a6a00",
        error="#b34700", success="#007a59", foreground="#1f2328", background="#fcfcfa", surface="#f3f4f1",
        panel="#e8eae6",
    ),
    Theme(
        name="gpumon-ansi", dark=True, ansi=True, primary="ansi_cyan", secondary="ansi_magenta", accent="ansi_cyan",
        warning="ansi_yellow", error="ansi_red", success="ansi_green", foreground="ansi_default",
        background="ansi_default", surface="ansi_default", panel="ansi_default", boost="ansi_default",
        variables=BUILTIN_THEMES["ansi-dark"].variables,
    ),
)  # fmt: skip

PALETTES: Final[dict[str, Palette]] = {"gpumon-dark": DARK, "gpumon-light": LIGHT, "gpumon-ansi": ANSI}
