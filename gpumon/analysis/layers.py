"""A watched model as a tree of modules, each with its own bytes and its total with all submodules.

Model. `wire.Module` gives parameters and buffers of every module that owns some; `wire.Layers` (of the newest step with
layers) gives gradients, optimizer state and activations. Other paths are there only as parents. Each storage counts for
one module, so the root's totals are the sums of the own figures.

Cost: O(modules × depth) per `LayersRecord` or `ModelRecord`: the screen caches the result.

Known limitations. A module called twice has both calls' activations. Activations saved for no module (a loss function's
input) are `Tree.elsewhere`. Activations are None on every line until a step was sampled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from gpumon.session.frame import RankFrame
from gpumon_agent import wire

FIGURES = ("weights", "buffers", "gradients", "optimizer", "activations")
"""Names of the ledger's lines."""


class LayerBytes(msgspec.Struct, frozen=True):
    """Bytes; None: not known."""

    weights: int | None = None
    buffers: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    activations: int | None = None

    @property
    def total(self) -> int:
        return sum(value for name in FIGURES if (value := getattr(self, name)) is not None)


class LayerNode(msgspec.Struct, frozen=True):
    """One module. `children` are in the model's order."""

    path: str  # "" is the root
    name: str  # the last part of the path; the root's is its class
    kind: str | None
    elements: int  # parameter count of this module alone; tied ones count where they appear first
    own: LayerBytes
    whole: LayerBytes  # with all submodules
    shared_with: str | None = None
    children: tuple[LayerNode, ...] = ()


class Tree(msgspec.Struct, frozen=True):
    """One model on one device. `step`: of the newest gradients, state and activations; None before the first."""

    model: int
    device: int
    step: int | None
    root: LayerNode
    elsewhere: int | None  # activations of no module of the model


class _Node:
    __slots__ = ("buffers", "children", "elements", "kept", "kind", "shared_with", "weights")

    def __init__(self) -> None:
        self.kind: str | None = None
        self.elements = 0
        self.weights: int | None = None
        self.buffers: int | None = None
        self.kept: tuple[int | None, int | None, int | None] = (None, None, None)
        self.shared_with: str | None = None
        self.children: dict[str, _Node] = {}


def trees(rank: RankFrame) -> tuple[Tree, ...]:
    return tuple(
        _tree(rank, index, device)
        for index, record in enumerate(rank.models)
        for device in record.model.devices or (0,)
    )


def _tree(rank: RankFrame, index: int, device: int) -> Tree:
    record = rank.models[index]
    model = record.model.model
    read = next((each for each in rank.layers if each.model == model and each.device == device), None)
    root = _Node()
    root.kind = record.model.kind
    for entry in merged(record.modules, read.layers if read is not None else ()):
        node = _at(root, entry.path)
        node.kind = entry.kind
        if isinstance(entry, wire.Module):
            node.elements = entry.parameters
            node.weights, node.buffers = entry.parameter_bytes, entry.buffer_bytes
            node.shared_with = entry.shared_with
        else:
            node.kept = (entry.gradients, entry.optimizer, entry.activations)
    return Tree(
        model=model,
        device=device,
        step=read.step if read is not None else None,
        root=_layer("", record.model.kind, root),
        elsewhere=read.elsewhere if read is not None else None,
    )


def merged(modules: Sequence[wire.Module], layers: Sequence[wire.Layer]) -> Iterator[wire.Module | wire.Layer]:
    """Merges two parts of one order: the model's order of its modules."""
    described = {module.path for module in modules}
    waiting = iter(modules)
    for layer in layers:
        if layer.path in described:
            for module in waiting:
                yield module
                if module.path == layer.path:
                    break
        yield layer
    yield from waiting


def _at(root: _Node, path: str) -> _Node:
    node = root
    for part in path.split(".") if path else ():
        node = node.children.setdefault(part, _Node())
    return node


def _layer(path: str, name: str, node: _Node) -> LayerNode:
    children = tuple(_layer(f"{path}.{part}" if path else part, part, child) for part, child in node.children.items())
    own = LayerBytes(node.weights, node.buffers, *node.kept)
    below = [own, *(child.whole for child in children)]
    whole = together(below)
    return LayerNode(path, name, node.kind, node.elements, own, whole, node.shared_with, children)


def together(all_: Sequence[LayerBytes]) -> LayerBytes:
    """The sum of each figure over those where it is known."""
    return LayerBytes(*(_sum([getattr(figures, name) for figures in all_]) for name in FIGURES))


def _sum(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
