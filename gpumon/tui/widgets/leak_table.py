"""The newest census: columns that fit, a cursor, and the holders of the selected group."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar

import msgspec
from textual.binding import Binding, BindingType

from gpumon.analysis.census import ORDERS, CensusRow, rows_of
from gpumon.analysis.units import duration, size
from gpumon.tui.styles import Glyphs
from gpumon.tui.table import Column, TablePanel, column_at, heads, mark, moves, next_of, place, row_cells, used
from gpumon.tui.text_layout import EMPTY, Line, Span, clip, fit, left, spread, words
from gpumon.tui.view import View
from gpumon_agent import wire

HEADS = 2
HOLDERS_SHOWN = 4
_HOLDER = 18


def _none(glyphs: Glyphs) -> Span:
    return ("–" if glyphs.braille else "-", "dim")


COLUMNS: tuple[Column[CensusRow, Glyphs], ...] = (
    Column("step", "bytes/step", 12, 4,
           lambda row, glyphs: (size(row.per_step, sign=True), "strong") if row.per_step else _none(glyphs)),
    Column("grown", "grown", 8, 3,
           lambda row, glyphs: (f"{row.group.grown:+,}", "warn") if row.group.grown else _none(glyphs)),
    Column("count", "tensors", 9, 0, lambda row, glyphs: (f"{row.group.count:,}", "text")),
    Column("bytes", "bytes", 11, 0, lambda row, glyphs: (size(row.group.bytes), "strong")),
    Column("what", "shape, type", 24, 2, lambda row, glyphs: (what(row.group), "text"), to_left=True),
    Column("graph", "graph", 8, 5,
           lambda row, glyphs: ("kept", "warn") if row.group.has_graph else _none(glyphs), to_left=True),
    Column("where", "made at", 18, 3,
           lambda row, glyphs: (row.group.where, "dim") if row.group.where else _none(glyphs), to_left=True),
)  # fmt: skip


class Leaks(msgspec.Struct, frozen=True):
    census: wire.Census | None
    rows: tuple[CensusRow, ...]
    why_not: str | None = None  # why no census can be requested
    key: str = "c"


class LeakTable(TablePanel):
    NAME = "Held tensors"
    TERMS = ("census", "tensors", "grown", "bytes/step", "graph", "held by", "made at", "unexplained")
    BINDINGS: ClassVar[list[BindingType]] = [
        *moves("leaks", "group"),
        Binding("o", "order(1)", "Sort", id="leaks.order", tooltip="Sort by the next column, the largest first"),
        Binding("O", "order(-1)", "Sort back", show=False, id="leaks.order_back", tooltip="Sort by the column before"),
    ]

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.order = ORDERS[0]
        self._seen: View | None = None

    def pick(self, view: View) -> Leaks:
        self._seen = view
        rank = view.rank
        if rank is None or rank.census is None:
            return Leaks(None, (), view.cannot_ask)
        before = rank.censuses[-2] if len(rank.censuses) > 1 else None
        rows = rows_of(rank.census, before, view.index, self.order)
        return Leaks(rank.census, rows, view.cannot_ask)

    @property
    def _rows(self) -> tuple[CensusRow, ...]:
        slice_: Leaks | None = self._slice
        return slice_.rows if slice_ is not None else ()

    def keys(self) -> Sequence[Hashable]:
        return [row.key for row in self._rows]

    @property
    def here(self) -> CensusRow | None:
        rows = self._rows
        return rows[self._at] if self._at < len(rows) else None

    def draw(self, slice_: Leaks, width: int, height: int, glyphs: Glyphs) -> list[Line]:
        first_y = HEADS + bool(slice_.census and slice_.census.cut)
        self.find_row()
        self.scroll(height - first_y - foot_height(slice_.rows, self._at, height), first_y)
        return leak_lines(slice_, self.order, self._at, self._top, width, height, glyphs, self.title_role)

    def sums(self) -> list[str]:
        here, slice_ = self.here, self._slice
        return explanation(here, slice_.census) if here is not None else []

    def action_order(self, by: int) -> None:
        self.sort(next_of(ORDERS, self.order, by))

    def heading_at(self, x: int) -> str | None:
        return order_at(x, self.size.width, self.order)

    def sort(self, order: str) -> None:
        self.order = order
        self.from_top()
        if self._seen is not None:
            self.show(self._seen)
            self._redraw()


def _placed(room: int, order: str) -> Sequence[Column[CensusRow, Glyphs]]:
    return place(COLUMNS, room - _HOLDER - 2, order)


def order_at(x: int, room: int, order: str) -> str | None:
    """The order selected by a click on a heading."""
    name = column_at(_placed(room, order), x - 2)
    return name if name in ORDERS else None


def foot_height(rows: tuple[CensusRow, ...], at: int, height: int) -> int:
    if height < 10 or not rows:
        return 0
    holders = min(HOLDERS_SHOWN, max(1, len(rows[at].group.holders)))
    return min(height - HEADS - 3, 2 + holders + bool(rows[at].group.cyclic))


def leak_lines(
    leaks: Leaks, order: str, cursor: int, top: int, room: int, height: int, glyphs: Glyphs, title: str
) -> list[Line]:
    head: list[Span] = [(" Tensors without a known owner", title)]
    census = leaks.census
    if census is None:
        return [fit(head, room), EMPTY, *_nothing(leaks, room)]
    looked = f"step {census.step:,}: {census.objects:,} objects, {duration(census.spent_ns / 1e9)} "
    lines = [spread([*head, (f"  {census.tensors:,} tensors, {size(census.bytes)}", "dim")], [(looked, "dim")], room)]
    if census.cut:
        lines.append(fit([(f" {census.why or 'not every object was visited'}", "dim")], room))
    if not leaks.rows:
        text = "None: every live tensor belongs to weights, gradients, optimizer state, inputs or activations."
        return [*lines, EMPTY, *[((" ", ""), *line) for line in words(text, "dim", max(10, room - 2))]]
    columns = _placed(room, order)
    wide = max(1, room - 2 - used(columns))
    held = f"  {left('held by', max(1, wide - 2))}"
    lines.append(fit([("  ", ""), *heads(columns, order, mark(glyphs)), (held, "dim")], room))
    foot = foot_height(leaks.rows, cursor, height)
    last = min(len(leaks.rows), top + max(1, height - len(lines) - foot))
    lines += [fit(_row(leaks.rows[at], wide, columns, at == cursor, glyphs), room) for at in range(top, last)]
    if foot:
        lines += [EMPTY] * (height - foot - len(lines))
        lines += holders(leaks.rows[cursor], room, foot, glyphs)
    return lines


def _row(
    row: CensusRow, wide: int, columns: Sequence[Column[CensusRow, Glyphs]], here: bool, glyphs: Glyphs
) -> list[Span]:
    g = row.group
    name = g.holders[0].text if g.holders else "not found"
    more = f" +{len(g.holders) - 1}" if len(g.holders) > 1 else ""
    role = "cursor" if here else "text" if g.holders else "dim"
    line = [(f"{glyphs.now if here else ' '} ", "key"), *row_cells(columns, row, glyphs)]
    return [*line, ("  ", ""), (clip(name, max(1, wide - 2 - len(more))), role), (more, "dim")]


def what(group: wire.Group) -> str:
    """ "[8, 512] float32"; a scalar has no shape."""
    shape = f"[{', '.join(map(str, group.shape))}]" if group.shape else "scalar"
    return f"{shape} {group.dtype}"


def holders(row: CensusRow, room: int, height: int, glyphs: Glyphs) -> list[Line]:
    """The group's holders, one per line."""
    g = row.group
    first: list[Span] = [(f" {what(g)}", "strong")]
    if g.where:
        first.append((f"  made at {g.where}" + (f" in {g.phase}" if g.phase else ""), "dim"))
    if g.has_graph:
        beside = f", {size(g.graph_bytes)} more" if g.graph_bytes else ""
        first.append((f"  {'keeps' if g.count == 1 else 'each keeps'} its graph alive{beside}", "warn"))
    lines: list[Line] = [EMPTY, fit(first, room)]
    for holder in g.holders[:HOLDERS_SHOWN]:
        about = ", ".join(part for part in (holder.kind, holder.where) if part)
        count = f" · {holder.count:,} tensor{'s' * (holder.count != 1)}" if holder.count else ""
        lines.append(fit([("   held by ", "dim"), (holder.text, "key"), (f"  {about}{count}", "dim")], room))
    if not g.holders and g.cyclic < g.count:
        lines.append((("   no holder was found", "dim"),))
    if g.cyclic:
        text = f"   {g.cyclic:,} of them only by a reference cycle: the garbage collector will free them"
        lines.append(fit([(text, "dim")], room))
    return lines[:height]


def _nothing(leaks: Leaks, room: int) -> list[Line]:
    if leaks.why_not is not None:
        text = f"There is no census of live tensors, and none can be requested: {leaks.why_not}."
    else:
        text = (
            f"No census yet: press {leaks.key}. The agent then searches the process's objects for tensors without "
            "a known owner, and for what holds them; this may pause the training once, for at most 100 ms. When "
            "something grows, it takes a census without a request."
        )
    return [((" ", ""), *line) for line in words(text, "dim", max(10, room - 2))]


def explanation(row: CensusRow, census: wire.Census) -> list[str]:
    g = row.group
    said = [f"{g.count:,} tensor{'s' * (g.count != 1)} {what(g)}: {g.bytes:,} B of storages, each counted once"]
    if g.graph_bytes:
        said.append(f"saved by their graphs in addition: {g.graph_bytes:,} B")
    if row.per_step is not None and g.grown is not None:
        said.append(
            f"bytes/step {row.per_step:,} = grown {g.grown:,} × {row.total // g.count:,} B / steps between two censuses"
        )
    said += [f"{h.text}: {h.kind}{f', {h.where}' if h.where else ''}, {h.count:,} of them" for h in g.holders]
    said.append(
        f"census {census.number + 1:,}: {census.objects:,} objects in {census.slices:,} slices, {census.spent_ns:,} ns "
        f"of training time, steps {census.began_step:,} to {census.step:,}"
    )
    return said
