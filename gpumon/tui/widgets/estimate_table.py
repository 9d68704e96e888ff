"""What each line should be in closed form, beside what it is."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.comparison import Compared, Comparison, compare
from gpumon.analysis.units import NOT_KNOWN, Unit, in_unit, unit_for
from gpumon.tui.ink import Glyphs, line_role
from gpumon.tui.spans import Line, Span, left
from gpumon.tui.table import Column, Columns, heads, place, row_cells, used
from gpumon.tui.view import View, newest_read
from gpumon.tui.widgets.device_bar import LABELS
from gpumon.tui.widgets.panel import Panel


@dataclass(frozen=True, slots=True)
class Comparisons:
    """What the table shows."""

    rows: tuple[Compared, ...]
    waiting: bool


def compared(view: View) -> Comparison | None:
    """The newest step that was read beside its estimate."""
    if view.device is None:
        return None
    rank = view.rank
    record = rank.steps[newest_read(rank, view.device.device)] if rank and rank.steps else None
    return compare(view.device, record)


def comparisons(view: View) -> Comparisons:
    """The lines that have an estimate, the peak last."""
    found = compared(view)
    if found is None:
        return Comparisons((), True)
    rows = [row for row in (*found.owners, *found.added) if row.estimate]
    return Comparisons((*rows, *([found.peak] if found.peak else ())), False)


@dataclass(frozen=True, slots=True)
class Written:
    """How a row's figures are written."""

    unit: Unit
    strong: bool
    none: str = NOT_KNOWN

    def figure(self, value: int | None, role: str, *, sign: bool = False) -> Span:
        return (self.none, "dim") if value is None else (in_unit(value, self.unit, sign=sign), role)


def figures(number: int) -> Columns[Compared, Written]:
    """Estimate, measured and their difference, `number` cells each; the estimate is given up first."""
    return (
        Column("estimate", "estimate", number, 2, lambda row, how: how.figure(row.estimate, "text")),
        Column("measured", "measured", number, 1,
               lambda row, how: how.figure(row.measured, "strong" if how.strong else "text")),
        Column("difference", "difference" if number >= 11 else "diff", number, 0,
               lambda row, how: how.figure(row.difference, "warn" if row.off else "dim", sign=True)),
    )  # fmt: skip


class EstimateTable(Panel):
    """Estimate against measurement, line by line."""

    NAME = "Estimate vs measured"
    TERMS = ("estimate", "measured", "difference", "source", "weights", "gradients", "optimizer", "still held",
             "activations", "peak")  # fmt: skip
    CALM = True

    def pick(self, view: View) -> Comparisons:
        return comparisons(view)

    def draw(self, slice_: Comparisons, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return estimate_lines(slice_, width, height, glyphs, self.title_role)


def estimate_lines(c: Comparisons, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    if not c.rows:
        text = "   known once the model is described and a step has closed" if c.waiting else "   nothing to compare"
        return [((" Estimate vs measured", title),), ((text, "dim"),)]
    unit = unit_for(*(v for r in c.rows for v in (r.estimate, r.measured)))
    name = 14
    number = 9 if room >= 42 else 8
    columns = place(figures(number), max(number, room - name))
    with_source = room - name - used(columns) >= 10
    head: list[Span] = [(left(f" Estimate {unit.name}", name), title), *heads(columns)]
    if with_source:
        head.append(("  source", "dim"))
    lines: list[Line] = [tuple(head)]
    rows = c.rows
    if len(rows) > height - 1 > 0:  # the peak last is worth more than a small line
        order = sorted(rows[:-1], key=lambda r: -(r.estimate or 0))[: max(0, height - 2)]
        rows = (*(r for r in rows[:-1] if r in order), rows[-1])
    for r in rows:
        strong = r.line == "peak"
        glyph = " " if strong else glyphs.lines.get(r.line, " ")
        line: list[Span] = [
            (f" {glyph} ", line_role(r.line)),
            (left(LABELS.get(r.line, r.line), name - 3), "strong" if strong else "text"),
        ]
        line += row_cells(columns, r, Written(unit, strong))
        if with_source:
            line.append((f"  {r.source}", "dim"))
        lines.append(tuple(line))
    return lines
