"""Findings about this run, most severe first, each with evidence and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from textual.binding import Binding, BindingType

from gpumon.analysis.job_findings import JobFinding, job_findings
from gpumon.analysis.units import size
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, cells, clip, fit
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire

_ROLE = {"info": "dim", "warning": "warn", "critical": "bad"}


MOST_ROWS, MOST_ROWS_SHORT = 5, 2


@dataclass(frozen=True, slots=True)
class Findings:
    findings: tuple[JobFinding, ...]  # of the whole job
    oom: wire.Oom | None  # if no report explains it yet
    known: bool  # some steps have closed


def findings(view: View) -> Findings:
    rank = view.rank
    explained = view.report is not None and view.report.oom is not None
    found = job_findings(view.frame, view.reports)
    return Findings(found, rank.oom if rank and not explained else None, bool(rank and rank.steps))


LEAKS = frozenset(("tensor-leak", "retained-graph", "retained-checkpoint", "checkpoint-device", "host-leak"))
"""Findings with details on the Leaks screen."""

GAPS = frozenset(("fragmentation",))
"""And on the Blocks screen."""


class FindingsStrip(Panel):
    NAME = "Findings"
    TERMS = ("finding",)
    CALM = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "more", "More", id="findings.more",
                tooltip="Open the screen with details of the most important finding: Leaks or Blocks"),
    ]  # fmt: skip

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._height = 0

    @property
    def leads_to(self) -> tuple[str, JobFinding] | None:
        """The most severe finding that has a detail screen, and that screen."""
        picked: Findings | None = self._slice
        for each in picked.findings if picked is not None else ():
            if each.finding.code in LEAKS | GAPS:
                return "leaks" if each.finding.code in LEAKS else "blocks", each
        return None

    def action_more(self) -> None:
        if self.leads_to is not None:
            mode, each = self.leads_to
            shown = self.monitor.view.rank
            if shown is None or shown.source not in each.sources:
                self.monitor.open_rank(each.sources[0], None, mode)
            else:
                self.monitor.action_mode(mode)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return self.leads_to is not None if action == "more" else True

    def pick(self, view: View) -> Findings:
        picked = findings(view)
        rows = len(picked.findings) + (picked.oom is not None)
        most = MOST_ROWS if self.app.size.height >= 32 else MOST_ROWS_SHORT
        height = 1 + min(rows, most)
        if self.app.size.height >= 20 and self._height != height:
            self._height = self.styles.height = height
        return picked

    def draw(self, slice_: Findings, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return finding_lines(slice_, width, height, glyphs, self.title_role)


class LeakFindings(FindingsStrip):
    """Leak findings of the shown rank; hidden if there are none."""

    def pick(self, view: View) -> Findings:
        found = job_findings(view.frame, (view.report,)) if view.report else ()
        known = bool(view.rank and view.rank.steps)
        picked = Findings(tuple(each for each in found if each.finding.code in LEAKS), None, known)
        self.display = bool(picked.findings) and self.app.size.height >= 20
        self.styles.height = 1 + min(len(picked.findings), MOST_ROWS if self.app.size.height >= 32 else 1)
        return picked

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "more"


def finding_lines(f: Findings, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    head: list[Span] = [(" Findings", title)]
    rows: list[Line] = []
    if f.oom is not None:
        rows.append(_oom(f.oom, room, glyphs))
    rows += [_finding(x, room, glyphs) for x in f.findings]
    if not rows:
        head.append(("  none so far" if f.known else "  after the first steps", "dim"))
        return [tuple(head)]
    if height <= 1:
        return rows[:1]
    if len(rows) > height - 1:
        head.append((f"  {len(rows)}, the first {height - 1} shown", "dim"))
    return [tuple(head), *rows[: height - 1]]


def _oom(oom: wire.Oom, room: int, glyphs: Glyphs) -> Line:
    free = f", {size(oom.free)} were free" if oom.free is not None else ""
    return fit(
        [
            (f" {glyphs.warning} ", "bad"),
            ("out of memory", "bad"),
            (f"  step {oom.step:,}, {oom.phase}: {size(oom.requested)} requested{free}", "text"),
        ],
        room,
    )


def _finding(each: JobFinding, room: int, glyphs: Glyphs) -> Line:
    f = each.finding
    gone = f.state != "open"
    glyph = glyphs.gone if gone else glyphs.info if f.severity == "info" else glyphs.warning
    role = "dim" if gone else _ROLE[f.severity]
    line: list[Span] = [(f" {glyph} ", role), (f.code, role)]
    if each.ranks:
        line.append((f"  {each.ranks}", "text" if not gone else "dim"))
    if f.bytes_per_step:
        line.append((f"  {size(f.bytes_per_step, sign=True)}/step", "strong"))
    elif f.bytes:
        line.append((f"  {size(f.bytes)}", "strong"))
    if f.step is not None and f.bytes_per_step:
        line.append((f" since {f.step:,}", "dim"))
    where = " · ".join(part for part in (f.holder, f.where) if part and part not in f.title)
    said = "  " + " · ".join(part for part in (f.title, where) if part)
    left_over = room - sum(cells(text) for text, _ in line)
    remedy = f" · {f.remedy}" if f.remedy and not gone else ""
    if cells(said) + cells(remedy) > left_over and f.holder:  # the name first: Leaks and JSON have the whole title
        said = f"  held by {f.holder}" + (f", {f.where}" if f.where else "")
    elif cells(said) + cells(remedy) > left_over and remedy:
        said = clip(said, max(24, left_over - cells(remedy)))
    return fit([*line, (said, "text" if not gone else "dim"), (remedy, "good")], room)
