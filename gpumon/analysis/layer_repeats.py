"""Equal modules in a row as one (blocks.0–15), and the part of the model that has most of its memory.

Model. Siblings are repeats if their names are a common text and consecutive numbers, and if kind, submodules, number of
parameters and every figure agree as they are written: three digits. What is added up is exact.

Cost: O(modules) for a tree.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from gpumon.analysis.layers import FIGURES, LayerNode, Tree, together
from gpumon.analysis.units import percent, size

_NUMBERED = re.compile(r"(.*?)(0|[1-9][0-9]{0,8})", re.ASCII | re.DOTALL)

OUTSIDE_NAME = "outside its modules"


class Part(msgspec.Struct, frozen=True):
    """One module, or equal ones in a row. `name`: with its path; `total`: of all together."""

    name: str
    total: int
    of: tuple[LayerNode, ...] = ()


def runs(children: Sequence[LayerNode]) -> Iterator[tuple[LayerNode, ...]]:
    """The children in their order, repeats together."""
    run: list[LayerNode] = []
    signs: tuple[object, ...] = ()
    following: tuple[str, int] | None = None
    for child in children:
        numbered = _NUMBERED.fullmatch(child.name)
        here = (numbered[1], int(numbered[2])) if numbered else None
        as_written = _as_written(child) if here is not None else ()
        if run and here is not None and here == following and as_written == signs:
            run.append(child)
        else:
            if run:
                yield tuple(run)
            run, signs = [child], as_written
        following = (here[0], here[1] + 1) if here is not None else None
    if run:
        yield tuple(run)


def _as_written(layer: LayerNode) -> tuple[object, ...]:
    figures = (getattr(each, name) for each in (layer.own, layer.whole) for name in (*FIGURES, "total"))
    below = tuple([(child.name, child.kind) for child in layer.children])
    return (layer.kind, layer.elements, layer.shared_with, below, *map(size, figures))


def numbers(run: Sequence[LayerNode]) -> str:
    """The last part of the repeats' paths: "0–15", "layer1–4"."""
    numbered = _NUMBERED.fullmatch(run[-1].name)
    return f"{run[0].name}–{numbered[2] if numbered else run[-1].name}"


def path_of(run: Sequence[LayerNode]) -> str:
    """ "blocks.0–15"; of a module alone its path."""
    if len(run) == 1:
        return run[0].path or run[0].name
    above = run[0].path[: len(run[0].path) - len(run[0].name)]
    return above + numbers(run)


def joined(run: Sequence[LayerNode], path: str) -> LayerNode:
    """Repeats as one module with exact sums, whose children they are."""
    return LayerNode(
        path, numbers(run), run[0].kind, 0, together([each.own for each in run]),
        together([each.whole for each in run]), run[0].shared_with, tuple(run),
    )  # fmt: skip


def most(trees: Sequence[Tree]) -> tuple[Part, int] | None:
    """The smallest part with more than half of all bytes, or the largest one if none has; and all bytes.

    Repeats are not taken apart.
    """
    every = sum(tree.root.whole.total + (tree.elsewhere or 0) for tree in trees)
    parts = [Part(OUTSIDE_NAME, tree.elsewhere) for tree in trees if tree.elsewhere]
    parts += _parts([child for tree in trees for child in tree.root.children] if len(trees) == 1 else
                    [tree.root for tree in trees])  # fmt: skip
    found: Part | None = None
    while parts:
        largest = max(parts, key=lambda part: part.total)
        if found is not None and 2 * largest.total <= every:
            break
        found = largest
        parts = _parts(found.of[0].children) if len(found.of) == 1 else []
    return (found, every) if found is not None and found.total else None


def _parts(children: Sequence[LayerNode]) -> list[Part]:
    return [Part(path_of(run), sum(each.whole.total for each in run), run) for run in runs(children)]


def sentence(trees: Sequence[Tree]) -> str:
    """ "98.9 % is in blocks.0–15: 16 × 705.0 MiB, of which 513.0 MiB activations"; "" before anything is known."""
    found = most(trees)
    if found is None:
        return ""
    part, every = found
    share = percent(part.total / every)
    if not part.of:
        return f"{share} was saved {part.name}: {size(part.total)} of activations"
    start = f"{share} is in {part.name}" if 2 * part.total > every else f"The largest part is {part.name}, {share}"
    each = part.of[0].whole
    name = max(FIGURES, key=lambda line: getattr(each, line) or 0)
    times = f"{len(part.of)} × " if len(part.of) > 1 else ""
    return f"{start}: {times}{size(each.total)}, of which {size(getattr(each, name))} {name}"
