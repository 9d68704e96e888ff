"""The Ranks page as text: a table with a heat strip below, or a grid of short cells for many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import msgspec

from gpumon.analysis.job import spread
from gpumon.analysis.units import NOT_KNOWN, Unit, duration, exact, in_unit, percent, ranges, size, unit_for
from gpumon.tui.styles import Glyphs
from gpumon.tui.table import Column, heads, place, row_cells, used
from gpumon.tui.text_layout import Line, Span, clip, fit, flow, left, width
from gpumon.tui.view import MANY
from gpumon.tui.widgets.device_bar import bar
from gpumon.tui.widgets.rank_heat import strips
from gpumon.tui.widgets.rank_rows import RankPage, RankRow, reading, trouble

CELL = 39
"""Width of a rank in the grid."""

_READABLE = 8
_STATE_WIDTH = 12
_LEAD = 2
_STATES = {
    "live": "good", "late": "warn", "silent": "bad", "finished": "dim", "left": "dim", "missing": "bad",
    "failed": "bad", "killed": "bad", "dead": "bad",
}  # fmt: skip
_WORDS = {"fits": "good", "tight": "warn", "oom-ahead": "bad"}


def _far(value: int | None, unit: Unit) -> str:
    """In the common unit, or in its own if that makes too long a number."""
    text = in_unit(value, unit)
    return text if len(text) <= _READABLE else size(value)


class Style(msgspec.Struct, frozen=True):
    unit: Unit
    glyphs: Glyphs


def _headroom(row: RankRow, style: Style) -> tuple[str, str]:
    """A bound (the driver's free memory is unknown) is dim with a sign."""
    text = _far(row.headroom, style.unit)
    return (f"<{text}", "dim") if row.headroom_at_most else (text, "text")


_BAR = 14
"""Cells of a peak's bar. At 80 columns rank, state, answer, peak, bar and spread fit."""


def _of_capacity(row: RankRow, style: Style) -> tuple[Line, str]:
    """The peak as a part of the device's total."""
    if row.peak is None or not row.capacity:
        return (), ""
    free = max(0, row.capacity - row.peak)
    return tuple(bar([("allocated", row.peak), ("free", free)], row.capacity, _BAR, style.glyphs)), ""


def answer_of(row: RankRow) -> tuple[str, str]:
    """The gravest finding and how many more there are; without one whether the next step fits."""
    if not row.findings:
        return row.word, _WORDS.get(row.word, "dim")
    more = f" +{row.findings - 1}" if row.findings > 1 else ""
    return f"{clip(row.worst, _ANSWER - 2 - len(more))}{more}", "bad" if row.critical else "warn"


_ANSWER = 20
"""Wide enough for a finding's code."""

COLUMNS: tuple[Column[RankRow, Style], ...] = (
    Column("rank", "rank", 5, 0, lambda row, style: (row.label, "strong")),
    Column("device", "device", 7, 13, lambda row, style: (row.name or "", "dim")),
    Column("step", "step", 8, 3, lambda row, style: (NOT_KNOWN if row.step is None else f"{row.step:,}", "text")),
    Column("peak in", "peak in", 10, 4, lambda row, style: (row.phase, "dim")),
    Column("peak", "peak", 8, 1, lambda row, style: (in_unit(row.peak, style.unit), "strong")),
    Column("of capacity", "of capacity", _BAR + 2, 1, _of_capacity),
    Column("spread", "spread", 8, 2, lambda row, style: (in_unit(row.spread, style.unit, sign=True), "text")),
    Column("reserved", "reserved", 9, 8, lambda row, style: (in_unit(row.reserved, style.unit), "text")),
    Column("slack", "cached", 7, 10, lambda row, style: (in_unit(row.slack, style.unit), "text")),
    Column("buckets", "buckets", 8, 11, lambda row, style: (in_unit(row.buckets, style.unit), "dim")),
    Column("headroom", "headroom", 10, 5, _headroom),
    Column("next", "next", 10, 12, lambda row, style: (row.word, _WORDS.get(row.word, "dim"))),
    Column("s/step", "s/step", 7, 9, lambda row, style: (duration(row.step_s), "dim")),
    Column("findings", "answer", _ANSWER, 0, lambda row, style: answer_of(row), to_left=True),
    Column("pid", "pid", 8, 14, lambda row, style: (NOT_KNOWN if row.pid is None else str(row.pid), "dim")),
    Column("host", "host", 12, 15, lambda row, style: (row.host, "dim")),
)  # fmt: skip
UNHEARD = (COLUMNS[0],)
"""The columns of a rank that was never heard."""


class Drawn(msgspec.Struct, frozen=True):
    """The lines, rows per grid column (1 in a table), and for a table the row of each line."""

    lines: list[Line]
    stride: int = 1
    rows: tuple[int, ...] = ()


def rank_lines(page: RankPage, cursor: int, room: int, height: int, glyphs: Glyphs) -> Drawn:
    unit = unit_for(*(value for row in page.rows for value in (row.peak, row.reserved, row.buckets)))
    top = summary(page, unit, room)[: max(1, min(4, height // 6))]
    entries = _entries(page)
    if len(entries) + len(top) + 1 <= height or room < 2 * CELL:
        return _table(page, entries, top, cursor, unit, room, height, glyphs)
    return _grid(page, entries, top, cursor, unit, room, height, glyphs)


def summary(page: RankPage, unit: Unit, room: int) -> list[Line]:
    """Facts about the job: median, worst, skew, missing ranks; buckets and shards."""
    heard = len({row.source for row in page.rows if row.source})
    world = page.job.world_size
    title = (
        f" Ranks ({heard} of {world}, {unit.name})" if world and world != heard else f" Ranks ({heard}, {unit.name})"
    )
    items: list[Line] = [((title, "title"),)]
    apart = spread(row.peak for row in page.rows)
    if apart is not None:
        worst = page.rows[apart.at]
        items.append(
            (
                (f"peak median {size(round(apart.median))}, worst {size(apart.worst)}", "text"),
                (f" (rank {worst.label}, {percent(apart.skew)} above)", "text" if apart.skew < 0.1 else "warn"),
            )
        )
    if page.job.missing:
        items.append(((f"missing: {ranges(page.job.missing)}", "bad"),))
    for word, role in (("dead", "bad"), ("killed", "bad"), ("failed", "bad"), ("silent", "bad"), ("late", "warn")):
        found = [row.rank for row in page.rows if row.state == word and row.rank is not None]
        if found:
            items.append(((f"{word}: {ranges(found)}", role),))
    if page.job.elsewhere:
        items.append(((f"{page.job.elsewhere} on other machines", "dim"),))
    lines = flow([*items, *(((text, "dim"),) for text in page.sentences)], room, indent=1)
    return [fit(line, room) for line in lines]


Entry = tuple[str, int]
"""A node's heading ("node 0 · host", -1), or ("", index of a row)."""


def _entries(page: RankPage) -> list[Entry]:
    grouped = page.order == "rank" and len({row.node for row in page.rows}) > 1
    entries: list[Entry] = []
    node = None
    for at, row in enumerate(page.rows):
        if grouped and row.node != node:
            node = row.node
            entries.append((node, -1))
        entries.append(("", at))
    return entries


def _heading(page: RankPage, node: str, unit: Unit) -> Line:
    of_node = [row for row in page.rows if row.node == node]
    apart = spread(row.peak for row in of_node)
    worst = f"  worst {in_unit(apart.worst, unit)}, rank {of_node[apart.at].label}" if apart else ""
    return ((f" {node}", "title"), (worst, "dim"))


# ---------------------------------------------------------------------------------------------------------------- table


def _table(
    page: RankPage, entries: list[Entry], top: list[Line], cursor: int, unit: Unit, room: int, height: int,
    glyphs: Glyphs,
) -> Drawn:  # fmt: skip
    shown = place(COLUMNS, room - _LEAD - _STATE_WIDTH)
    head = [(" " * _LEAD, ""), *heads(shown, page.order), ("  state", "dim")]
    lines = [*top, fit(head, room)]
    space = max(1, height - len(lines))
    at = next((i for i, (_, index) in enumerate(entries) if index == cursor), 0)
    first = max(0, min(at - space // 2, len(entries) - space))
    for node, index in entries[first : first + space]:
        if index < 0:
            lines.append(fit(_heading(page, node, unit), room))
        else:
            lines.append(_line(page.rows[index], index == cursor, shown, unit, room, glyphs))
    if len(lines) < height and cursor < len(page.rows) and (said := trouble(page.rows[cursor])):
        row = page.rows[cursor]
        lines.append(fit(((f"  rank {row.label}: ", _STATES[row.state]), (said, "text")), room))
    lines += _heat(page, room, height - len(lines), glyphs)
    shown_rows = (*[-1] * (len(top) + 1), *(index for _, index in entries[first : first + space]))
    return Drawn(lines, rows=shown_rows)


def _line(
    row: RankRow, here: bool, shown: Sequence[Column[RankRow, Style]], unit: Unit, room: int, glyphs: Glyphs
) -> Line:
    line: list[Span] = [(f"{glyphs.now if here else ' '} ", "key")]
    line += row_cells(shown if row.source else UNHEARD, row, Style(unit, glyphs), "cursor" if here else None)
    line.append((" " * (_LEAD + used(shown) - width(line)), ""))
    state = left(_state(row, glyphs), max(0, min(_STATE_WIDTH, room - width(line)) - 2))
    return (*line, (f"  {state}", _STATES[row.state]))


def _state(row: RankRow, glyphs: Glyphs) -> str:
    again = f" {'↻' if glyphs.braille else 'r'}{row.restarts}" if row.restarts else ""
    return f"{_glyph(row, glyphs)} {reading(row)}{again}"


def _glyph(row: RankRow, glyphs: Glyphs) -> str:
    known = {"live": glyphs.live, "late": glyphs.warning, "silent": glyphs.silent, "finished": glyphs.gone}
    return known.get(row.state, "?" if row.state == "missing" else glyphs.ended)


def _heat(page: RankPage, room: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Below the table, if there is room for every rank."""
    if not page.heat or height < len(page.heat) + 2 or len(page.heat) > MANY:
        return []
    label = max(len(row.label) for row in page.rows) + 7
    drawn = strips(page.heat, room - label - 1, glyphs)
    last = page.first_step + len(page.heat[0]) - 1
    steps = min(len(page.heat[0]), room - label - 1)
    highest = max((value for row in page.heat for value in row[-steps:] if value is not None), default=0)
    title = f" Peak by rank and step, {last - steps + 1:,} to {last:,}"
    lines: list[Line] = [(), fit(((title, "title"), (f": heights from 0 to {size(highest)}", "dim")), room)]
    for row, strip in zip(page.rows, drawn, strict=True):
        lines.append(((left(f" rank {row.label}", label), "dim"), *strip))
    return lines


# ----------------------------------------------------------------------------------------------------------------- grid


def _grid(
    page: RankPage, entries: list[Entry], top: list[Line], cursor: int, unit: Unit, room: int, height: int,
    glyphs: Glyphs,
) -> Drawn:  # fmt: skip
    """Cells top to bottom, then left to right; scrolls if there are too many."""
    count = room // CELL
    strip_room = CELL - 30
    heat = strips(page.heat, strip_room, glyphs) if page.heat else [()] * len(page.rows)
    space = max(1, height - len(top) - 2)
    per_column = min(max(1, ceil(len(entries) / count)), space)
    pages = ceil(len(entries) / (per_column * count))
    at = next((i for i, (_, index) in enumerate(entries) if index == cursor), 0)
    start = min(at // (per_column * count), pages - 1) * per_column * count
    head = [(left(_cell_head(strip_room), CELL), "dim")] * count
    if page.order != "rank" or page.reverse:  # no column of it need be in sight
        order = f"   by {page.order}{', reversed' if page.reverse else ''}"
        top = [fit((*top[0], (order, "key")), room), *top[1:]]
    lines = [*top, tuple(head)]
    for y in range(per_column):
        line: list[Span] = []
        for x in range(count):
            here = start + x * per_column + y
            if here < len(entries):
                node, index = entries[here]
                cell = (
                    fit(_heading(page, node, unit), CELL - 1)
                    if index < 0
                    else _cell(page.rows[index], heat[index], index == cursor, unit, glyphs)
                )
                line += [*cell, (" " * (CELL - width(cell)), "")]
        lines.append(tuple(line))
    if cursor < len(page.rows):
        lines.append(fit(_detail(page.rows[cursor], unit, glyphs), room))
    return Drawn(lines, per_column)


def _cell_head(strip_room: int) -> str:
    return f"  rank   {'peak':>8}{'spread':>8}  {left('steps', strip_room)}"


def _cell(row: RankRow, strip: Line, here: bool, unit: Unit, glyphs: Glyphs) -> Line:
    warned = (glyphs.warning if row.findings else " ", "bad" if row.critical else "warn")
    lead: tuple[Span, ...] = (
        (glyphs.now if here else " ", "key"),
        (f"{row.label:>5}", "cursor" if here else "strong"),
        (f" {_glyph(row, glyphs)} ", _STATES[row.state]),
    )
    if row.peak is None:
        return (*lead, (left(f" {reading(row)}", 16), _STATES[row.state]))
    far = "text" if row.spread is None or row.spread < 0.1 * row.peak else "bad"
    return (
        *lead,
        (f"{in_unit(row.peak, unit):>8}", "cursor" if here else _WORDS.get(row.word, "text")),
        (f"{in_unit(row.spread, unit, sign=True):>8}", far),
        ("  ", ""),
        *strip,
        warned,
    )


def _detail(row: RankRow, unit: Unit, glyphs: Glyphs) -> Sequence[Span]:
    """All the table's columns for the selected row."""
    parts: list[Span] = [(f" rank {row.label} ", "title"), (_state(row, glyphs), _STATES[row.state])]
    if said := trouble(row):
        parts.append((f"  {said}", "text"))
    if row.source is None:
        return parts
    for column in COLUMNS[1:]:
        text, role = column.cell(row, Style(unit, glyphs))
        if isinstance(text, str) and text not in ("", NOT_KNOWN) and column.name not in ("peak", "spread"):
            parts += [(f"  {column.heading} ", "dim"), (text, role)]
    return parts


def explanation(row: RankRow) -> list[str]:
    """The selected rank to the byte."""
    if row.peak is None:
        return []
    said = [f"rank {row.label}: peak {exact(row.peak)}"]
    if row.capacity:
        said[0] += f" of the device's {exact(row.capacity)} ({percent(row.peak / row.capacity)}): the bar's filled part"
    if row.spread is not None:
        said.append(f"spread {exact(row.spread)}: this peak minus the median of all ranks' peaks")
    said.append("answer: the gravest open finding (its code; +2: two more), or whether the next step fits")
    said.append("peak by rank and step: a sign's height is its share of the highest peak shown, from 0")
    return said
