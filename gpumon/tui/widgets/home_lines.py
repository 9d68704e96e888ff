"""The Home page as text.

Columns are given up in this order as the terminal gets narrower: device, peak and capacity in figures, it/s, step,
headroom, the bar. The answer and the job's name always stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from gpumon.analysis.answer import parts
from gpumon.analysis.units import NOT_KNOWN, count, pace, size
from gpumon.tui.styles import Glyphs
from gpumon.tui.table import Column, Columns, R, heads, place, row_cells
from gpumon.tui.text_layout import EMPTY, Line, Span, fit
from gpumon.tui.widgets.answer_line import ROLES, answer_lines, state_glyph, stated
from gpumon.tui.widgets.device_bar import bar
from gpumon.tui.widgets.home_rows import HomePage, JobRow, ProcessRow

LEAD = 2
"""For the cursor; the cells of a column to the left begin with two blanks."""

BAR = 8
"""With it/s still in 80 columns."""

ANSWER = 22
"""At least so wide: state and rank, and the first words of what it is."""

HINT = "no agent: `gpumon run COMMAND` starts a training with one"

_DETAIL_ROWS = 4


def _job(row: JobRow, glyphs: Glyphs) -> tuple[str, str]:
    return row.label if row.head else f"  {row.label}", "strong"


def _bar(row: JobRow, glyphs: Glyphs) -> tuple[str | Line, str]:
    """This process's peak, what it has reserved beyond it, other memory in use, and free, of the capacity."""
    if row.ended or not row.capacity or row.peak is None:
        return "", "dim"
    held = max(row.peak, row.reserved or 0)
    used = max(held, row.used or 0)
    pieces = [
        ("allocated", row.peak),
        ("slack", held - row.peak),
        ("other_processes", used - held),
        ("free", max(0, row.capacity - used)),
    ]
    return bar(pieces, row.capacity, BAR, glyphs), ""


def _peak_of(row: JobRow, glyphs: Glyphs) -> tuple[str, str]:
    if row.peak is None:
        return "", "dim"
    of = f" of {size(row.capacity)}" if row.capacity else ""
    return f"{size(row.peak)}{of}", "text"


def _headroom(row: JobRow, glyphs: Glyphs) -> tuple[str, str]:
    if row.headroom is None:
        return (NOT_KNOWN if row.peak is not None and not row.ended else ""), "dim"
    return (f"<{size(row.headroom)}", "dim") if row.headroom_at_most else (size(row.headroom), "text")


def _answer(row: JobRow, glyphs: Glyphs) -> tuple[str, str]:
    head, what, _ = parts(row.answer)
    return f"{state_glyph(row.answer.state, glyphs)} {head}  {what}", ROLES[row.answer.state]


def columns(room: int) -> Sequence[Column[JobRow, Glyphs]]:
    """Those that fit; the answer is as wide as the others leave it."""
    made: tuple[Column[JobRow, Glyphs], ...] = (
        Column("job", "job", 16, 0, _job, to_left=True),
        Column("device", "device", 9, 7, lambda row, glyphs: (row.device_name, "dim"), to_left=True),
        Column("bar", "memory", BAR + 2, 2, _bar, to_left=True),
        Column("peak", "peak of capacity", 23, 6, _peak_of),
        Column("step", "step", 8, 4, lambda row, glyphs: ("" if row.step is None else count(row.step), "text")),
        Column("it/s", "it/s", 10, 5,
               lambda row, glyphs: (pace(row.steps_per_s) if row.steps_per_s else "", "dim")),
        Column("headroom", "headroom", 12, 3, _headroom),
        Column("answer", "answer", ANSWER, 1, _answer, to_left=True),
    )  # fmt: skip
    return _filling(made, "answer", room)


def _filling(made: Columns[R, Glyphs], name: str, room: int) -> Columns[R, Glyphs]:
    """Those that fit; the one of this name takes what is left of the row."""
    kept = place(made, room)
    spare = room - sum(column.width for column in kept)
    return [replace(each, width=each.width + spare) if each.name == name else each for each in kept]


def process_columns(room: int) -> Sequence[Column[ProcessRow, Glyphs]]:
    """The command takes the rest; the user is given up first."""
    made: tuple[Column[ProcessRow, Glyphs], ...] = (
        Column("gpu", "GPU", 5, 1, lambda row, glyphs: (row.gpu, "dim")),
        Column("pid", "pid", 9, 0, lambda row, glyphs: (str(row.pid), "strong")),
        Column("user", "user", 14, 4, lambda row, glyphs: (row.user, "dim"), to_left=True),
        Column("memory", "memory", 12, 2, lambda row, glyphs: (size(row.bytes), "text")),
        Column("command", "command", 12, 3, lambda row, glyphs: (row.command, "text"), to_left=True),
    )
    return _filling(made, "command", room)


class Drawn(msgspec.Struct, frozen=True):
    lines: list[Line]
    rows: tuple[int, ...]  # by line: the row that is drawn there, -1 for none
    space: int  # lines for rows


def home_lines(page: HomePage, at: int, room: int, height: int, glyphs: Glyphs, title: str = "title") -> Drawn:
    """Title and headings stay; below, all that fits around the row under the cursor, whose answer is in full below."""
    top = [_title(page, title)]
    entries = _entries(page, at, room, glyphs)
    if page.jobs:
        top.append(((" " * LEAD, ""), *heads(columns(room - LEAD))))
    detail = _detail(page, at, room, height, glyphs)
    space = max(1, height - len(top) - len(detail))
    first = next((y for y, (row, _) in enumerate(entries) if row == at), 0)
    last = max((y for y, (row, _) in enumerate(entries) if row == at), default=0)
    start = max(0, min(last - space + 1 if last >= space else 0, first))
    shown = entries[start : start + space]
    filler: list[Line] = [EMPTY] * (space - len(shown)) if detail else []
    lines = [fit(line, room) for line in (*top, *(line for _, line in shown), *filler, *detail)]
    return Drawn(
        lines,
        (*([-1] * len(top)), *(row for row, _ in shown)),
        space,
    )


def _title(page: HomePage, role: str) -> Line:
    running = len({row.job for row in page.jobs if not row.ended})
    ended = len({row.job for row in page.jobs}) - running
    words = f"{running} {'job runs' if running == 1 else 'jobs run'}" if page.ready else "looking for jobs"
    if ended:
        words += f", {ended} ended"
    if page.processes:
        words += f"; {len(page.processes)} GPU process{'' if len(page.processes) == 1 else 'es'} without an agent"
    return ((" Jobs", role), (f"  {words}", "dim"))


def _entries(page: HomePage, at: int, room: int, glyphs: Glyphs) -> list[tuple[int, Line]]:
    """Each line, with its row."""
    made: list[tuple[int, Line]] = []
    kept = columns(room - LEAD)
    for index, row in enumerate(page.jobs):
        cells = _greyed(row_cells(kept, row, glyphs), row) if row.ended else row_cells(kept, row, glyphs)
        made.append((index, (*_lead(index == at, glyphs), *_marked(cells, index == at))))
        if row.head and row.about:
            made.append((index, ((" " * (LEAD + 4), ""), (row.about, "dim"))))
    if page.ready and not page.jobs:
        made.append((-1, ((" no job with an agent runs here: start one with `gpumon run train.py`", "dim"),)))
    if not page.driver:
        return made
    made += [(-1, EMPTY), (-1, ((" GPU processes without an agent", "strong"),))]
    if page.processes:
        others = process_columns(room - LEAD)
        made.append((-1, ((" " * LEAD, ""), *heads(others))))
        for index, process in enumerate(page.processes, len(page.jobs)):
            cells = row_cells(others, process, glyphs)
            made.append((index, (*_lead(index == at, glyphs), *_marked(cells, index == at))))
        made.append((-1, ((f"   {HINT}", "dim"),)))
    elif not page.hidden:
        made.append((-1, (("   none", "dim"),)))
    made += [(-1, ((f"   {text}", "dim"),)) for text in page.hidden]
    return made


def _lead(here: bool, glyphs: Glyphs) -> tuple[Span, ...]:
    return ((f" {glyphs.now if here else ' '}", "key"),)


def _marked(cells: Sequence[Span], here: bool) -> list[Span]:
    """The first cell as the cursor."""
    (text, role), *rest = cells or [("", "")]
    return [(text, "cursor" if here else role), *rest]


def _greyed(cells: Sequence[Span], row: JobRow) -> list[Span]:
    """All but the answer, which is last."""
    return [*((text, "dim") for text, _ in cells[:-1]), cells[-1]] if row.head else [(text, "dim") for text, _ in cells]


def _detail(page: HomePage, at: int, room: int, height: int, glyphs: Glyphs) -> list[Line]:
    """The selected job's answer in full: what, where, and what to do."""
    if at >= len(page.jobs) or height < 12:
        return []
    rows = _DETAIL_ROWS if height >= 20 else 2
    return [((glyphs.rule * room, "rule"),), *answer_lines(stated(page.jobs[at].answer), room, rows, glyphs)]
