"""Heat strip: each rank's peak in each of the newest steps, one sign per step, so that outliers are visible.

A sign's height is the peak as a share of the highest shown, from 0: half as much memory is half as high. Its colour is
how far the peak is above the median of that step's ranks.
Cost: one pass over what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumon.analysis.robust import median
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span

LEVELS = "▁▂▃▄▅▆▇█"
PLAIN_LEVELS = "12345678"
ODD_SHARE, FAR_SHARE = 0.03, 0.10  # above the median of the step's ranks

Heat = Sequence[Sequence[int | None]]


def strips(heat: Heat, count: int, glyphs: Glyphs) -> list[Line]:
    """One line per row: the last `count` steps."""
    if not heat or count <= 0:
        return [() for _ in heat]
    shown = [row[-count:] for row in heat]
    known = [value for row in shown for value in row if value is not None]
    high = max(known, default=0)
    signs = LEVELS if glyphs.braille else PLAIN_LEVELS
    medians = [_median(column) for column in zip(*shown, strict=True)]
    lines: list[Line] = []
    for row in shown:
        spans: list[Span] = []
        for value, middle in zip(row, medians, strict=True):
            if value is None:
                sign, role = " ", ""
            else:
                level = round(value / high * len(signs)) if high else 0
                sign, role = signs[max(0, level - 1)], _role(value, middle)
            if spans and spans[-1][1] == role:
                spans[-1] = (spans[-1][0] + sign, role)
            else:
                spans.append((sign, role))
        lines.append(tuple(spans))
    return lines


def _median(column: Sequence[int | None]) -> float | None:
    known = [value for value in column if value is not None]
    return median(known) if known else None


def _role(value: int, middle: float | None) -> str:
    if middle is None or value <= middle * (1 + ODD_SHARE):
        return "line:allocated"
    return "bad" if value > middle * (1 + FAR_SHARE) else "warn"
