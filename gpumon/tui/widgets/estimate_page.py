"""All estimates next to the measured values: owners, what a step adds, the peak of each phase, and remarks.

`e` explains the selected line.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
from textual.binding import Binding, BindingType

from gpumon.analysis.comparison import OTHER, Compared, EstimateCheck, remarks
from gpumon.analysis.types import Forecast
from gpumon.analysis.units import Unit, exact, in_unit, percent, size, unit_for
from gpumon.tui.styles import Glyphs, line_role
from gpumon.tui.table import Columns, TablePanel, heads, moves, place, row_cells, used
from gpumon.tui.text_layout import EMPTY, Line, Span, fit, left, width, words
from gpumon.tui.view import View, device_name, device_of, uncounted
from gpumon.tui.widgets.device_bar import LABELS, VERDICTS, word_of
from gpumon.tui.widgets.estimate_table import FigureStyle, compared, figures, label, rest
from gpumon.tui.widgets.forecast_panel import batch_factor
from gpumon.tui.widgets.phase_table import WORDS

SOURCES = {
    "exact": "in closed form, from the model's and the optimizer's description",
    "learnt": "from the first iterations",
    "measured": "read, not derived",
    "bound": "an upper bound in closed form",
}
_WORD = {"fits": "fits", "tight": "tight", "oom-ahead": "OOM ahead", "leak": "leak"}


class Estimated(msgspec.Struct, frozen=True):
    found: EstimateCheck | None
    remarks: tuple[str, ...]
    forecast: Forecast | None
    capacity: int | None
    word: str | None
    device: str
    why_not: str
    ended: bool = False
    uncounted: str = ""


def estimated(view: View) -> Estimated:
    device = view.device
    found = compared(view)
    if device is None or found is None:
        return Estimated(None, (), None, None, None, "", _why_not(view))
    word = word_of(view)
    name = device_name(device_of(view))
    ended = view.rank is not None and view.rank.status == "ended"
    return Estimated(
        found, remarks(found, device), device.forecast, device.capacity, word, name, "", ended, uncounted(view)
    )


def _why_not(view: View) -> str:
    if view.rank is None or not view.rank.models:
        return "known once a model is described"
    if any(len(record.model.devices) > 1 for record in view.rank.models):
        return "no estimate: a model is spread over several devices, but described as one"
    return "known once the model is described and a step has closed"


class EstimatePage(TablePanel):
    NAME = "Estimate"
    BINDINGS: ClassVar[list[BindingType]] = [
        *moves("estimate", "line"),
        Binding("enter", "screen.explain", "Explain", show=False, id="estimate.explain", tooltip="Like e"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines_rows: list[int] = []

    def pick(self, view: View) -> Estimated:
        return estimated(view)

    @property
    def rows(self) -> list[Compared]:
        slice_: Estimated | None = self._slice
        return rows_of(slice_.found) if slice_ is not None and slice_.found is not None else []

    def keys(self) -> list[tuple[str, bool]]:
        phases = self._slice.found.phases if self._slice is not None and self._slice.found is not None else ()
        return [(row.line, row in phases) for row in self.rows]

    def terms(self) -> tuple[str, ...]:
        found: EstimateCheck | None = self._slice.found if self._slice is not None else None
        rows = self.rows
        own: tuple[str, ...] = ()
        if found is not None and self._at < len(rows):
            phase = self._at >= len(rows) - len(found.phases)
            line = rows[self._at].line
            own = ("phase", "peak") if phase else (LABELS.get(line, line),)
        return (*own, "estimate", "measured", "difference", "source", "fits · tight · OOM ahead")

    def sums(self) -> list[str]:
        rows = self.rows
        return explanation(rows[self._at]) if self._at < len(rows) else []

    def draw(self, slice_: Estimated, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        self.find_row()
        page, at = page_lines(slice_, self._at, width, glyphs)
        chosen = at[self._at] if at else 0
        self._lines_rows, self._space = at, height
        if len(page) <= height:
            self._top = 0
            return page
        # text below the table counts too: on the last row, show the page's end
        aim = len(page) - 1 if self._at == len(self.rows) - 1 else chosen
        self._top = min(self._top, max(0, chosen - 2))
        self._top = max(self._top, min(aim, chosen + height - 3) - height + 1)
        shown = page[self._top : self._top + height]
        below = len(page) - self._top - height
        if below > 0:
            shown[-1] = ((f" {'…' if glyphs.braille else '...'} {below + 1} more lines (arrows, page keys)", "dim"),)
        return shown

    def row_at(self, y: int) -> int | None:
        return self._lines_rows.index(self._top + y) if self._top + y in self._lines_rows else None


def rows_of(found: EstimateCheck) -> list[Compared]:
    """The selectable lines, from top to bottom."""
    return [*owners_of(found), *found.added, *found.phases]


def owners_of(found: EstimateCheck) -> list[Compared]:
    """The owners and their sum. `other` is the sum's estimate for the lines without one."""
    if found.allocated is None:
        return list(found.owners)
    other = rest(found.allocated, found.owners)
    return [*found.owners, *([other] if other is not None else []), found.allocated]


def page_lines(e: Estimated, chosen: int, room: int, glyphs: Glyphs) -> tuple[list[Line], list[int]]:
    """All lines, and the line number of each row."""
    found = e.found
    if found is None:
        return [((" Estimate", "title"),), ((f"   {e.why_not}", "dim"),)], []
    lines: list[Line] = [_title(e, found, room), *_verdict(e, room, glyphs), EMPTY]
    unit = unit_for(*(v for row in rows_of(found) for v in (row.estimate, row.measured)))
    largest = max((v or 0 for row in rows_of(found) for v in (row.estimate, row.measured)), default=0)
    where: list[int] = []
    sections = (
        (f"Step's end, {unit.name}", owners_of(found)),
        ("What a step adds", found.added),
        ("Peak of each phase", found.phases),
    )
    for name, rows in sections:
        if not rows:
            continue
        lines.append(_heads(name, rows is sections[0][1], room))
        for row in rows:
            phase = rows is found.phases
            line = _row(row, unit, len(where) == chosen, phase, phase and row.line == found.peak_phase, room, glyphs)
            where.append(len(lines))
            lines.append((*line, *_bar(row, phase, largest, room - width(line), room, glyphs)))
        lines.append(EMPTY)
    for text in e.remarks:
        lines += [((" ", ""), *row) for row in words(text, "text", room - 2)]
    sources = " · ".join(f"{source}: {what}" for source, what in SOURCES.items() if _used(source, found))
    lines += [EMPTY, *(((" ", ""), *row) for row in words(sources, "dim", room - 2))]
    return lines, where


def _used(source: str, found: EstimateCheck) -> bool:
    return any(source in row.source.split("+") for row in rows_of(found))


def _title(e: Estimated, found: EstimateCheck, room: int) -> Line:
    line: list[Span] = [(" Estimate vs measured", "title")]
    if found.step is not None:
        line.append((f"  step {found.step:,}", "dim"))
        if found.read_step not in (None, found.step):
            line.append((f", owners of step {found.read_step:,}", "dim"))
    return fit([*line, (f" on {e.device}", "dim")], room)


def _verdict(e: Estimated, room: int, glyphs: Glyphs) -> list[Line]:
    f = e.forecast
    if e.ended:
        return [((" the run has ended: there is no next iteration", "dim"),)]
    if f is None and e.uncounted:
        return [((" ", ""), *row) for row in words(e.uncounted, "dim", room - 2)]
    if f is None:
        return [((" the next iteration: known after the first steps", "dim"),)]
    dash = "–" if glyphs.braille else "-"
    unit = unit_for(f.high)
    span = f"{in_unit(f.low, unit)}{dash}{in_unit(f.high, unit)}"
    line: list[Span] = []
    if e.word:
        mark = glyphs.fits if e.word == "fits" else glyphs.warning
        line.append((f" {mark} {_WORD[e.word]}  ", VERDICTS[e.word]))
    start = "" if line else " "
    peak = f"{in_unit(f.next_peak, unit)} {unit.name}"
    line.append((f"{start}the next iteration peaks at {peak} ({span}) in {f.phase}", "text"))
    second: list[Span] = []
    if e.capacity is not None and f.headroom is not None:
        bound = "at most " if f.headroom_at_most else ""
        second.append((f" {bound}{size(f.headroom)} of {size(e.capacity)} are left above it", "text"))
        if f.max_batch_factor is not None:
            way = "can grow" if f.max_batch_factor >= 1 else "must shrink"
            second.append((f" · the batch {way} to {batch_factor(f.max_batch_factor, glyphs)}", "dim"))
        if f.p_oom is not None and f.p_oom >= 0.005:
            second.append((f" · an allocation fails with {percent(f.p_oom)} probability", "bad"))
    elif e.capacity is None:
        second.append((" the device's total is not known, so it is not known whether it fits", "dim"))
    return [fit(line, room), *([fit(second, room)] if second else [])]


_NAME, _NUMBER, _NUMBER_SMALL, _SOURCE_LEAST = 20, 12, 9, 14


def _placed(room: int) -> tuple[Columns[Compared, FigureStyle], int]:
    """The figures that fit, and the cells left of the source."""
    number = _NUMBER if room >= 78 else _NUMBER_SMALL
    columns = place(figures(number), max(number, room - _NAME))
    return columns, _NAME + used(columns)


def _heads(name: str, first: bool, room: int) -> Line:
    columns, start = _placed(room)
    line: list[Span] = [(left(f" {name}", _NAME), "strong")]
    if first:
        line += [*heads(columns), *([("   source", "dim")] if room - start >= _SOURCE_LEAST else [])]
    return fit(line, room)


def _row(row: Compared, unit: Unit, here: bool, phase: bool, top: bool, room: int, glyphs: Glyphs) -> Line:
    columns, start = _placed(room)
    glyph = " " if phase else glyphs.lines.get(row.line, " ") if row.line != "allocated" else "="
    strong = top or row.line == "allocated"
    role = "cursor" if here else "strong" if strong else "text"
    name = left(WORDS.get(row.line, row.line) if phase else label(row.line, _NAME - 6), _NAME - 6)
    line: list[Span] = [(f" {glyphs.now if here else ' '} ", "key"), (f"{glyph} ", line_role(row.line)), (name, role)]
    line.append((" ", ""))
    line += row_cells(columns, row, FigureStyle(unit, strong, "–" if glyphs.braille else "-"))
    if room - start >= _SOURCE_LEAST:
        line.append((f"   {row.source}", "dim"))
        if top:
            line.append((" · peak" if glyphs.braille else ", peak", "strong"))
    return fit(line, room)


_SOURCE = 25
"""Cells of the source, before a bar."""


def _bar(row: Compared, phase: bool, largest: int, left_over: int, room: int, glyphs: Glyphs) -> Line:
    """The part in both, then the excess of measured over estimate, or the missing part."""
    start = _placed(room)[1] + _SOURCE
    cells = min(40, room - start - 1)
    if cells < 12 or largest <= 0 or row.measured is None:
        return EMPTY
    expected = row.measured if row.estimate is None else row.estimate
    both, more, less = ("━", "╍", "┄") if glyphs.braille else ("=", "+", ".")
    inner, outer = sorted((round(row.measured * cells / largest), round(expected * cells / largest)))
    role = "line:allocated" if phase or row.line == "allocated" else line_role(row.line)
    beyond = (more, "warn") if row.measured > expected else (less, "dim")
    return ((" " * (start - (room - left_over)), ""), (both * inner, role), (beyond[0] * (outer - inner), beyond[1]))


def explanation(row: Compared) -> list[str]:
    """The selected line to the byte, and the source of its estimate."""
    if row.line == OTHER:
        return [
            f"other: estimate {exact(row.estimate)}, measured {exact(row.measured)}: what the lines above lack of "
            "allocated, because some of them have no estimate of their own"
        ]
    name = LABELS.get(row.line, row.line)
    said = [f"{name}: estimate {exact(row.estimate)}, measured {exact(row.measured)}"]
    if row.difference is not None:
        share = percent(abs(row.difference) / row.estimate) if row.difference and row.estimate else ""
        sign = "+" if row.difference > 0 else "−" if row.difference < 0 else ""
        said.append(f"difference {sign}{abs(row.difference):,} B" + (f" ({share} of the estimate)" if share else ""))
    return said + [f"{source}: {SOURCES[source]}" for source in row.source.split("+") if source in SOURCES]
