"""What each line should be in closed form, beside what it is."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.history import StepPeaks, step_peaks
from gpumon.analysis.units import NOT_KNOWN, in_unit, unit_for
from gpumon.tui.ink import Glyphs, line_role
from gpumon.tui.spans import Line, Span, left, right
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire

OFF_FRACTION = 0.02
"""A difference above this share of the estimate (and above 1 MiB) is marked."""

OFF_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the table."""

    line: str
    estimate: int | None
    measured: int | None
    source: str

    @property
    def difference(self) -> int | None:
        return None if self.estimate is None or self.measured is None else self.measured - self.estimate

    @property
    def off(self) -> bool:
        d = self.difference
        return d is not None and abs(d) > max(OFF_BYTES, OFF_FRACTION * (self.estimate or 0))


@dataclass(frozen=True, slots=True)
class Comparisons:
    """What the table shows."""

    rows: tuple[Comparison, ...]
    waiting: bool


def comparisons(view: View) -> Comparisons:
    """Owners are measured at the end of the step; activations and temporaries as the estimate defines them: what
    forward or backward added to what stood as forward began, what the optimizer added to what stood at its end."""
    report = view.device
    if report is None or report.estimate is None:
        return Comparisons((), True)
    estimate, sources = report.estimate, dict(report.estimate.sources)
    newest = view.rank.steps[-1] if view.rank and view.rank.steps else None
    added = _added(step_peaks(newest, report.device) if newest else None)
    rows: list[Comparison] = []
    for line, value in estimate.lines.known():
        if line in ("allocated", "reserved", "total", "free") or sources.get(line) == "measured":
            continue  # a figure that was read is no estimate
        held = getattr(report.ledger, line) if report.ledger else None
        rows.append(Comparison(line, value, added.get(line, held), sources.get(line, "")))
    measured_peak = report.peak.allocated if report.peak else None
    if estimate.peak is not None or measured_peak is not None:
        rows.append(Comparison("peak", estimate.peak, measured_peak, sources.get("peak", "").replace(" and ", "+")))
    return Comparisons(tuple(rows), False)


def _added(peaks: StepPeaks | None) -> dict[str, int | None]:
    if peaks is None:
        return {"activations": None, "temporaries": None}
    above = [p.peak - peaks.start for p in peaks.phases if p.phase not in (wire.OPTIMIZER, wire.BETWEEN)]
    optimizer = next((p.peak - peaks.end for p in peaks.phases if p.phase == wire.OPTIMIZER), None)
    return {"activations": max(above, default=None), "temporaries": optimizer}


class EstimateTable(Panel):
    """Estimate against measurement, line by line."""

    NAME = "Estimate vs measured"
    TERMS = ("estimate", "measured", "difference", "source", "weights", "gradients", "optimizer", "activations", "peak")
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
        line: list[Span] = [(f" {glyph} ", line_role(r.line)), (left(r.line, name - 3), "strong" if strong else "text")]
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
