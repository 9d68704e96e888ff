"""A torch.nn.Module as the subject of an estimate: built on the meta device, so that it has shapes and no bytes.

Cost. Building the module without its weights: what its constructors cost, and no memory.

Known limitations. A factory that reads values of its tensors, or loads a checkpoint, fails on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumon.analysis.estimate.model import Model, Tensor
from gpumon.analysis.estimate.tape import HALF, Tape
from gpumon.analysis.estimate.workload import Workload

if TYPE_CHECKING:
    from torch import nn

    from gpumon.analysis.estimate.plan import Subject


def on_meta(factory: Callable[[], Any]) -> Any:
    """What the factory returns when every tensor it makes has no storage."""
    import torch

    with torch.device("meta"):
        return factory()


def is_module(made: object) -> bool:
    from torch import nn

    return isinstance(made, nn.Module)


def describe(module: nn.Module) -> Model:
    """Its tensors in the order in which a loop over `parameters()` meets them; tied ones point to the first name."""
    from torch import nn

    sparse = {
        id(part.weight)
        for part in module.modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
    }
    first: dict[int, str] = {}
    parameters = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        tied = first.setdefault(id(parameter), name)
        parameters.append(
            Tensor(
                name,
                tuple(parameter.shape),
                parameter.element_size(),
                parameter.requires_grad,
                None if tied == name else tied,
                id(parameter) in sparse,
            )
        )
    buffers = tuple(
        Tensor(name, tuple(buffer.shape), buffer.element_size(), trainable=False)
        for name, buffer in module.named_buffers()
    )
    return Model(type(module).__name__, tuple(parameters), buffers)


@dataclass(frozen=True, slots=True)
class FromModule:
    """The module and the functions that were named with it."""

    module: nn.Module
    factory: Callable[[], nn.Module]
    batches: Callable[[int], Any] | None = None
    loss: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def longest(self) -> int | None:
        return None

    def prepare(self, work: Workload) -> tuple[Model, Tape | None]:
        model = describe(self.module)
        return (model.in_width(HALF) if work.precision.weights == HALF else model), None

    def variants(self) -> Iterator[tuple[str, str, Subject]]:
        yield from ()
