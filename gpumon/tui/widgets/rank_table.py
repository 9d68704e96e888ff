"""All ranks of the job in one table: where each stands, how high it peaks, how far it is from the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.message import Message

from gpumon.analysis.units import NOT_KNOWN, in_unit, pace, unit_for
from gpumon.analysis.verdict import verdict
from gpumon.tui.ink import Glyphs
from gpumon.tui.spans import Line, Span, cells, left, right
from gpumon.tui.view import View, device_name, newest_step
from gpumon.tui.widgets.panel import Panel


@dataclass(frozen=True, slots=True)
class RankRow:
    """One device of one rank."""

    source: str
    device: int | None
    rank: str
    pid: int
    name: str
    step: int | None
    speed: str
    peak: int | None
    phase: str
    reserved: int | None
    used: int | None
    status: str
    word: str
    spread: int | None = None  # from the median peak


def rank_rows(view: View) -> tuple[RankRow, ...]:
    rows: list[RankRow] = []
    for rank, report in zip(view.frame.ranks, view.reports, strict=False):
        number = str(rank.hello.rank) if rank.hello.rank is not None else "–"
        for d in report.devices or (None,):
            described = next((x for x in rank.hello.devices if d and x.index == d.device), None)
            word = verdict(d.forecast, d.capacity) if d and d.forecast else None
            rows.append(
                RankRow(
                    rank.source,
                    d.device if d else None,
                    number,
                    rank.hello.pid,
                    device_name(described),
                    newest_step(rank),
                    pace(report.steps_per_s),
                    d.peak.allocated if d and d.peak else None,
                    d.peak.phase if d and d.peak else "",
                    d.ledger.reserved if d and d.ledger else None,
                    d.device_used if d else None,
                    rank.status,
                    word or "",
                )
            )
    peaks = [r.peak for r in rows if r.peak is not None]
    if len(peaks) < 2:
        return tuple(rows)
    middle = round(median(peaks))
    return tuple(_with_spread(r, None if r.peak is None else r.peak - middle) for r in rows)


def _with_spread(row: RankRow, spread: int | None) -> RankRow:
    return replace(row, spread=spread)


class RankTable(Panel):
    """Ranks; the cursor's one opens on the Overview."""

    NAME = "Ranks"
    TERMS = ("step", "it/s", "peak", "spread", "reserved", "device")
    CALM = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False, id="ranks.up", tooltip="The rank above"),
        Binding("down,j", "move(1)", "Down", show=False, id="ranks.down", tooltip="The rank below"),
        Binding("enter", "open", "Open", id="ranks.open", tooltip="Show this rank on the Overview"),
    ]

    class Opened(Message):
        """The person wants to see this rank."""

        def __init__(self, source: str, device: int | None) -> None:
            super().__init__()
            self.source = source
            self.device = device

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._cursor = 0

    def pick(self, view: View) -> tuple[RankRow, ...]:
        return rank_rows(view)

    def draw(self, slice_: tuple[RankRow, ...], width: int, height: int, glyphs: Glyphs) -> list[Line]:
        self._cursor = max(0, min(self._cursor, len(slice_) - 1))
        return rank_lines(slice_, self._cursor, width, height, glyphs)

    def action_move(self, by: int) -> None:
        self._cursor += by
        self._redraw()

    def action_open(self) -> None:
        rows: tuple[RankRow, ...] = self._slice or ()
        if rows:
            row = rows[self._cursor]
            self.post_message(self.Opened(row.source, row.device))


_STATUS = {"live": "good", "silent": "bad", "ended": "warn"}


def rank_lines(rows: tuple[RankRow, ...], cursor: int, room: int, height: int, glyphs: Glyphs) -> list[Line]:
    unit = unit_for(*(v for r in rows for v in (r.peak, r.reserved, r.used)))
    columns: list[tuple[str, int, list[tuple[str, str]]]] = [
        ("rank", 6, [(r.rank, "strong") for r in rows]),
        (f"peak {unit.name}", 11, [(in_unit(r.peak, unit), "strong") for r in rows]),
        ("step", 10, [(f"{r.step:,}" if r.step is not None else NOT_KNOWN, "text") for r in rows]),
        ("spread", 9, [(in_unit(r.spread, unit, sign=True), "text") for r in rows]),
        ("peak in", 12, [(r.phase, "dim") for r in rows]),
        ("pace", 12, [(r.speed, "dim") for r in rows]),
        ("reserved", 10, [(in_unit(r.reserved, unit), "text") for r in rows]),
        ("device", 10, [(in_unit(r.used, unit), "text") for r in rows]),
        (
            "next",
            11,
            [(r.word, {"fits": "good", "tight": "warn", "oom-ahead": "bad"}.get(r.word, "dim")) for r in rows],
        ),
        ("on", 9, [(r.name, "dim") for r in rows]),
        ("pid", 9, [(str(r.pid), "dim") for r in rows]),
    ]
    left_over = room - 4 - 9
    shown = []
    for column in columns:
        if column[1] > left_over:
            break
        shown.append(column)
        left_over -= column[1]
    lines: list[Line] = [((f" Ranks ({len({r.source for r in rows})})", "title"),)]
    head: list[Span] = [("    ", ""), *((right(name, size), "dim") for name, size, _ in shown), ("  state", "dim")]
    lines.append(tuple(head))
    first = max(0, min(cursor - (height - 3) // 2, len(rows) - (height - 2)))
    for i in range(first, min(len(rows), first + height - 2)):
        r = rows[i]
        line: list[Span] = [(f" {glyphs.now if i == cursor else ' '}  ", "key")]
        for _, size, values in shown:
            text, role = values[i]
            line.append((right(text, size), "cursor" if i == cursor else role))
        glyph = {"live": glyphs.live, "silent": glyphs.silent, "ended": glyphs.ended}[r.status]
        line.append((f"  {left(f'{glyph} {r.status}', max(0, min(9, room - cells(''.join(t for t, _ in line)) - 2)))}",
                     _STATUS[r.status]))  # fmt: skip
        lines.append(tuple(line))
    return lines
