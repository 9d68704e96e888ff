"""Findings about this run, most severe first, each with evidence and a remedy."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from textual.binding import Binding, BindingType
from textual.events import Click

from gpumon.analysis.job_findings import JobFinding, job_findings
from gpumon.analysis.types import Finding
from gpumon.analysis.units import size
from gpumon.tui.styles import Glyphs
from gpumon.tui.text_layout import Line, Span, cells, fit
from gpumon.tui.view import View
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire

_ROLE = {"info": "dim", "warning": "warn", "critical": "bad"}


MOST_ROWS, MOST_ROWS_SHORT = 5, 2


class Findings(msgspec.Struct, frozen=True):
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


def details_of(each: JobFinding) -> str | None:
    """The screen with a finding's details."""
    code = each.finding.code
    return "leaks" if code in LEAKS else "blocks" if code in GAPS else None


class FindingsStrip(Panel):
    NAME = "Findings"
    TERMS = ("finding",)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open", id="findings.open", tooltip="Read the selected finding in full"),
        Binding("down,j", "move(1)", "Down", show=False, id="findings.down", tooltip="Select the next finding"),
        Binding("up,k", "move(-1)", "Up", show=False, id="findings.up", tooltip="Select the finding before"),
    ]  # fmt: skip

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._height = 0
        self._cursor = 0

    @property
    def found(self) -> tuple[JobFinding, ...]:
        picked: Findings | None = self._slice
        return picked.findings if picked is not None else ()

    def action_open(self) -> None:
        if self.found:
            self.monitor.open_finding(self.found[self._cursor])

    def action_move(self, by: int) -> None:
        """Past either end, the next panel is focused."""
        at = self._cursor + by
        if 0 <= at < len(self.found):
            self._cursor = at
            self._redraw()
        elif by > 0:
            self.app.action_focus_next()
        else:
            self.app.action_focus_previous()

    def on_click(self, event: Click) -> None:
        self.focus()
        at = self._top(self.size.height) + event.y - 1 - self._above
        if 0 <= at < len(self.found):
            again, self._cursor = at == self._cursor, at
            self._redraw()
            if again:
                self.action_open()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return bool(self.found)

    @property
    def _above(self) -> int:
        """Rows of an out-of-memory above the findings."""
        return int(self._slice is not None and self._slice.oom is not None)

    def _top(self, height: int) -> int:
        """The first row shown, so that the selected finding is among them."""
        return max(0, self._cursor + self._above - max(1, height - 1) + 1)

    def pick(self, view: View) -> Findings:
        picked = findings(view)
        rows = len(picked.findings) + (picked.oom is not None)
        most = MOST_ROWS if self.app.size.height >= 32 else MOST_ROWS_SHORT
        height = 1 + min(rows, most)
        if self.app.size.height >= 20 and self._height != height:
            self._height = self.styles.height = height
        return picked

    def draw(self, slice_: Findings, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        self._cursor = max(0, min(self._cursor, len(slice_.findings) - 1))
        cursor = self._cursor if self.has_focus else None
        return finding_lines(slice_, width, height, glyphs, self.title_role, self._top(height), cursor)


class LeakFindings(FindingsStrip):
    """Leak findings of the shown rank; hidden if there are none."""

    def pick(self, view: View) -> Findings:
        found = job_findings(view.frame, (view.report,)) if view.report else ()
        known = bool(view.rank and view.rank.steps)
        picked = Findings(tuple(each for each in found if each.finding.code in LEAKS), None, known)
        self.display = bool(picked.findings) and self.app.size.height >= 20
        self.styles.height = 1 + min(len(picked.findings), MOST_ROWS if self.app.size.height >= 32 else 1)
        return picked


def finding_lines(
    f: Findings, room: int, height: int, glyphs: Glyphs, title: str, top: int = 0, cursor: int | None = None
) -> list[Line]:
    """`top`: the first one shown. `cursor`: the one that is selected, if the panel has the focus."""
    head: list[Span] = [(" Findings", title)]
    rows: list[Line] = []
    if f.oom is not None:
        rows.append(_oom(f.oom, room, glyphs))
    rows += [_finding(x, room, glyphs, selected=at == cursor) for at, x in enumerate(f.findings)]
    if not rows:
        head.append(("  none so far" if f.known else "  after the first steps", "dim"))
        return [tuple(head)]
    if height <= 1:
        return rows[:1]
    if len(rows) > height - 1:
        head.append((f"  {len(rows)}, {top + 1} to {min(len(rows), top + height - 1)} shown", "dim"))
    return [tuple(head), *rows[top : top + height - 1]]


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


def _finding(each: JobFinding, room: int, glyphs: Glyphs, *, selected: bool = False) -> Line:
    f = each.finding
    gone = f.state != "open"
    glyph = glyphs.gone if gone else glyphs.info if f.severity == "info" else glyphs.warning
    role = "dim" if gone else _ROLE[f.severity]
    line: list[Span] = [(f"{glyphs.now if selected else ' '}{glyph} ", role), (f.code, "cursor" if selected else role)]
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
    if cells(said) + cells(remedy) > left_over:  # the page has all of it
        said = _shorter(f, said, left_over)
        remedy = remedy if cells(said) + cells(remedy) <= left_over else ""
    return fit([*line, (said, "text" if not gone else "dim"), (remedy, "good")], room)


def _shorter(finding: Finding, said: str, room: int) -> str:
    """Who holds it, and the line; without its function where that is too long."""
    if not finding.holder:
        return said
    where = f", {finding.where}" if finding.where else ""
    held = f"  held by {finding.holder}{where}"
    return held if cells(held) <= room else f"  held by {finding.holder.partition(' in ')[0]}{where}"
