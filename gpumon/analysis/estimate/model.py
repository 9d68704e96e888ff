"""A model described by its tensors: names, shapes, bytes per element, which are trained, which are tied."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

import msgspec
from msgspec.structs import replace


class Tensor(msgspec.Struct, frozen=True):
    """A parameter or buffer. `tied_to`: the parameter whose storage this name shares (it has no bytes of its own)."""

    name: str
    shape: tuple[int, ...]
    width: int = 4  # bytes an element
    trainable: bool = True
    tied_to: str | None = None
    sparse: bool = False  # its gradient has only the rows looked up
    group: int | None = 0  # of the optimizer's parameter groups; None: in none of them

    @property
    def count(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return 0 if self.tied_to else self.count * self.width


class ModelTensors(msgspec.Struct, frozen=True):
    """Tensors by name. Counts are of distinct storages: a tied weight counts once."""

    name: str
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...] = ()

    @property
    def own(self) -> tuple[Tensor, ...]:
        """Parameters with a storage of their own, in the model's order."""
        return tuple(tensor for tensor in self.parameters if not tensor.tied_to)

    @property
    def trained(self) -> tuple[Tensor, ...]:
        return tuple(tensor for tensor in self.own if tensor.trainable)

    @property
    def count(self) -> int:
        return sum(tensor.count for tensor in self.own)

    @property
    def trained_count(self) -> int:
        return sum(tensor.count for tensor in self.trained)

    @property
    def bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.own)

    @property
    def buffer_bytes(self) -> int:
        return sum(tensor.bytes for tensor in self.buffers)

    def in_width(self, width: int) -> ModelTensors:
        """The same model with parameters of `width` bytes per element."""
        return replace(self, parameters=tuple(replace(tensor, width=width) for tensor in self.parameters))

    def layers(self) -> Iterator[tuple[str, int]]:
        """(path, parameters) with the numbered layers folded ("encoder.layer.*12"), in the model's order."""
        found: dict[str, int] = {}
        numbers: dict[str, set[str]] = {}
        for tensor in self.own:
            path = tensor.name.rpartition(".")[0] or tensor.name
            folded, *index = _fold(path)
            found[folded] = found.get(folded, 0) + tensor.count
            numbers.setdefault(folded, set()).update(index)
        for path, count in found.items():
            times = len(numbers[path])
            yield (path.replace("*", f"*{times}", 1) if times else path), count

    def units(self) -> tuple[int, int]:
        """(bytes of the largest numbered layer, bytes outside all of them): what FSDP gathers at once.

        Usually each block of a list of layers is wrapped, and then the whole model.
        """
        blocks: dict[tuple[str, str], int] = {}
        rest = 0
        for tensor in self.own:
            match = _NUMBERED.match(tensor.name)
            if match is None:
                rest += tensor.bytes
            else:
                block = match[1] or "", match[2]
                blocks[block] = blocks.get(block, 0) + tensor.bytes
        return max(blocks.values(), default=0), rest


_NUMBERED = re.compile(r"^(.*?\.)?(\d+)(?=\.|$)")


def _fold(path: str) -> tuple[str, ...]:
    match = _NUMBERED.match(path)
    if match is None:
        return (path,)
    return f"{match[1] or ''}*{path[match.end() :]}", match[2]


def vocabulary_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """The largest table: two dimensions, far more rows than columns, or an embedding by name."""
    tables = [t for t in tensors if len(t.shape) == 2 and ("embed" in t.name.lower() or t.shape[0] >= 8 * t.shape[1])]
    return max(tables, key=lambda t: t.count, default=None)


def per_row(tensors: Sequence[Tensor], rows: int) -> int:
    """Parameters that one more row of a table of `rows` rows adds to the whole model."""
    return sum(t.count // rows for t in tensors if not t.tied_to and rows in t.shape)


class NotAModel(ValueError):
    """The input does not describe a model; the text says why and what to do."""


def from_shapes(shapes: Mapping[str, Sequence[int]], name: str = "parameters") -> ModelTensors:
    """From {name: shape}, all fp32 and trained. Raises NotAModel for anything else."""
    tensors = []
    for key, shape in shapes.items():
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise NotAModel(f"{key!r} has no shape: parameters are written as {{name: [rows, columns]}}")
        if not all(isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape):
            raise NotAModel(f"the shape of {key!r} is not a list of whole numbers: {list(shape)!r}")
        tensors.append(Tensor(key, tuple(shape)))
    if not tensors:
        raise NotAModel("no parameter is described: write {name: [rows, columns]}")
    return ModelTensors(name, tuple(tensors))
