"""The newest OOM: the cause, the request, where, what was alive, and remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumon.analysis.types import OWNERS, REST
from gpumon.analysis.units import in_unit, size, unit_for
from gpumon.tui.styles import Glyphs, line_role
from gpumon.tui.text_layout import EMPTY, Line, Span, fit, flow, left, spread, width, words
from gpumon.tui.view import View
from gpumon.tui.widgets.device_bar import LABELS
from gpumon.tui.widgets.panel import Panel

if TYPE_CHECKING:
    from gpumon.analysis.diagnosis.oom_report import OomReport

_LABEL = 9


class OomPanel(Panel):
    """A summary; `o` opens the full report."""

    NAME = "Out of memory"
    TERMS = ("requested", "verdict", "allocated", "reserved", "cached", "phase")

    def pick(self, view: View) -> OomReport | None:
        return view.report.oom if view.report else None

    def sums(self) -> list[str]:
        report: OomReport | None = self._slice
        if report is None:
            return []
        from gpumon.analysis.diagnosis.oom_report import VERDICTS

        said = [report.message] if report.message else []
        if report.requested is not None:
            low, high = report.requested.low, report.requested.high
            said.append(f"requested {low:,} B" if low == high else f"requested {low:,} to {high:,} B")
        return [*said, f"{report.verdict}: {VERDICTS[report.verdict]}"]

    def draw(self, slice_: OomReport | None, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return [] if slice_ is None else oom_lines(slice_, width, height, glyphs)


def oom_lines(report: OomReport, room: int, height: int, glyphs: Glyphs) -> list[Line]:
    lines = [_title(report, room, glyphs)]
    labelled = (
        ("", words(report.sentence, "text", room - 4)[:2]),
        ("where", [line] if (line := _where(report)) else []),
        ("alive", _alive(report, room - _LABEL - 4, glyphs)[:2]),
    )
    for label, rows in labelled:
        indent = _LABEL if label else 0
        for at, row in enumerate(rows):
            name = (f"   {left(label if at == 0 else '', indent)}", "dim")
            lines.append(fit((name, *row), room))
    wanted = 1 + min(2, len(report.remedies)) if report.remedies else 1
    lines = lines[: max(1, height - wanted + 1)]  # remedies are more useful than what was alive
    remedies = report.remedies[: max(0, height - len(lines))]
    spare = height - len(lines) - len(remedies)
    for number, remedy in enumerate(remedies, start=1):
        gain: Line = ((f"  saves {size(remedy.saves)}", "text"),) if remedy.saves else ()
        text = f"{number}. {remedy.text}"
        rows = words(text, "good", room - _LABEL - 4)
        if width(rows[-1] + gain) <= room - _LABEL - 4:
            rows[-1] += gain
        elif gain:
            rows.append(gain)
        if len(rows) - 1 > spare:  # what is cut is on the page
            rows = [((text, "good"), *gain)]
        spare -= len(rows) - 1
        for at, row in enumerate(rows):
            label = left("do" if number == 1 and at == 0 else "", _LABEL)
            lines.append(fit([(f"   {label}", "dim"), *row], room))
    return lines


def _title(report: OomReport, room: int, glyphs: Glyphs) -> Line:
    line: list[Span] = [(f" {glyphs.warning} Out of memory", "bad")]
    if report.requested is not None:
        line.append((f"  {size(report.requested.middle)} requested", "strong"))
    moment = [
        part
        for part in (
            f"in {report.phase}" if report.phase else "",
            f"step {report.step:,}" if report.step is not None else "",
        )
        if part
    ]
    if moment:
        line.append((f" {', '.join(moment)}", "text"))
    return spread(line, [(report.verdict, "bad"), ("  o shows all ", "dim")], room)


def _where(report: OomReport) -> Line:
    line: list[Span] = []
    if report.where is not None:
        line.append((report.where, "strong"))
        if report.code:
            line.append((f"  {report.code}", "text"))
    if report.module is not None:
        line.append((f"{'  ' if line else ''}in {report.module}", "dim"))
    return tuple(line) or EMPTY


def _alive(report: OomReport, room: int, glyphs: Glyphs) -> list[Line]:
    if report.lines is None:
        return []
    known = [(name, value) for name in (*OWNERS, *REST) if (value := getattr(report.lines, name))]
    unit = unit_for(*(value for _, value in known))
    items: list[Line] = [
        ((f"{glyphs.lines[name]} ", line_role(name)), (f"{LABELS.get(name, name)} ", "dim"), (in_unit(v, unit), "text"))
        for name, v in known
        if abs(v) * 200 >= max(abs(v) for _, v in known)
    ]
    return flow([*items, ((unit.name, "dim"),)], room) if items else []
