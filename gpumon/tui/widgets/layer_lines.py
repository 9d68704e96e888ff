"""The rows of the module tree as lines: columns that fit, shares as bars, the chosen module in words."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.layers import FIGURES, Figures, Layer, Tree
from gpumon.analysis.units import Unit, count, in_unit, percent, size, unit_for
from gpumon.tui.ink import Glyphs, line_role
from gpumon.tui.spans import Line, Span, cells, clip, fit, left, right, spread, width
from gpumon.tui.widgets.device_bar import bar
from gpumon.tui.widgets.layer_rows import ORDERS, OUTSIDE, Choice, Row, Rows

HEADS = 2
"""Lines above the rows: the title, the columns."""

ROOM_FOR_MOMENT = 110
"""Cells from which on the title has room for the moment that activations were read at; the explanation says it too."""

FOOT = 2
"""Lines below them: the chosen module in words."""

_COLUMNS = (
    # figure, heading, cells, rank: the highest is given up first
    ("parameters", "parameters", 14, 5),
    ("weights", "weights", 10, 1),
    ("buffers", "buffers", 9, 7),
    ("gradients", "gradients", 10, 3),
    ("optimizer", "optimizer", 10, 2),
    ("activations", "activations", 13, 1),
    ("total", "total", 10, 0),
    ("share", "share", 8, 4),
    ("bar", "", 14, 4),
    ("kind", "kind", 20, 6),
)
_NAME = 26


@dataclass(frozen=True, slots=True)
class Layers:
    """What the table shows."""

    trees: tuple[Tree, ...]
    device: int | None


@dataclass(frozen=True, slots=True)
class _Place:
    """Cells of the name; name, heading and cells of every column that has room."""

    name: int
    columns: tuple[tuple[str, str, int], ...]


def place(room: int, order: str) -> _Place:
    """The sorted column always, then by rank; the name gets what is left."""
    left_over = room - _NAME
    kept: set[str] = set()
    for name, _, wide, _ in sorted(_COLUMNS, key=lambda column: (column[0] != order, column[3])):
        if wide > left_over and kept:
            break
        kept.add(name)
        left_over -= wide
    columns = tuple((name, heading, wide) for name, heading, wide, _ in _COLUMNS if name in kept)
    return _Place(max(1, room - sum(wide for _, _, wide in columns)), columns)


def column_at(x: int, room: int, order: str) -> str | None:
    """By what a click at a cell of the headings sorts; left of all columns stands the model's order."""
    p = place(room, order)
    at = p.name
    if x < at:
        return "model"
    for name, _, wide in p.columns:
        at += wide
        if x < at:
            return name if name in ORDERS else "total"
    return None


def layer_lines(
    layers: Layers, rows: Rows, choice: Choice, cursor: int, top: int, room: int, height: int, glyphs: Glyphs
) -> list[Line]:
    if not rows.rows and not choice.wanted:
        return [((" Layers", "title"),), (("   known once a model is watched", "dim"),)]
    # a row that is open is the sum of those below it: bars and the unit go by what is not
    parts = [row for row in rows.rows if not row.open or choice.flat]
    largest = max((row.figures.total for row in parts), default=0)
    unit = unit_for(largest // 8)  # most modules are far smaller than the largest
    whole = sum(tree.root.whole.total + (tree.elsewhere or 0) for tree in layers.trees)
    p = place(room, choice.order)
    lines = [_title(layers, rows, choice, room, glyphs), fit(_heads(p, choice, unit, glyphs), room)]
    foot = FOOT if height >= 12 else 0
    for at in range(top, min(len(rows.rows), top + max(1, height - HEADS - foot))):
        row = rows.rows[at]
        lines.append(fit(_row(row, p, choice, unit, largest, whole, at == cursor, glyphs), room))
    if foot and cursor < len(rows.rows):
        lines += [((" ", ""),)] * (height - foot - len(lines))
        lines += _foot(rows.rows[cursor], room, glyphs)
    return lines


def _title(layers: Layers, rows: Rows, choice: Choice, room: int, glyphs: Glyphs) -> Line:
    start: list[Span] = [(" Layers", "title")]
    if choice.wanted:
        start.append((f"  {rows.matches:,} of {rows.modules:,} modules have ", "dim"))
        start.append((f"“{choice.wanted}”" if glyphs.braille else f'"{choice.wanted}"', "strong"))
        start.append((": together ", "dim"))
    else:
        start.append((f"  {rows.modules:,} modules, ", "dim"))
    start += [(f"{rows.parameters:,}", "text"), (" parameters, ", "dim"), (size(rows.total.total), "text")]
    steps = [tree.step for tree in layers.trees if tree.step is not None]
    read = (
        f"read at step {max(steps):,}{', activations as its forward ended' if room >= ROOM_FOR_MOMENT else ''} "
        if steps
        else "gradients, state, activations: not read yet "
    )
    return spread(start, [(read, "dim")], room)


def _heads(p: _Place, choice: Choice, unit: Unit, glyphs: Glyphs) -> Line:
    mark = ("▴" if choice.upwards else "▾") if glyphs.braille else ("^" if choice.upwards else "v")
    name = f"   {unit.name}, each by itself" if choice.flat else f"   {unit.name}, with what is below"
    chosen = choice.order == "model"
    line: list[Span] = [(left(f"{clip(name, p.name - 2)} {mark if chosen else ''}", p.name), "dim")]
    for column, heading, wide in p.columns:
        chosen = column == choice.order
        text = f"{heading}{mark}" if chosen else heading
        written = f"  {left(text, wide - 2)}" if column == "kind" else right(text, wide)
        line.append((written, "key" if chosen else "dim"))
    return tuple(line)


def _row(row: Row, p: _Place, choice: Choice, unit: Unit, largest: int, whole: int, here: bool, glyphs: Glyphs) -> Line:
    layer = row.layer
    opens, closed = ("▾", "▸") if glyphs.braille else ("-", "+")
    sign = " " if row.leaf or choice.flat else opens if row.open else closed
    lead = f" {'' if choice.flat else '  ' * min(row.depth, 12)}{sign} "
    tied = f" = {layer.shared_with or 'the root'}" if layer.shared_with is not None else ""
    room = max(1, p.name - len(lead) - 1)
    in_full = choice.flat and layer.path not in ("", OUTSIDE)
    name = _tail(layer.path, room) if in_full else clip(layer.name, room)
    tied = clip(tied, room - cells(name))
    blank = " " * (room + 1 - cells(name) - cells(tied))
    role = "cursor" if here else "text" if row.matched else "dim"
    line: list[Span] = [(lead, "dim"), (name, role), (tied, "warn"), (blank, "")]
    for column, _, wide in p.columns:
        if column == "kind":
            line.append((f"  {left(layer.kind or '', wide - 2)}", "dim"))
        elif column == "bar":
            shown = [(each, value) for each in FIGURES if (value := getattr(row.figures, each))]
            drawn = bar(shown, largest, wide - 3, glyphs) if not row.open or choice.flat else ()
            line += [("  ", ""), *drawn, (" " * (wide - 2 - width(drawn)), "")]
        else:
            text, said = _figure(row, column, unit, whole, glyphs)
            line.append((right(text, wide), said if row.matched else "dim"))
    return tuple(line)


def _figure(row: Row, column: str, unit: Unit, whole: int, glyphs: Glyphs) -> tuple[str, str]:
    """As it is written, and its role."""
    none = "–" if glyphs.braille else "-"
    if column == "parameters":
        return (count(row.parameters), "text") if row.parameters else (none, "dim")
    if column == "share":
        return (percent(row.figures.total / whole) if whole else none, "dim")
    value = getattr(row.figures, column)
    if value is None:
        return none, "dim"
    return (in_unit(value, unit), "strong" if column == "total" else "text") if value else ("0", "dim")


def _tail(path: str, room: int) -> str:
    """A path's end says more than its beginning."""
    return path if len(path) <= room else "…" + path[len(path) - room + 1 :] if room > 1 else ""


def _foot(row: Row, room: int, glyphs: Glyphs) -> list[Line]:
    layer = row.layer
    if layer.path == OUTSIDE:
        saved = layer.own.activations
        said = f"autograd saved {size(saved)} for no module of the model: for the loss, say"
        return [((" ", ""),), fit([(" outside its modules  ", "strong"), (said, "dim")], room)]
    kind = "the whole model" if not layer.path else layer.kind or "a container"
    first: list[Span] = [(f" {layer.path or layer.name}", "strong"), (f"  {kind}", "dim")]
    if layer.shared_with is not None:
        first.append(
            (f"  shares its parameters with {layer.shared_with or 'the root'}, where they are counted", "warn")
        )
    own = _own_in_words(layer, glyphs)
    if width(own) > room:  # signs without names: the columns above have the same colours
        own = [(text, role) for text, role in own if text.strip() not in FIGURES]
    return [fit(first, room), fit(own, room)]


def _own_in_words(layer: Layer, glyphs: Glyphs) -> list[Span]:
    line: list[Span] = [(" keeps itself  " if layer.children else " keeps  ", "dim")]
    if not layer.own.total:
        return [*line, ("nothing", "dim")]
    for name in FIGURES:
        value = getattr(layer.own, name)
        if value:
            line += [(f"{glyphs.lines[name]} ", line_role(name)), (f"{name} ", "dim"), (f"{size(value)}  ", "text")]
    return line


def explanation(row: Row, tree: Tree) -> list[str]:
    """The row's figures to the byte."""
    layer = row.layer
    said = [f"{layer.path or layer.name} ({(layer.kind or 'a container') if layer.path else 'the whole model'})"]
    if layer.own.total:
        said.append(f"keeps itself {_sum_of(layer.own)}")
    if layer.children:
        said.append(f"with everything below {_sum_of(layer.whole)}")
        said.append(f"{row.parameters:,} parameters, {layer.elements:,} of them its own")
    elif layer.elements:
        said.append(f"{layer.elements:,} parameters")
    if layer.shared_with is not None:
        said.append(f"its parameters are those of {layer.shared_with or 'the root'}, and counted there")
    if tree.step is None:
        said.append("gradients, state and activations are read on sampled steps; there was none yet")
    else:
        said.append(f"gradients and state as step {tree.step:,} ended, activations as its forward ended")
    return said


def _sum_of(figures: Figures) -> str:
    known = [(name, value) for name in FIGURES if (value := getattr(figures, name))]
    return f"{figures.total:,} B = " + " + ".join(f"{name} {value:,}" for name, value in known)
