"""The phases of the step: allocated at start, peak and end, the difference, the duration."""

from __future__ import annotations

import msgspec

from gpumon.analysis.phase_notes import notes
from gpumon.analysis.units import NOT_KNOWN, Unit, duration, in_unit, unit_for
from gpumon.session.frame import RankFrame, StepRecord
from gpumon.tui.plot import Curve, plot, steady
from gpumon.tui.styles import Glyphs
from gpumon.tui.table import Column, Columns, heads, place, row_cells, used
from gpumon.tui.text_layout import EMPTY, Line, Span, left, right
from gpumon.tui.view import View, newest_read
from gpumon.tui.widgets.panel import Panel
from gpumon_agent import wire

ROLLOUT_LEAST = 8
"""Graph-free forwards in training mode per step, from which on they are called a rollout."""

LONG_STEP_NS = 500_000_000
"""A slower step is shown while it runs, phase by phase; a faster one after it closed."""


WORDS = {wire.BETWEEN: "data"}
"""Phases whose name on screens differs from that in JSON."""

SHORT = {wire.FORWARD: "fwd", wire.BACKWARD: "bwd", wire.OPTIMIZER: "opt"}

CURVE_ROWS = 4
CURVE_CELLS = 40
"""The least room for the curve of a step."""


class PhaseRow(msgspec.Struct, frozen=True):
    """A phase, or several of one name folded into one."""

    phase: str
    index: int
    start: int | None
    peak: int | None
    end: int | None
    duration_ns: int
    flags: int
    count: int = 1
    past: bool = False  # of the previous step

    @property
    def delta(self) -> int | None:
        return None if self.start is None or self.end is None else self.end - self.start

    @property
    def notes(self) -> str:
        return notes(self.flags)


class PhasesData(msgspec.Struct, frozen=True):
    step: int | None
    running: bool
    rows: tuple[PhaseRow, ...]
    live: str | None
    live_s: int | None  # whole seconds in the live phase, if it is long
    every: int = 1  # about one step in so many is read
    batch: tuple[tuple[int, ...], ...] = ()  # shapes of its inputs


def rows_of(record: StepRecord, before: StepRecord | None, device: int) -> list[PhaseRow]:
    """The step's phases; the first starts where the previous step ended."""
    previous = before.on(device) if before else ()
    start = previous[-1].allocated if previous else None
    rows: list[PhaseRow] = []
    newest: dict[str, int] = {}
    for p in record.on(device):
        count = p.index - newest.get(p.phase, -1) if p.flags & wire.MERGED else 1
        newest[p.phase] = p.index
        rows.append(PhaseRow(p.phase, p.index, start, p.allocated_peak, p.allocated, p.duration_ns, p.flags, count))
        start = p.allocated
    return rows


def phases(view: View) -> PhasesData:
    rank, device = view.rank, view.index
    if rank is None or device is None:
        return PhasesData(None, False, (), None, None)
    at = newest_read(rank, device)
    closed = rank.steps[at] if rank.steps else None
    before = rank.steps[at - 1] if len(rank.steps) > -at else None
    every = rank.heartbeat.sample_every if rank.heartbeat and (_rested(closed) or _rested(before)) else 1
    if _rested(closed):
        before = None  # it is not the step before this one
    rows = rows_of(closed, before, device) if closed else []
    step, running = (closed.step if closed else None), False
    open_ = rank.open_step
    slow = closed is None or closed.closed is None or closed.closed.duration_ns > LONG_STEP_NS
    if open_ is not None and slow:
        new = rows_of(open_, closed, device)
        seen = {(r.phase, r.index) for r in new}
        rest = [_past(r) for r in rows if (r.phase, r.index) not in seen]
        rows, step, running = new + rest, open_.step, True
    live, live_s = _live(rank, view.frame.unix_ns) if view.now is None else (None, None)
    batch = closed.closed.input_shapes if closed is not None and closed.closed is not None and not running else ()
    return PhasesData(step, running, tuple(rows), live, live_s, every, batch)


def _rested(record: StepRecord | None) -> bool:
    return record is not None and record.closed is not None and record.closed.quiet > 0


def _past(row: PhaseRow) -> PhaseRow:
    return PhaseRow(
        row.phase, row.index, row.start, row.peak, row.end, row.duration_ns, row.flags, row.count, past=True
    )


def _live(rank: RankFrame, now_unix_ns: int) -> tuple[str | None, int | None]:
    beat = rank.heartbeat
    if beat is None or rank.status == "ended":
        return None, None
    since = (now_unix_ns - rank.unix_ns(beat.t_ns) + beat.phase_age_ns) / 1e9
    return beat.phase, int(since) if since >= 2 and beat.phase_age_ns > 1_500_000_000 else None


def fold(rows: tuple[PhaseRow, ...]) -> tuple[PhaseRow, ...]:
    """One row per phase name: start of the first, highest peak, end of the last, sum of the durations."""
    by_name: dict[str, list[PhaseRow]] = {}
    for row in rows:
        by_name.setdefault(row.phase, []).append(row)
    folded: list[PhaseRow] = []
    for name, group in by_name.items():
        peaks = [r.peak for r in group if r.peak is not None]
        flags = 0
        for r in group:
            flags |= r.flags
        folded.append(
            PhaseRow(
                name,
                0,
                group[0].start,
                max(peaks) if peaks else None,
                group[-1].end,
                sum(r.duration_ns for r in group),
                flags,
                sum(r.count for r in group),
                all(r.past for r in group),
            )
        )
    return tuple(folded)


class PhaseTable(Panel):
    """Phases of the newest step, or of the past one that is shown; the live one is marked."""

    NAME = "Phases"
    TERMS = ("phase", "start", "peak", "end", "Δ", "time", "allocated", "step")

    def pick(self, view: View) -> PhasesData:
        return phases(view)

    def draw(self, slice_: PhasesData, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        return phase_lines(slice_, width, height, glyphs, self.title_role)


_NUMBER = 8


class _Written(msgspec.Struct, frozen=True):
    unit: Unit
    role: str
    highest: bool
    glyphs: Glyphs

    def figure(self, value: int | None, role: str = "", lead: str = "", *, sign: bool = False) -> Span:
        return (NOT_KNOWN, "dim") if value is None else (lead + in_unit(value, self.unit, sign=sign), role or self.role)


def _peak(row: PhaseRow, how: _Written) -> Span:
    bound = "≤" if row.flags & wire.BOUND and how.glyphs.braille else ""
    return how.figure(row.peak, "strong" if how.highest else "", bound)


def _columns(glyphs: Glyphs) -> Columns[PhaseRow, _Written]:
    return (
        Column("start", "start", _NUMBER, 3, lambda row, how: how.figure(row.start)),
        Column("peak", "peak", _NUMBER, 1, _peak),
        Column("end", "end", _NUMBER, 2, lambda row, how: how.figure(row.end)),
        Column("delta", "Δ" if glyphs.braille else "diff", _NUMBER, 4,
               lambda row, how: how.figure(row.delta, sign=True)),
        Column("time", "time", _NUMBER, 5, lambda row, how: (duration(row.duration_ns / 1e9), "dim")),
    )  # fmt: skip


def phase_lines(p: PhasesData, room: int, height: int, glyphs: Glyphs, title: str) -> list[Line]:
    rows = p.rows if len(p.rows) <= height - 2 else fold(p.rows)
    unit = unit_for(*(v for r in rows for v in (r.start, r.peak, r.end)))
    name_room = max([11, *(len(_name(r, rows)) + 3 for r in rows)])
    name_room = min(name_room, max(8, room - 3 * _NUMBER))
    columns = place(_columns(glyphs), max(_NUMBER, room - name_room - 1))
    where = f"step {p.step:,}{' …' if p.running and glyphs.braille else ''}" if p.step is not None else ""
    head: list[Span] = [
        (left(f" Phases {unit.name if any(r.end is not None for r in rows) else ''}", name_room), title)
    ]
    head += heads(columns)
    lines: list[Line] = [tuple(head)]
    if not rows:
        doing = f" {glyphs.now} {WORDS.get(p.live, p.live)}" if p.live else " none closed yet"
        return [((" Phases", title),), ((doing, "text" if p.live else "dim"),)]
    highest = max((r.peak for r in rows if r.peak is not None and not r.past), default=None)
    known = {r.phase for r in rows}
    lines += [_row(r, rows, p, unit, name_room, columns, highest, room, glyphs) for r in rows]
    if p.live and p.live not in known:
        since = f" for {p.live_s} s" if p.live_s else ""
        lines.append(((f" {glyphs.now} ", "good"), (WORDS.get(p.live, p.live), "strong"), (f" now{since}", "dim")))
    if len(lines) < height and where:
        long = f" · {WORDS.get(p.live, p.live)} for {p.live_s} s" if p.live_s and p.live in known else ""
        batch = f" · batch {' '.join(str(list(shape)) for shape in p.batch)}" if p.batch else ""
        seldom = f" · one step in {p.every:,} is read, to save time" if p.every > 1 else ""
        said = f"   {where}{long}{batch}"
        lines.append(((said + seldom if len(said + seldom) <= room else said, "dim"),))
    measured = [r for r in p.rows if r.peak is not None and r.end is not None and not r.past]
    space = height - len(lines) - 1
    if measured and space >= CURVE_ROWS and room >= CURVE_CELLS and not p.running:
        lines += [EMPTY, *_curve(measured, room, space, unit, glyphs)]
    return lines


def _curve(rows: list[PhaseRow], room: int, height: int, unit: Unit, glyphs: Glyphs) -> list[Line]:
    """Allocated bytes over the step: each phase's start, peak and end, as wide as the phase is long."""
    axis = 9
    cells = room - axis - 1
    least = min(6, cells // len(rows))
    spare = cells - least * len(rows)
    whole = sum(row.duration_ns for row in rows) or 1
    widths = [least + spare * row.duration_ns // whole for row in rows]
    values: list[int | None] = []
    for row, width in zip(rows, widths, strict=True):
        start = row.end if row.start is None else row.start
        values += _between([start or 0, row.peak or 0, row.end or 0], 2 * width)
    known = [value for value in values if value is not None]
    top = max(known) or 1
    drawn = plot(
        [Curve("line:allocated", tuple(values), area=not steady(known))],
        top,
        cells,
        height - 1,
        braille=glyphs.braille,
        ceiling=None,
    )
    edge, bare = ("┤", "│") if glyphs.braille else ("|", "|")
    lines: list[Line] = []
    for at, drawn_row in enumerate(drawn):
        text = {0: in_unit(top, unit), height - 2: "0"}.get(at, "")
        lines.append(((right(text, axis - 1), "dim"), (edge if text else bare, "rule"), *drawn_row))
    names = "".join(left(bare + _word(row.phase, width - 1), width) for row, width in zip(rows, widths, strict=True))
    lines.append(((" " * axis, ""), (names, "dim")))
    return lines


def _word(phase: str, room: int) -> str:
    """The phase's name, or its short form."""
    name = WORDS.get(phase, phase)
    return name if len(name) <= room else SHORT.get(phase, name)[:room]


def _between(through: list[int], count: int) -> list[int | None]:
    """`count` values along straight lines from the first to the second in the middle, and on to the third."""
    start, peak, end = through
    half = max(1, count // 2)
    rise = [start + (peak - start) * at // half for at in range(half)]
    fall = [peak + (end - peak) * at // max(1, count - half - 1) for at in range(count - half)]
    return [*rise, *fall]


def _name(row: PhaseRow, rows: tuple[PhaseRow, ...]) -> str:
    if row.phase == wire.EVAL and row.flags & wire.TRAINS and row.count >= ROLLOUT_LEAST:
        return f"rollout ×{row.count}"
    name = WORDS.get(row.phase, row.phase)
    several = sum(1 for r in rows if r.phase == row.phase) > 1
    return f"{name} {row.index + 1}" if several else f"{name} ×{row.count}" if row.count > 1 else name


def _row(
    r: PhaseRow,
    rows: tuple[PhaseRow, ...],
    p: PhasesData,
    unit: Unit,
    name_room: int,
    columns: Columns[PhaseRow, _Written],
    highest: int | None,
    room: int,
    glyphs: Glyphs,
) -> Line:
    live = p.live == r.phase and (r.index == max(x.index for x in rows if x.phase == r.phase))
    role = "dim" if r.past else "text"
    line: list[Span] = [(f" {glyphs.now if live else ' '} ", "good")]
    line.append((left(_name(r, rows), name_room - 3), "strong" if live else role))
    line += row_cells(columns, r, _Written(unit, role, r.peak == highest and not r.past, glyphs))
    if r.notes and room - name_room - used(columns) > 6:
        line.append((f"  {r.notes}", "warn" if r.flags & (wire.ABORTED | wire.OVERLAPPED) else "dim"))
    return tuple(line)
