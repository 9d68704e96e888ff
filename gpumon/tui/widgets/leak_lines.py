"""Groups of live tensors that nobody owns, as lines: columns that fit, and who holds the chosen ones in words."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.census import ORDERS, Row
from gpumon.analysis.units import duration, size
from gpumon.tui.ink import Glyphs
from gpumon.tui.spans import EMPTY, Line, Span, clip, fit, left, right, spread, words
from gpumon_agent import wire

HEADS = 2
HOLDERS_SHOWN = 4

_COLUMNS = (
    # name, heading, cells, rank: the highest is given up first
    ("step", "bytes/step", 12, 4),
    ("grown", "grown", 8, 3),
    ("count", "tensors", 9, 0),
    ("bytes", "bytes", 11, 0),
    ("what", "shape, type", 24, 2),
    ("graph", "graph", 8, 5),
    ("where", "made at", 18, 3),
)
_HOLDER = 18


@dataclass(frozen=True, slots=True)
class Leaks:
    """What the table shows."""

    census: wire.Census | None
    rows: tuple[Row, ...]
    why_not: str | None = None  # nothing can be asked for
    key: str = "c"


def place(room: int, order: str) -> tuple[int, tuple[tuple[str, str, int], ...]]:
    """Cells of the holder; name, heading, cells of each column that fits."""
    left_over = room - _HOLDER - 2
    kept: set[str] = set()
    for name, _, wide, _ in sorted(_COLUMNS, key=lambda column: (column[0] != order, column[3])):
        if wide <= left_over:
            kept.add(name)
            left_over -= wide
    columns = tuple((name, heading, wide) for name, heading, wide, _ in _COLUMNS if name in kept)
    return max(1, room - 2 - sum(wide for _, _, wide in columns)), columns


def column_at(x: int, room: int, order: str) -> str | None:
    """The order that a click on a heading asks for."""
    at = 2
    for name, _, wide in place(room, order)[1]:
        at += wide
        if x < at:
            return name if name in ORDERS else None
    return None


def foot_height(rows: tuple[Row, ...], at: int, height: int) -> int:
    if height < 10 or not rows:
        return 0
    holders = min(HOLDERS_SHOWN, max(1, len(rows[at].group.holders)))
    return min(height - HEADS - 3, 2 + holders + bool(rows[at].group.cyclic))


def leak_lines(
    leaks: Leaks, order: str, cursor: int, top: int, room: int, height: int, glyphs: Glyphs, title: str
) -> list[Line]:
    head: list[Span] = [(" Tensors without an owner in the ledger", title)]
    census = leaks.census
    if census is None:
        return [fit(head, room), EMPTY, *_nothing(leaks, room)]
    looked = f"step {census.step:,}: {census.objects:,} objects, {duration(census.spent_ns / 1e9)} "
    lines = [spread([*head, (f"  {census.tensors:,} tensors, {size(census.bytes)}", "dim")], [(looked, "dim")], room)]
    if census.cut:
        lines.append(fit([(f" {census.why or 'not every object was seen'}", "dim")], room))
    if not leaks.rows:
        text = "None: weights, gradients, optimizer state, inputs and activations are all there is."
        return [*lines, EMPTY, *[((" ", ""), *line) for line in words(text, "dim", max(10, room - 2))]]
    wide, columns = place(room, order)
    lines.append(fit(_heads(wide, columns, order, glyphs), room))
    foot = foot_height(leaks.rows, cursor, height)
    last = min(len(leaks.rows), top + max(1, height - len(lines) - foot))
    lines += [fit(_row(leaks.rows[at], wide, columns, at == cursor, glyphs), room) for at in range(top, last)]
    if foot:
        lines += [EMPTY] * (height - foot - len(lines))
        lines += holders(leaks.rows[cursor], room, foot, glyphs)
    return lines


def _heads(wide: int, columns: tuple[tuple[str, str, int], ...], order: str, glyphs: Glyphs) -> list[Span]:
    mark = "▾" if glyphs.braille else "v"
    line: list[Span] = [("  ", "")]
    for name, heading, cells in columns:
        chosen = name == order
        text = f"{heading}{mark}" if chosen else heading
        written = f"  {left(text, cells - 2)}" if name in ("what", "where", "graph") else right(text, cells)
        line.append((written, "key" if chosen else "dim"))
    return [*line, (f"  {left('held by', max(1, wide - 2))}", "dim")]


def _row(row: Row, wide: int, columns: tuple[tuple[str, str, int], ...], here: bool, glyphs: Glyphs) -> list[Span]:
    g = row.group
    none = "–" if glyphs.braille else "-"
    line: list[Span] = [(f"{glyphs.now if here else ' '} ", "key")]
    for name, _, cells in columns:
        if name == "step":
            line.append((right(size(row.per_step, sign=True) if row.per_step else none, cells),
                         "strong" if row.per_step else "dim"))  # fmt: skip
        elif name == "grown":
            line.append((right(f"{g.grown:+,}" if g.grown else none, cells), "warn" if g.grown else "dim"))
        elif name == "count":
            line.append((right(f"{g.count:,}", cells), "text"))
        elif name == "bytes":
            line.append((right(size(g.bytes), cells), "strong"))
        elif name == "what":
            line.append((f"  {left(what(g), cells - 2)}", "text"))
        elif name == "graph":
            line.append((f"  {left('kept' if g.has_graph else none, cells - 2)}", "warn" if g.has_graph else "dim"))
        else:
            line.append((f"  {left(g.where or none, cells - 2)}", "dim"))
    name = g.holders[0].text if g.holders else "not found"
    more = f" +{len(g.holders) - 1}" if len(g.holders) > 1 else ""
    room = max(1, wide - 2 - len(more))
    role = "cursor" if here else "text" if g.holders else "dim"
    return [*line, ("  ", ""), (clip(name, room), role), (more, "dim")]


def what(group: wire.Group) -> str:
    """ "[8, 512] float32"; a scalar has no shape."""
    shape = f"[{', '.join(map(str, group.shape))}]" if group.shape else "scalar"
    return f"{shape} {group.dtype}"


def holders(row: Row, room: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Who keeps the group's tensors, one a line."""
    g = row.group
    first: list[Span] = [(f" {what(g)}", "strong")]
    if g.where:
        first.append((f"  made at {g.where}" + (f" in {g.phase}" if g.phase else ""), "dim"))
    if g.has_graph:
        beside = f", {size(g.graph_bytes)} beside them" if g.graph_bytes else ""
        first.append((f"  {'keeps' if g.count == 1 else 'each keeps'} its graph alive{beside}", "warn"))
    lines: list[Line] = [EMPTY, fit(first, room)]
    for holder in g.holders[:HOLDERS_SHOWN]:
        about = ", ".join(part for part in (holder.kind, holder.where) if part)
        count = f" · {holder.count:,} tensor{'s' * (holder.count != 1)}" if holder.count else ""
        lines.append(fit([("   held by ", "dim"), (holder.text, "key"), (f"  {about}{count}", "dim")], room))
    if not g.holders and g.cyclic < g.count:
        lines.append((("   who holds them was not found", "dim"),))
    if g.cyclic:
        text = f"   {g.cyclic:,} of them only by a reference cycle: the garbage collector will free them"
        lines.append(fit([(text, "dim")], room))
    return lines[:height]


def _nothing(leaks: Leaks, room: int) -> list[Line]:
    if leaks.why_not is not None:
        text = f"No census of live tensors was heard, and none can be asked for: {leaks.why_not}."
    else:
        text = (
            f"No census yet: press {leaks.key}. The agent then looks at the process's objects for tensors that no "
            "owner claims, and for who holds them; it may stop the training once, for at most 100 ms. It takes one by "
            "itself when something grows."
        )
    return [((" ", ""), *line) for line in words(text, "dim", max(10, room - 2))]


def explanation(row: Row, census: wire.Census) -> list[str]:
    """The group to the byte."""
    g = row.group
    said = [f"{g.count:,} tensor{'s' * (g.count != 1)} {what(g)}: {g.bytes:,} B of storages, each counted once"]
    if g.graph_bytes:
        said.append(f"saved by their graphs beside them: {g.graph_bytes:,} B")
    if row.per_step is not None and g.grown is not None:
        said.append(
            f"bytes/step {row.per_step:,} = grown {g.grown:,} × {row.total // g.count:,} B / steps between two censuses"
        )
    said += [f"{h.text}: {h.kind}{f', {h.where}' if h.where else ''}, {h.count:,} of them" for h in g.holders]
    said.append(
        f"census {census.number + 1:,}: {census.objects:,} objects in {census.slices:,} slices, {census.spent_ns:,} ns "
        f"of the training's time, steps {census.began_step:,} to {census.step:,}"
    )
    return said
