"""Each line's estimate next to its measured value."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpumon.analysis.comparison import OTHER, Compared, EstimateCheck, compare
from gpumon.analysis.units import NOT_KNOWN, Unit, in_unit, unit_for
from gpumon.tui.styles import Glyphs, line_role
from gpumon.tui.table import Column, Columns, heads, place, row_cells, used
from gpumon.tui.text_layout import Line, Span, left
from gpumon.tui.view import View, newest_read
from gpumon.tui.widgets.device_bar import LABELS
from gpumon.tui.widgets.panel import Panel

_SHORT = {"held": "kept"}
"""Where a label does not fit."""

LEAST_WITH_ADDED = 8
"""Below this, what a step adds is hidden."""

LITTLE_OF_ALLOCATED = 50
"""A line without an estimate is shown from 1/50 of allocated on."""


class Comparisons(msgspec.Struct, frozen=True):
    found: EstimateCheck | None
    waiting: bool


def compared(view: View) -> EstimateCheck | None:
    """The newest step with figures, and its estimate."""
    if view.device is None:
        return None
    rank = view.rank
    record = rank.steps[newest_read(rank, view.device.device)] if rank and rank.steps else None
    return compare(view.device, record)


def comparisons(view: View) -> Comparisons:
    """The comparison; `waiting` if there is none yet."""
    found = compared(view)
    if found is None:
        return Comparisons(None, True)
    return Comparisons(found, False)


def rest(total: Compared, rows: Sequence[Compared]) -> Compared | None:
    """What `rows` lack of `total`, so that each column adds up: lines without an estimate or room. None: nothing."""
    measured = estimated = None
    if total.measured is not None:
        measured = (total.measured - sum(row.measured or 0 for row in rows)) or None
    if total.estimate is not None:
        estimated = (total.estimate - sum(row.estimate or 0 for row in rows)) or None
    return Compared(OTHER, estimated, measured, "measured") if measured or estimated else None


def summed(found: EstimateCheck, most: int) -> tuple[Compared, ...]:
    """At most `most` rows. Lines without room or estimate are one row, `other`; `allocated` is the sum above it."""
    added = found.added if most >= LEAST_WITH_ADDED else ()
    total, last = found.allocated, [row for row in (*added, found.peak) if row is not None]
    if total is None:
        total, last = _sum(found.owners), [_sum(found.owners), *last]
    else:
        last = [total, *last]
    little = (total.measured or 0) // LITTLE_OF_ALLOCATED
    rows = [row for row in found.owners if row.estimate or abs(row.measured or 0) > little]
    other = rest(total, rows)
    room = max(0, most - len(last))
    if len(rows) + (other is not None) > room:
        largest = sorted(rows, key=lambda row: -max(row.estimate or 0, abs(row.measured or 0)))[: max(0, room - 1)]
        rows = [row for row in rows if row in largest]
        other = rest(total, rows) if room else None
    return (*rows, *([other] if other is not None else []), *last)[-most:] if most > 0 else ()


def label(line: str, room: int) -> str:
    text = LABELS.get(line, line)
    return text if len(text) <= room else _SHORT.get(line, text)


def _sum(rows: Sequence[Compared]) -> Compared:
    """Of a device whose `allocated` is not counted."""
    estimates = [row.estimate for row in rows if row.estimate is not None]
    measured = [row.measured for row in rows if row.measured is not None]
    return Compared("allocated", sum(estimates) if estimates else None, sum(measured) if measured else None, "measured")


class FigureStyle(msgspec.Struct, frozen=True):
    unit: Unit
    strong: bool
    none: str = NOT_KNOWN

    def figure(self, value: int | None, role: str, *, sign: bool = False) -> Span:
        return (self.none, "dim") if value is None else (in_unit(value, self.unit, sign=sign), role)


def figures(number: int) -> Columns[Compared, FigureStyle]:
    """Estimate, measured and difference, `number` cells each; the estimate is dropped first."""
    return (
        Column("estimate", "estimate", number, 2, lambda row, how: how.figure(row.estimate, "text")),
        Column("measured", "measured", number, 1,
               lambda row, how: how.figure(row.measured, "strong" if how.strong else "text")),
        Column("difference", "difference" if number >= 11 else "diff", number, 0,
               lambda row, how: how.figure(row.difference, "warn" if row.off else "dim", sign=True)),
    )  # fmt: skip


class EstimateTable(Panel):
    NAME = "Estimate vs measured"
    TERMS = ("estimate", "measured", "difference", "source", "weights", "gradients", "optimizer", "kept after the step",
             "step adds", "update adds", "allocated", "peak")  # fmt: skip

    def pick(self, view: View) -> Comparisons:
        return comparisons(view)

    def sums(self) -> list[str]:
        found: EstimateCheck | None = self._slice.found if self._slice is not None else None
        return sums(found) if found is not None else []

    def draw(self, slice_: Comparisons, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return estimate_lines(slice_, width, height, glyphs, self.title_role)


def sums(found: EstimateCheck) -> list[str]:
    """The sum of the rows above `allocated`, to the byte, and what `other` and the peak are."""
    total = found.allocated
    if total is None or total.measured is None:
        return []
    parts = [(LABELS.get(row.line, row.line), row.measured) for row in found.owners if row.measured]
    said = [f"allocated {total.measured:,} B = " + " + ".join(f"{name} {value:,}" for name, value in parts)]
    said.append("other: those of these lines that have no row, so that the rows add up to allocated, at the step's end")
    if found.peak is not None and found.peak.measured is not None:
        above = found.peak.measured - total.measured
        said.append(f"peak {found.peak.measured:,} B: {above:,} B above that, while the step ran")
    return said


def estimate_lines(c: Comparisons, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    rows = summed(c.found, height - 1) if c.found is not None else ()
    if not rows:
        text = "   known once the model is described and a step has closed" if c.waiting else "   nothing to compare"
        return [((" Estimate vs measured", title),), ((text, "dim"),)]
    unit = unit_for(*(v for r in rows for v in (r.estimate, r.measured)))
    name = 14
    number = 9 if room >= 42 else 8
    columns = place(figures(number), max(number, room - name))
    with_source = room - name - used(columns) >= 10
    head: list[Span] = [(left(f" Estimate {unit.name}", name), title), *heads(columns)]
    if with_source:
        head.append(("  source", "dim"))
    lines: list[Line] = [tuple(head)]
    for r in rows:
        strong = r.line in ("peak", "allocated")
        glyph = "=" if r.line == "allocated" else " " if strong else glyphs.lines.get(r.line, " ")
        line: list[Span] = [
            (f" {glyph} ", line_role(r.line)),
            (left(label(r.line, name - 3), name - 3), "strong" if strong else "text"),
        ]
        line += row_cells(columns, r, FigureStyle(unit, strong))
        if with_source:
            line.append((f"  {r.source}", "dim"))
        lines.append(tuple(line))
    return lines
