"""What each line should be in closed form, beside what it is."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.comparison import Compared, Comparison, compare
from gpumon.analysis.units import NOT_KNOWN, in_unit, unit_for
from gpumon.tui.ink import Glyphs, line_role
from gpumon.tui.spans import Line, Span, left, right
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
    heads = ["estimate", "measured", "diff"]
    fits = max(1, min(3, (room - name) // number))
    shown = {3: (0, 1, 2), 2: (1, 2), 1: (2,)}[fits]
    with_source = room - name - number * fits >= 10
    head: list[Span] = [(left(f" Estimate {unit.name}", name), title)]
    head += [(right(heads[i], number), "dim") for i in shown]
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
