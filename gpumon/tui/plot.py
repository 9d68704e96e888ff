"""A small braille plot, two by four dots per cell: an area, lines, a ceiling, vertical marks.

Cost: one pass over the cells (about 1 ms for 60 × 14). Columns hold whole numbers of steps, aligned to step numbers, so
the plot scrolls by whole columns and does not flicker.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

import msgspec

from gpumon.analysis.units import UNITS, B
from gpumon.tui.text_layout import Line, Span

_FILL = ((0x00, 0x40, 0x44, 0x46, 0x47), (0x00, 0x80, 0xA0, 0xB0, 0xB8))  # bits of 0–4 dots, left and right
_DOT = ((0x40, 0x04, 0x02, 0x01), (0x80, 0x20, 0x10, 0x08))  # one dot, counted from below
UPRIGHT = ("┊", ":")  # with braille, and without
CURSOR = ("┃", "!")

SHORTEST = 10
"""Fewer values than this are not stretched over the full width."""

ROUND = (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10)
"""Ends of an axis, times a power of ten: their halves are round, too."""

STEADY = 0.9
"""This share of the values, or more, reaches this share of the highest."""


class Curve(msgspec.Struct, frozen=True):
    """One value per step; None if unknown."""

    role: str
    values: tuple[int | None, ...]
    area: bool = False
    dotted: bool = False  # every second dot, to distinguish it from a line without colour
    sign: str = "#"  # used without braille


class Scale(msgspec.Struct, frozen=True):
    """Which dot column shows which steps: at most `count` columns of equally many steps.

    Columns begin at multiples of their length, so that the plot moves by whole columns. Few steps are several wide.
    """

    first: int
    last: int
    count: int

    @property
    def each(self) -> int:
        """Steps in a column."""
        return -(-(self.last - self.first + 1) // self.count)

    @property
    def base(self) -> int:
        return self.first - self.first % self.each

    @property
    def made(self) -> int:
        """Columns, before they are widened."""
        return (self.last - self.base) // self.each + 1

    @property
    def wide(self) -> int:
        return max(1, self.count // max(SHORTEST, self.made)) if self.each == 1 else 1

    @property
    def _cut(self) -> int:
        return max(0, self.made * self.wide - self.count)

    def dot(self, step: int) -> int | None:
        """The first column of a step; None: it is not shown."""
        at = (step - self.base) // self.each * self.wide - self._cut
        return at if self.first <= step <= self.last and 0 <= at < self.count else None

    def steps(self, dot: int) -> tuple[int, int] | None:
        """First and last step of a column; None: the plot ends before."""
        at = (dot + self._cut) // self.wide
        if dot < 0 or at >= self.made:
            return None
        begin = self.base + at * self.each
        return max(begin, self.first), min(begin + self.each - 1, self.last)


def axis_top(highest: int) -> tuple[int, str, str]:
    """A round number of bytes from `highest` on, and how it and its half are written."""
    unit = next((unit for unit in reversed(UNITS) if highest >= unit.bytes), B)
    power = 10 ** floor(log10(max(1, highest) / unit.bytes))
    top = next(number * power for number in ROUND if number * power * unit.bytes >= highest)
    return round(top * unit.bytes), f"{top:g}", f"{top / 2:g}"


def round_down(number: float) -> float:
    """The largest round number that is not above."""
    power = 10.0 ** floor(log10(number))
    return max(each * power for each in ROUND if each * power <= number)


def level(value: int, top: int, rows: int) -> int:
    """How many dots high a value is in a plot of `rows` cells."""
    dots = rows * 4
    return min(dots, max(1 if value > 0 else 0, round(value * dots / top))) if top > 0 else 0


def steady(values: Sequence[int]) -> bool:
    """All but a few are about as high as the highest: an area would say no more than a line."""
    near = STEADY * max(values, default=0)
    return sum([value >= near for value in values]) >= STEADY * len(values) > 0


def columns(points: Sequence[tuple[int, int, int | None]], first: int, last: int, count: int) -> list[int | None]:
    """(from step, to step, value) as dot columns (`Scale`), the maximum of each column."""
    scale = Scale(first, last, count)
    each, base, wide = scale.each, scale.base, scale.wide
    made: list[int | None] = [None] * scale.made
    for begin, end, value in points:
        if value is not None:
            for at in range((max(begin, first) - base) // each, (end - base) // each + 1):
                before = made[at]
                made[at] = value if before is None or value > before else before
    return [value for value in made for _ in range(wide)][-count:]


def plot(
    curves: Sequence[Curve],
    top: int,
    width: int,
    height: int,
    *,
    braille: bool,
    ceiling: int | None,
    uprights: Sequence[int] = (),
    cursor: int | None = None,
) -> list[Line]:
    """`height` lines of `width` cells; the value `top` reaches the upper edge. Curves hold dot columns.

    In a cell with two curves the later one's colour wins. `ceiling` is a dashed horizontal line, each of `uprights`
    (dot columns) a vertical one; both only in free cells. `cursor`: a cell that is marked from top to bottom.
    """
    dots = height * 4
    unit = dots / top if top > 0 else 0.0  # as `level`, which would be a call for each column
    marks = [[0] * width for _ in range(height)]
    roles = [[""] * width for _ in range(height)]
    signs = [[" "] * width for _ in range(height)]
    for curve in curves:
        for column, value in enumerate(curve.values[: 2 * width]):
            if value is None:
                continue
            cell, side = divmod(column, 2)
            high = min(dots, max(1 if value > 0 else 0, round(value * unit)))
            if curve.area:
                full, rest = divmod(high, 4)
                for row in range(height - full, height):
                    marks[row][cell] |= _FILL[side][4]
                    roles[row][cell], signs[row][cell] = curve.role, curve.sign
                if rest:
                    row = height - full - 1
                    marks[row][cell] |= _FILL[side][rest]
                    roles[row][cell], signs[row][cell] = curve.role, curve.sign
            elif high and not (curve.dotted and side):
                row, dot = divmod(high - 1, 4)
                row = height - 1 - row
                if signs[row][cell] != curve.sign:
                    signs[row][cell] = curve.sign
                marks[row][cell] |= _DOT[side][dot]
                roles[row][cell] = curve.role
    if ceiling is not None and 0 < ceiling <= top:
        row = height - 1 - (level(ceiling, top, height) - 1) // 4
        for cell in range(width):
            if not marks[row][cell]:
                marks[row][cell], roles[row][cell], signs[row][cell] = -1, "line:capacity", "~"
    for column in uprights:
        cell = column // 2
        for row in range(height):
            if cell < width and marks[row][cell] <= 0:
                marks[row][cell], roles[row][cell], signs[row][cell] = -2, "warn", UPRIGHT[1]
    if cursor is not None and 0 <= cursor < width:
        for row in range(height):
            marks[row][cursor], roles[row][cursor], signs[row][cursor] = -3, "key", CURSOR[1]
    return [_row(marks[r], roles[r], signs[r], braille) for r in range(height)]


def _row(marks: list[int], roles: list[str], signs: list[str], braille: bool) -> Line:
    spans: list[Span] = []
    text, role = "", ""
    for mark, this, sign in zip(marks, roles, signs, strict=True):
        if mark < 0:
            char = {-1: "╌", -2: UPRIGHT[0], -3: CURSOR[0]}[mark] if braille else sign
        elif braille:
            char = chr(0x2800 + mark) if mark else " "
        else:
            char = sign if mark else " "
        if this != role:
            if text:
                spans.append((text, role))
            text, role = "", this
        text += char
    spans.append((text, role))
    return tuple(spans)
