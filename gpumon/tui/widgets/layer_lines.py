"""Rows of the module tree as text: columns that fit, shares as bars, details of the selected module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpumon.analysis.layers import FIGURES, LayerBytes, LayerNode, Tree
from gpumon.analysis.units import Unit, count, in_unit, percent, size, unit_for
from gpumon.tui.styles import Glyphs, line_role
from gpumon.tui.table import Column, column_at, heads, mark, place, row_cells, used
from gpumon.tui.text_layout import Line, Span, cells, clip, fit, left, spread, width
from gpumon.tui.widgets.device_bar import bar
from gpumon.tui.widgets.layer_rows import ORDERS, OUTSIDE, LayerRow, LayerView, Rows

HEADS = 2
"""Lines above the rows: the title, the columns."""

ROOM_FOR_MOMENT = 110
"""Width from which the title also says when activations were read; the explain page always does."""

FOOT = 2
"""Lines below the rows: the selected module."""

_NAME = 26
_WIDEST = 14  # one column is always shown


@dataclass(frozen=True, slots=True)
class LayersData:
    trees: tuple[Tree, ...]
    device: int | None


@dataclass(frozen=True, slots=True)
class _Scale:
    """What all rows share: the unit, the longest bar, the total bytes."""

    unit: Unit
    largest: int
    whole: int
    flat: bool
    glyphs: Glyphs

    @property
    def none(self) -> Span:
        return ("–" if self.glyphs.braille else "-", "dim")


def _bytes(name: str) -> Callable[[LayerRow, _Scale], Span]:
    def cell(row: LayerRow, scale: _Scale) -> Span:
        value = getattr(row.figures, name)
        if value is None:
            return scale.none
        return (in_unit(value, scale.unit), "strong" if name == "total" else "text") if value else ("0", "dim")

    return cell


def _parameters(row: LayerRow, scale: _Scale) -> Span:
    return (count(row.parameters), "text") if row.parameters else scale.none


def _share(row: LayerRow, scale: _Scale) -> Span:
    return (percent(row.figures.total / scale.whole), "dim") if scale.whole else scale.none


def _bar(row: LayerRow, scale: _Scale) -> tuple[Line, str]:
    """No bar for an open row: it sums those below."""
    shown = [(each, value) for each in FIGURES if (value := getattr(row.figures, each))]
    return () if row.open and not scale.flat else tuple(bar(shown, scale.largest, 11, scale.glyphs)), ""


COLUMNS: tuple[Column[LayerRow, _Scale], ...] = (
    Column("parameters", "parameters", 14, 5, _parameters),
    Column("weights", "weights", 10, 1, _bytes("weights")),
    Column("buffers", "buffers", 9, 7, _bytes("buffers")),
    Column("gradients", "gradients", 10, 3, _bytes("gradients")),
    Column("optimizer", "optimizer", 10, 2, _bytes("optimizer")),
    Column("activations", "activations", 13, 1, _bytes("activations")),
    Column("total", "total", 10, 0, _bytes("total")),
    Column("share", "share", 8, 4, _share),
    Column("bar", "", 14, 4, _bar),
    Column("kind", "kind", 20, 6, lambda row, scale: (row.layer.kind or "", "dim"), to_left=True),
)


def _placed(room: int, order: str) -> tuple[int, Sequence[Column[LayerRow, _Scale]]]:
    """Width of the name, and the columns that fit beside it."""
    columns = place(COLUMNS, max(_WIDEST, room - _NAME), order)
    return max(1, room - used(columns)), columns


def order_at(x: int, room: int, order: str) -> str | None:
    """The order selected by a click on the headings; left of all columns: the model's order."""
    name, columns = _placed(room, order)
    found = "model" if x < name else column_at(columns, x - name)
    return found if found is None or found in ORDERS else "total"


def layer_lines(
    layers: LayersData, rows: Rows, choice: LayerView, cursor: int, top: int, room: int, height: int, glyphs: Glyphs
) -> list[Line]:
    if not rows.rows and not choice.wanted:
        return [((" Layers", "title"),), (("   known once a model is watched", "dim"),)]
    # an open row is the sum of those below, so it counts for neither bars nor unit
    parts = [row for row in rows.rows if not row.open or choice.flat]
    largest = max((row.figures.total for row in parts), default=0)
    unit = unit_for(largest // 8)  # most modules are far smaller than the largest
    whole = sum(tree.root.whole.total + (tree.elsewhere or 0) for tree in layers.trees)
    scale = _Scale(unit, largest, whole, choice.flat, glyphs)
    name, columns = _placed(room, choice.order)
    sign = mark(glyphs, choice.upwards)
    first = (_name_head(name, choice, unit, sign), "dim")
    head = fit([first, *heads(columns, choice.order, sign)], room)
    lines = [_title(layers, rows, choice, room, glyphs), head]
    foot = FOOT if height >= 12 else 0
    for at in range(top, min(len(rows.rows), top + max(1, height - HEADS - foot))):
        row = rows.rows[at]
        figures = row_cells(columns, row, scale, None if row.matched else "dim")
        lines.append(fit([*_named(row, name, choice, at == cursor, glyphs), *figures], room))
    if foot and cursor < len(rows.rows):
        lines += [((" ", ""),)] * (height - foot - len(lines))
        lines += _foot(rows.rows[cursor], room, glyphs)
    return lines


def _title(layers: LayersData, rows: Rows, choice: LayerView, room: int, glyphs: Glyphs) -> Line:
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


def _name_head(room: int, choice: LayerView, unit: Unit, sign: str) -> str:
    name = f"   {unit.name}, each by itself" if choice.flat else f"   {unit.name}, with what is below"
    return left(f"{clip(name, room - 2)} {sign if choice.order == 'model' else ''}", room)


def _named(row: LayerRow, room: int, choice: LayerView, here: bool, glyphs: Glyphs) -> list[Span]:
    layer = row.layer
    opens, closed = ("▾", "▸") if glyphs.braille else ("-", "+")
    sign = " " if row.leaf or choice.flat else opens if row.open else closed
    lead = f" {'' if choice.flat else '  ' * min(row.depth, 12)}{sign} "
    tied = f" = {layer.shared_with or 'the root'}" if layer.shared_with is not None else ""
    room = max(1, room - len(lead) - 1)
    in_full = choice.flat and layer.path not in ("", OUTSIDE)
    name = _tail(layer.path, room) if in_full else clip(layer.name, room)
    tied = clip(tied, room - cells(name))
    blank = " " * (room + 1 - cells(name) - cells(tied))
    return [(lead, "dim"), (name, "cursor" if here else "text" if row.matched else "dim"), (tied, "warn"), (blank, "")]


def _tail(path: str, room: int) -> str:
    """A path cut at its beginning."""
    return path if len(path) <= room else "…" + path[len(path) - room + 1 :] if room > 1 else ""


def _foot(row: LayerRow, room: int, glyphs: Glyphs) -> list[Line]:
    layer = row.layer
    if layer.path == OUTSIDE:
        saved = layer.own.activations
        said = f"autograd saved {size(saved)} outside the model's modules: for the loss, for example"
        return [((" ", ""),), fit([(" outside its modules  ", "strong"), (said, "dim")], room)]
    kind = "the whole model" if not layer.path else layer.kind or "a container"
    first: list[Span] = [(f" {layer.path or layer.name}", "strong"), (f"  {kind}", "dim")]
    if layer.shared_with is not None:
        first.append((f"  shares its parameters with {layer.shared_with or 'the root'}, which counts them", "warn"))
    own = _own_in_words(layer, glyphs)
    if width(own) > room:  # drop the names if there is no room: the glyphs have the columns' colours
        own = [(text, role) for text, role in own if text.strip() not in FIGURES]
    return [fit(first, room), fit(own, room)]


def _own_in_words(layer: LayerNode, glyphs: Glyphs) -> list[Span]:
    line: list[Span] = [(" keeps itself  " if layer.children else " keeps  ", "dim")]
    if not layer.own.total:
        return [*line, ("nothing", "dim")]
    for name in FIGURES:
        value = getattr(layer.own, name)
        if value:
            line += [(f"{glyphs.lines[name]} ", line_role(name)), (f"{name} ", "dim"), (f"{size(value)}  ", "text")]
    return line


def explanation(row: LayerRow, tree: Tree) -> list[str]:
    layer = row.layer
    said = [f"{layer.path or layer.name} ({(layer.kind or 'a container') if layer.path else 'the whole model'})"]
    if layer.own.total:
        said.append(f"keeps itself {_sum_of(layer.own)}")
    if layer.children:
        said.append(f"with all modules below {_sum_of(layer.whole)}")
        said.append(f"{row.parameters:,} parameters, {layer.elements:,} of them its own")
    elif layer.elements:
        said.append(f"{layer.elements:,} parameters")
    if layer.shared_with is not None:
        said.append(f"its parameters are those of {layer.shared_with or 'the root'}, which counts them")
    if tree.step is None:
        said.append("gradients, state and activations are read on sampled steps; there is none yet")
    else:
        said.append(f"gradients and state at the end of step {tree.step:,}, activations at the end of its forward")
    return said


def _sum_of(figures: LayerBytes) -> str:
    known = [(name, value) for name in FIGURES if (value := getattr(figures, name))]
    return f"{figures.total:,} B = " + " + ".join(f"{name} {value:,}" for name, value in known)
