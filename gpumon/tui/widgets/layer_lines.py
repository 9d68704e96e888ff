"""Rows of the module tree as text: columns that fit, shares as bars, details of the selected module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from gpumon.analysis.layer_repeats import path_of
from gpumon.analysis.layers import FIGURES, LayerBytes, LayerNode, Tree
from gpumon.analysis.units import Unit, count, in_unit, percent, size, steps, unit_for
from gpumon.tui.styles import Glyphs, line_role
from gpumon.tui.table import Column, column_at, heads, mark, place, row_cells, used
from gpumon.tui.text_layout import Line, Span, cells, clip, fit, left, spread, width, words
from gpumon.tui.widgets.device_bar import bar
from gpumon.tui.widgets.layer_rows import ORDERS, OUTSIDE, LayerRow, LayerView, Rows

TALL = 16
"""From this height on, there is room for more than the title and the columns above the rows."""

MOST_ROWS = 3
"""Of the text that says when figures were read: at 60 columns. On a narrower screen only `e` says it."""

FOOT = 2
"""Lines below the rows: the selected module."""

_NAME = 26
_WIDEST = 14  # one column is always shown


class LayersData(msgspec.Struct, frozen=True):
    trees: tuple[Tree, ...]
    device: int | None
    step: int | None = None  # the newest closed one
    peak: int | None = None  # of the newest step with figures
    uncounted: str = ""  # why there is no peak
    most: str = ""  # where most of the memory is


class _Scale(msgspec.Struct, frozen=True):
    """What all rows share: the unit, the longest bar, the total bytes."""

    unit: Unit
    largest: int
    whole: int
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
    shown = [(each, value) for each in FIGURES if (value := getattr(row.figures, each))]
    return tuple(bar(shown, scale.largest, 11, scale.glyphs)), ""


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
    above = lines_above(layers, rows, choice, room, height, glyphs)
    if not rows.rows:
        return [*above, ((" No module has it in its path or kind. Esc shows all again.", "dim"),)]
    # an open row is the sum of those below, so it does not count for the unit
    parts = [row.figures.total for row in rows.rows if not row.open or choice.flat]
    unit = unit_for(max(parts, default=0) // 8)  # most modules are far smaller than the largest
    largest = max(row.figures.total for row in rows.rows)
    scale = _Scale(unit, largest, whole_of(layers.trees), glyphs)
    name, columns = _placed(room, choice.order)
    sign = mark(glyphs, choice.upwards)
    first = (_name_head(name, choice, unit, sign), "dim")
    head = fit([first, *heads(columns, choice.order, sign)], room)
    lines = [*above, head]
    foot = FOOT if height >= 12 else 0
    for at in range(top, min(len(rows.rows), top + max(1, height - len(lines) - foot))):
        row = rows.rows[at]
        figures = row_cells(columns, row, scale, None if row.matched else "dim")
        lines.append(fit([*_named(row, name, choice, at == cursor, glyphs), *figures], room))
    if foot and cursor < len(rows.rows):
        lines += [((" ", ""),)] * (height - foot - len(lines))
        lines += _foot(rows.rows[cursor], room, glyphs)
    return lines


def whole_of(trees: Sequence[Tree]) -> int:
    return sum(tree.root.whole.total + (tree.elsewhere or 0) for tree in trees)


def lines_above(
    layers: LayersData, rows: Rows, choice: LayerView, room: int, height: int, glyphs: Glyphs
) -> list[Line]:
    """Everything above the columns' names."""
    lines = [_title(layers, rows, choice, room, glyphs)]
    if height < TALL or not rows.rows:
        return lines
    if not choice.wanted:
        lines += [((" ", ""), *row) for row in words(_plain(layers.most, glyphs), "strong", room - 2)[:2]]
    moments = words(_plain(_moments(layers), glyphs), "dim", room - 2)
    return [*lines, *(((" ", ""), *row) for row in moments if len(moments) <= MOST_ROWS)]


def _plain(text: str, glyphs: Glyphs) -> str:
    """Without Unicode's signs where the terminal has none."""
    return text if glyphs.braille else text.replace("×", "x").replace("–", "-")


def _read_at(layers: LayersData) -> int | None:
    return max((tree.step for tree in layers.trees if tree.step is not None), default=None)


def _moments(layers: LayersData) -> str:
    """When the figures were read, and why their sum need not be the step's peak."""
    if _read_at(layers) is None:
        return "Gradients, optimizer state and activations are read on sampled steps: none was sampled yet."
    text = "Activations were read as forward ended, the rest as the step ended"
    if layers.uncounted:
        return f"{text}. No peak: {layers.uncounted}."
    text += ": never all there at once, so the total"
    whole, peak = whole_of(layers.trees), layers.peak
    if peak is None:
        return f"{text} can exceed the peak."
    if whole > peak:
        return f"{text} ({size(whole)}) exceeds the peak ({size(peak)})."
    return f"{text} can exceed the peak ({size(peak)})."


def _title(layers: LayersData, rows: Rows, choice: LayerView, room: int, glyphs: Glyphs) -> Line:
    start: list[Span] = [(" Layers", "title")]
    if choice.wanted:
        wanted = f"“{choice.wanted}”" if glyphs.braille else f'"{choice.wanted}"'
        start.append((f"  {rows.matches:,} of {rows.modules:,} modules have ", "dim"))
        start.append((wanted, "strong"))
        if not rows.matches:
            return fit(start, room)
        start.append((": together ", "dim"))
    else:
        start.append((f"  {rows.modules:,} modules, ", "dim"))
    start += [(f"{rows.parameters:,}", "text"), (" parameters, ", "dim"), (size(rows.total.total), "text")]
    read = _read_at(layers)
    if read is None:
        return spread(start, [("gradients, state, activations: not read yet ", "dim")], room)
    since = layers.step - read if layers.step is not None else 0
    ago = f", {steps(since)} ago" if since > 0 else ""
    end: list[Span] = [(f"read at step {read:,}{ago} ", "dim")]
    if width(start) + width(end) + 2 > room:
        end = [(f"read at step {read:,} ", "dim")]
    return spread(start, end, room)


def _name_head(room: int, choice: LayerView, unit: Unit, sign: str) -> str:
    names = [
        f"   {unit.name}, each by itself" if choice.flat else f"   {unit.name}, with what is below",
        f"   {unit.name}",
    ]
    name = next((text for text in names if len(text) <= room - 2), names[-1])
    return left(f"{clip(name, room - 2)} {sign if choice.order == 'model' else ''}", room)


def _named(row: LayerRow, room: int, choice: LayerView, here: bool, glyphs: Glyphs) -> list[Span]:
    layer = row.layer
    opens, closed = ("▾", "▸") if glyphs.braille else ("-", "+")
    sign = " " if row.leaf or choice.flat else opens if row.open else closed
    lead = f" {'' if choice.flat else '  ' * min(row.depth, 12)}{sign} "
    tied = f" = {layer.shared_with or 'the root'}" if layer.shared_with is not None else ""
    room = max(1, room - len(lead) - 1)
    in_full = choice.flat and layer.path not in ("", OUTSIDE)
    if row.repeats:
        return [(lead, "dim"), *_repeated(row, room, here, glyphs), (" ", "")]
    name = _tail(layer.path, room) if in_full else clip(layer.name, room)
    tied = clip(tied, room - cells(name))
    blank = " " * (room + 1 - cells(name) - cells(tied))
    return [(lead, "dim"), (name, "cursor" if here else "text" if row.matched else "dim"), (tied, "warn"), (blank, "")]


def _repeated(row: LayerRow, room: int, here: bool, glyphs: Glyphs) -> list[Span]:
    """ "0–15 × 16, 705.0 MiB each", or as much of it as fits."""
    name, count_ = _plain(row.layer.name, glyphs), len(row.repeats)
    each = size(row.repeats[0].whole.total)
    texts = [_plain(text, glyphs) for text in (f" × {count_}, {each} each", f": {count_} × {each}", f" × {count_}")]
    times = next((text for text in texts if cells(name + text) <= room), texts[-1])
    name = clip(name, max(1, room - cells(times)))
    blank = " " * max(0, room - cells(name + times))
    return [(name, "cursor" if here else "text"), (clip(times, room - cells(name)) + blank, "dim")]


def _tail(path: str, room: int) -> str:
    """A path cut at its beginning."""
    return path if len(path) <= room else "…" + path[len(path) - room + 1 :] if room > 1 else ""


def _foot(row: LayerRow, room: int, glyphs: Glyphs) -> list[Line]:
    layer = row.layer
    if layer.path == OUTSIDE:
        saved = layer.own.activations
        said = f"autograd saved {size(saved)} outside the model's modules: for the loss, for example"
        return [((" ", ""),), fit([(" outside its modules  ", "strong"), (said, "dim")], room)]
    if row.repeats:
        return _foot_of_repeats(row, room, glyphs)
    kind = "the whole model" if not layer.path else layer.kind or "a container"
    first: list[Span] = [(f" {layer.path or layer.name}", "strong"), (f"  {kind}", "dim")]
    if layer.shared_with is not None:
        first.append((f"  shares its parameters with {layer.shared_with or 'the root'}, which counts them", "warn"))
    own = _own_in_words(layer, glyphs)
    if width(own) > room:  # drop the names if there is no room: the glyphs have the columns' colours
        own = [(text, role) for text, role in own if text.strip() not in FIGURES]
    return [fit(first, room), fit(own, room)]


def _foot_of_repeats(row: LayerRow, room: int, glyphs: Glyphs) -> list[Line]:
    first = row.repeats[0]
    kind = f"{first.kind} " if first.kind else ""
    start = f"  {kind}× {len(row.repeats)}, {size(first.whole.total)} each, {size(row.figures.total)} together"
    each = [(" each  ", "dim"), *_figures_in_words(first.whole, glyphs)]
    if width(each) > room:
        each = [(text, role) for text, role in each if text.strip() not in FIGURES]
    name = _plain(path_of(row.repeats), glyphs)
    return [fit([(f" {name}", "strong"), (_plain(start, glyphs), "dim")], room), fit(each, room)]


def _own_in_words(layer: LayerNode, glyphs: Glyphs) -> list[Span]:
    lead: Span = (" keeps itself  " if layer.children else " keeps  ", "dim")
    return [lead, *_figures_in_words(layer.own, glyphs)] if layer.own.total else [lead, ("nothing", "dim")]


def _figures_in_words(figures: LayerBytes, glyphs: Glyphs) -> list[Span]:
    line: list[Span] = []
    for name in FIGURES:
        value = getattr(figures, name)
        if value:
            line += [(f"{glyphs.lines[name]} ", line_role(name)), (f"{name} ", "dim"), (f"{size(value)}  ", "text")]
    return line


def explanation(row: LayerRow, tree: Tree) -> list[str]:
    layer = row.layer
    if row.repeats:
        first, last = row.repeats[0], row.repeats[-1]
        said = [
            f"{first.path} to {last.path}: {len(row.repeats)} modules that agree to the digits shown, and so do all "
            "modules below them",
            f"together {_sum_of(layer.whole)}",
            f"{first.path} alone {_sum_of(first.whole)}",
            f"{row.parameters:,} parameters, {row.parameters // len(row.repeats):,} in each",
        ]
        return [*said, *_read_when(tree)]
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
    return [*said, *_read_when(tree)]


def _read_when(tree: Tree) -> list[str]:
    if tree.step is None:
        return ["gradients, state and activations are read on sampled steps; there is none yet"]
    return [
        f"gradients and state at the end of step {tree.step:,}, activations at the end of its forward: never all at "
        "once, so the total can exceed the step's peak"
    ]


def _sum_of(figures: LayerBytes) -> str:
    known = [(name, value) for name in FIGURES if (value := getattr(figures, name))]
    return f"{figures.total:,} B = " + " + ".join(f"{name} {value:,}" for name, value in known)
