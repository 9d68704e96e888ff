"""What each line should be in closed form, beside what it is."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.comparison import OTHER, Compared, Comparison, compare
from gpumon.analysis.units import NOT_KNOWN, in_unit, unit_for
from gpumon.tui.ink import Glyphs, line_role
from gpumon.tui.spans import Line, Span, left, right
from gpumon.tui.view import View, newest_read
from gpumon.tui.widgets.device_bar import LABELS
from gpumon.tui.widgets.panel import Panel

ROWS_MAX = 12
LEAST_WITH_ADDED = 8
"""Rows, below which what a step adds is left out."""

LITTLE_OF_ALLOCATED = 50
"""A line without an estimate is shown from a 50th of what is allocated."""


@dataclass(frozen=True, slots=True)
class Comparisons:
    """What the table shows."""

    found: Comparison | None
    waiting: bool


def compared(view: View) -> Comparison | None:
    """The newest step that was read beside its estimate."""
    if view.device is None:
        return None
    rank = view.rank
    record = rank.steps[newest_read(rank, view.device.device)] if rank and rank.steps else None
    return compare(view.device, record)


def comparisons(view: View) -> Comparisons:
    """The lines that have an estimate, what is beside them, and their sum; then what a step adds, and the peak."""
    found = compared(view)
    if found is None:
        return Comparisons(None, True)
    return Comparisons(found, False)


def summed(found: Comparison, most: int = ROWS_MAX) -> tuple[Compared, ...]:
    """At most so many rows. What has no room, or no estimate, is one line: `allocated` is the sum of those above it."""
    added = found.added if most >= LEAST_WITH_ADDED else ()
    total, last = found.allocated, [row for row in (*added, found.peak) if row is not None]
    room = max(0, most - len(last) - 2)
    little = (total.measured or 0) // LITTLE_OF_ALLOCATED if total is not None else 0
    shown = [row for row in found.owners if row.estimate or abs(row.measured or 0) > little]
    largest = sorted(shown, key=lambda row: -max(row.estimate or 0, abs(row.measured or 0)))[:room]
    rows = [row for row in shown if row in largest]
    if total is None or not rows:
        return (*rows, *last)
    measured = estimated = None
    if total.measured is not None:
        measured = total.measured - sum(row.measured or 0 for row in rows)
    if total.estimate is not None:
        estimated = total.estimate - sum(row.estimate or 0 for row in rows)
    other = (Compared(OTHER, estimated, measured, "measured"),) if measured or estimated else ()
    return (*rows, *other, total, *last)


class EstimateTable(Panel):
    """Estimate against measurement, line by line."""

    NAME = "Estimate vs measured"
    TERMS = ("estimate", "measured", "difference", "source", "weights", "gradients", "optimizer", "still held",
             "step adds", "update adds", "allocated", "peak")  # fmt: skip
    CALM = True

    def pick(self, view: View) -> Comparisons:
        return comparisons(view)

    def draw(self, slice_: Comparisons, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return estimate_lines(slice_, width, height, glyphs, self.title_role)


def estimate_lines(c: Comparisons, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    rows = summed(c.found, height - 1) if c.found is not None else ()
    if not rows:
        text = "   known once the model is described and a step has closed" if c.waiting else "   nothing to compare"
        return [((" Estimate vs measured", title),), ((text, "dim"),)]
    unit = unit_for(*(v for r in rows for v in (r.estimate, r.measured)))
    name = 14
    number = 9 if room >= 42 else 8
    heads = ["estimate", "measured", "diff"]
    fits = max(1, min(3, (room - name) // number))
    shown = {3: (0, 1, 2), 2: (1, 2), 1: (2,)}[fits]
    with_source = room - name - number * fits >= 10
    head: list[Span] = [(left(f" Estimate {unit.name}", name), title)]
    head += [(right(heads[i], number), "dim") for i in shown]
    if with_source:
        head.append(("  source", "dim"))
    lines: list[Line] = [tuple(head)]
    for r in rows:
        strong = r.line in ("peak", "allocated")
        glyph = " " if strong else glyphs.lines.get(r.line, " ")
        line: list[Span] = [
            (f" {glyph} ", line_role(r.line)),
            (left(LABELS.get(r.line, r.line), name - 3), "strong" if strong else "text"),
        ]
        cells = (
            (in_unit(r.estimate, unit), "text"),
            (in_unit(r.measured, unit), "strong" if strong else "text"),
            (in_unit(r.difference, unit, sign=True), "warn" if r.off else "dim"),
        )
        line += [(right(cells[i][0], number), "dim" if cells[i][0] == NOT_KNOWN else cells[i][1]) for i in shown]
        if with_source:
            line.append((f"  {r.source}", "dim"))
        lines.append(tuple(line))
    return lines
