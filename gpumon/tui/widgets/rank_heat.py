"""Heat strip: each rank's peak in each of the newest steps, one sign per step, so that outliers are visible.

A sign's height is the peak's place between the lowest and highest shown; its colour, how far it is above the median of
that step's ranks. If all peaks are within 1 % of each other, every sign is the lowest, so that noise is not amplified.
Cost: one pass over what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumon.analysis.robust import median
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span

LEVELS = "▁▂▃▄▅▆▇█"
PLAIN_LEVELS = "12345678"
FLAT_SHARE = 0.01
ODD_SHARE, FAR_SHARE = 0.03, 0.10  # above the median of the step's ranks

Heat = Sequence[Sequence[int | None]]


def strips(heat: Heat, count: int, glyphs: Glyphs) -> list[Line]:
    """One line per row: the last `count` steps."""
    if not heat or count <= 0:
        return [() for _ in heat]
    shown = [row[-count:] for row in heat]
    known = [value for row in shown for value in row if value is not None]
    low, high = min(known, default=0), max(known, default=0)
    flat = high - low <= FLAT_SHARE * high
    signs = LEVELS if glyphs.braille else PLAIN_LEVELS
    medians = [_median(column) for column in zip(*shown, strict=True)]
    lines: list[Line] = []
    for row in shown:
        spans: list[Span] = []
        for value, middle in zip(row, medians, strict=True):
            if value is None:
                sign, role = " ", ""
            else:
                level = 0 if flat else round((value - low) / (high - low) * (len(signs) - 1))
                sign, role = signs[level], _role(value, middle, flat)
            if spans and spans[-1][1] == role:
                spans[-1] = (spans[-1][0] + sign, role)
            else:
                spans.append((sign, role))
        lines.append(tuple(spans))
    return lines


def _median(column: Sequence[int | None]) -> float | None:
    known = [value for value in column if value is not None]
    return median(known) if known else None


def _role(value: int, middle: float | None, flat: bool) -> str:
    if flat or middle is None or value <= middle * (1 + ODD_SHARE):
        return "line:allocated"
    return "bad" if value > middle * (1 + FAR_SHARE) else "warn"
