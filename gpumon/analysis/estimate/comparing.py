"""Compares two models layer by layer: which parameters one has that the other has not."""

from __future__ import annotations

import msgspec

from gpumon.analysis.estimate.model import ModelTensors, vocabulary_of


class LayerPair(msgspec.Struct, frozen=True):
    """One layer (numbered ones folded) with its parameters in either model; 0: not there."""

    layer: str
    first: int
    second: int

    @property
    def difference(self) -> int:
        return self.second - self.first


class ParameterComparison(msgspec.Struct, frozen=True):
    """Rows in the models' order, the sums, and the parameters per vocabulary entry if that explains all."""

    rows: tuple[LayerPair, ...]
    first: int
    second: int
    vocabularies: tuple[int, int] | None
    per_entry: int | None  # parameters


class Side(msgspec.Struct, frozen=True):
    """One of the two. `vocabulary`: from its config; None: the rows of its largest table."""

    model: ModelTensors
    vocabulary: int | None = None


def compare(first: Side, second: Side) -> ParameterComparison:
    """Layer by layer, numbered ones folded."""
    one, two = first.model, second.model
    ours, theirs = dict(one.layers()), dict(two.layers())
    names = [*ours, *(name for name in theirs if name not in ours)]
    rows = tuple(LayerPair(name, ours.get(name, 0), theirs.get(name, 0)) for name in names)
    sizes = _entries(first), _entries(second)
    vocabularies = (sizes[0], sizes[1]) if sizes[0] is not None and sizes[1] is not None else None
    entry = None
    if vocabularies is not None and vocabularies[0] != vocabularies[1]:
        each, rest = divmod(two.count - one.count, vocabularies[1] - vocabularies[0])
        entry = each if not rest and each > 0 else None
    return ParameterComparison(rows, one.count, two.count, vocabularies, entry)


def _entries(side: Side) -> int | None:
    if side.vocabulary is not None:
        return side.vocabulary
    table = vocabulary_of(side.model.own)
    return None if table is None else table.shape[0]
