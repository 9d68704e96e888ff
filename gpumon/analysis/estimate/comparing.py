"""Two models beside each other, layer by layer: where the parameters of one come from that the other has not."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.estimate import families
from gpumon.analysis.estimate.families.config import Config


@dataclass(frozen=True, slots=True)
class Row:
    """One layer (numbered ones folded) with its parameters in either model; 0: it is not there."""

    layer: str
    first: int
    second: int

    @property
    def difference(self) -> int:
        return self.second - self.first


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows in the models' order, the sums, and what an entry of the vocabulary costs where that explains all of it."""

    rows: tuple[Row, ...]
    first: int
    second: int
    vocabularies: tuple[int, int] | None
    per_entry: int | None  # parameters


def compare(first: Config, second: Config) -> Comparison:
    """Raises NotAModel where a config leaves out what is needed."""
    one, two = families.describe(first), families.describe(second)
    ours, theirs = dict(one.layers()), dict(two.layers())
    names = [*ours, *(name for name in theirs if name not in ours)]
    rows = tuple(Row(name, ours.get(name, 0), theirs.get(name, 0)) for name in names)
    sizes = (first.get("vocab_size"), second.get("vocab_size"))
    vocabularies = (int(sizes[0]), int(sizes[1])) if all(isinstance(size, int) for size in sizes) else None
    entry = None
    if vocabularies is not None and vocabularies[0] != vocabularies[1]:
        each, rest = divmod(two.count - one.count, vocabularies[1] - vocabularies[0])
        entry = each if not rest else None
    return Comparison(rows, one.count, two.count, vocabularies, entry)
