"""The modules of a tree as rows: which are open, their order, and a filter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from gpumon.analysis.layer_repeats import OUTSIDE_NAME, joined, runs
from gpumon.analysis.layers import FIGURES, LayerBytes, LayerNode, Tree, together

Key = tuple[int, str]
"""(tree index, the module's path)"""

ORDERS = ("model", "parameters", *FIGURES, "total")
"""Sort orders of siblings: as in the model, or by a column, largest first."""

OUTSIDE = "\0outside"
"""Path of the row for activations of no module. Decoded names never contain NUL."""

REPEATS = "\0"
"""Ends the path of a row of repeats, which starts with the path of their first."""


class LayerRow(msgspec.Struct, frozen=True):
    """One module. `figures` includes everything below; in the flat list, only its own."""

    key: Key
    layer: LayerNode
    depth: int
    parameters: int
    figures: LayerBytes
    open: bool = False
    matched: bool = True

    @property
    def leaf(self) -> bool:
        return not self.layer.children

    @property
    def repeats(self) -> tuple[LayerNode, ...]:
        """The equal modules that this row stands for."""
        return self.layer.children if self.layer.path.endswith(REPEATS) else ()


class LayerView(msgspec.Struct, frozen=True):
    opened: frozenset[Key] = frozenset()
    order: str = "model"
    upwards: bool = False
    """Smallest first."""
    flat: bool = False
    wanted: str = ""
    """Part of a path or kind, case-insensitive."""


class Rows(msgspec.Struct, frozen=True):
    """The shown rows, and the sum of the modules that match, each byte once."""

    rows: tuple[LayerRow, ...]
    modules: int  # in all trees
    matches: int
    total: LayerBytes
    parameters: int


def rows_of(trees: Sequence[Tree], choice: LayerView) -> Rows:
    """Cost: O(modules) and the sort."""
    folds = not choice.flat and not choice.wanted
    roots = [_folded(_with_outside(tree)) if folds else _with_outside(tree) for tree in trees]
    counts: dict[Key, int] = {}
    for at, root in enumerate(roots):
        _count(root, at, counts)
    wanted = choice.wanted.casefold()
    matched = {
        (at, layer.path)
        for at, root in enumerate(roots)
        for layer in _walk(root)
        if not wanted or wanted in layer.path.casefold() or wanted in (layer.kind or "").casefold()
    }
    rows: list[LayerRow] = []
    tops: list[LayerRow] = []
    for at, root in enumerate(roots):
        if choice.flat:
            flat = [_own(at, layer) for layer in _walk(root) if layer.own.total or layer.elements]
            rows += sorted((row for row in flat if row.key in matched), key=_by(choice), reverse=_down(choice))
            tops = rows
        else:
            _grow(root, at, 0, choice, matched, counts, rows)
            tops += _topmost(root, at, matched, counts)
    return Rows(
        rows=tuple(rows),
        modules=sum(1 for _, path in counts if "\0" not in path),
        matches=sum(1 for _, path in matched if "\0" not in path),
        total=together([row.figures for row in tops]),
        parameters=sum(row.parameters for row in tops),
    )


def opened_at_first(trees: Sequence[Tree], room: int) -> frozenset[Key]:
    """Keys to open first: level by level, while there is room. Repeats stay one row."""
    roots = [_folded(tree.root) for tree in trees]
    opened: set[Key] = {(at, "") for at, root in enumerate(roots) if root.children}
    level = [(at, child) for at, root in enumerate(roots) for child in root.children]
    used = len(trees) + len(level)
    while level:
        opening = [(at, layer) for at, layer in level if layer.children and not layer.path.endswith(REPEATS)]
        below = [(at, child) for at, layer in opening for child in layer.children]
        if not below or used + len(below) > room:
            break
        opened |= {(at, layer.path) for at, layer in opening}
        used += len(below)
        level = below
    return frozenset(opened)


def all_keys(trees: Sequence[Tree]) -> frozenset[Key]:
    """Keys of all modules with children, and of repeats."""
    roots = [_folded(tree.root) for tree in trees]
    return frozenset((at, layer.path) for at, root in enumerate(roots) for layer in _walk(root) if layer.children)


def _walk(layer: LayerNode) -> Iterator[LayerNode]:
    yield layer
    for child in layer.children:
        yield from _walk(child)


def _count(layer: LayerNode, at: int, counts: dict[Key, int]) -> int:
    """Parameters including all below."""
    found = counts[at, layer.path] = layer.elements + sum(_count(child, at, counts) for child in layer.children)
    return found


def _with_outside(tree: Tree) -> LayerNode:
    """The root, with an extra child for activations outside all its modules."""
    if not tree.elsewhere:
        return tree.root
    figures = LayerBytes(activations=tree.elsewhere)
    outside = LayerNode(OUTSIDE, OUTSIDE_NAME, None, 0, figures, figures)
    root = tree.root
    whole = together([root.whole, figures])
    return LayerNode(root.path, root.name, root.kind, root.elements, root.own, whole, root.shared_with,
                 (*root.children, outside))  # fmt: skip


def _folded(layer: LayerNode) -> LayerNode:
    """The module with each run of repeats below it as one child."""
    if not layer.children:
        return layer
    below: list[LayerNode] = []
    for run in runs(layer.children):
        folded = [_folded(each) for each in run]
        below += folded if len(run) == 1 else [joined(folded, run[0].path + REPEATS)]
    return replace(layer, children=tuple(below))


def _grow(
    layer: LayerNode,
    at: int,
    depth: int,
    choice: LayerView,
    matched: Collection[Key],
    counts: dict[Key, int],
    rows: list[LayerRow],
) -> bool:
    """Adds rows of the module and those below; False if none match."""
    key = (at, layer.path)
    here = len(rows)
    opened = bool(layer.children) and (key in choice.opened or bool(choice.wanted))
    rows.append(_whole(at, layer, depth, counts, opened, matched=key in matched))
    below = False
    if opened:
        children = [_whole(at, child, depth + 1, counts) for child in layer.children]
        for child in sorted(children, key=_by(choice), reverse=_down(choice)):
            below |= _grow(child.layer, at, depth + 1, choice, matched, counts, rows)
    if key in matched or below:
        return True
    del rows[here:]
    return False


def _topmost(layer: LayerNode, at: int, matched: Collection[Key], counts: dict[Key, int]) -> list[LayerRow]:
    """The matching modules without a matching ancestor."""
    if (at, layer.path) in matched:
        return [_whole(at, layer, 0, counts)]
    return [row for child in layer.children for row in _topmost(child, at, matched, counts)]


def _whole(
    at: int, layer: LayerNode, depth: int, counts: dict[Key, int], opened: bool = False, matched: bool = True
) -> LayerRow:
    key = (at, layer.path)
    return LayerRow(key, layer, depth, counts.get(key, 0), layer.whole, opened, matched)


def _own(at: int, layer: LayerNode) -> LayerRow:
    return LayerRow((at, layer.path), layer, 0, layer.elements, layer.own)


def _by(choice: LayerView) -> Callable[[LayerRow], int]:
    order = choice.order
    if order == "model":
        return lambda row: 0
    if order == "parameters":
        return lambda row: row.parameters
    return lambda row: getattr(row.figures, order) or 0


def _down(choice: LayerView) -> bool:
    return (choice.order != "model") != choice.upwards
