"""What is trained: models, their modules and optimizers, their distribution over ranks."""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from .base import (
    Bytes,
    Count,
    Index,
    Message,
    Named,
    Ordinal,
    Part,
    Ranks,
    Shape,
    StepNumber,
    Text,
    clean,
    clean_fields,
)

LAYERS_PER_PART = 48  # fits a frame even with names of maximal length, four bytes a character
Mesh = Annotated[dict[Text, Ranks], Meta(max_length=64)]


class Optimizer(Message, frozen=True):
    """An optimizer's memory-related properties."""

    kind: Text  # class name
    parameters: Count  # elements it updates
    parameter_bytes: Bytes
    state_bytes: Bytes | None = None  # measured; None before its first step
    foreach: bool | None = None  # as the step will run, with torch's default resolved; None: unknown
    fused: bool | None = None
    settings: Named = msgspec.field(default_factory=dict)  # betas, amsgrad, momentum …: those that affect the bytes

    def __post_init__(self) -> None:
        clean_fields(self, "kind")
        msgspec.structs.force_setattr(self, "settings", {clean(k): clean(v) for k, v in self.settings.items()})


class Parallel(Message, frozen=True):
    """How the model is distributed over ranks."""

    kind: Text  # ddp | fsdp1 | fsdp2 | data_parallel
    world_size: Ranks | None = None
    bucket_bytes: Annotated[tuple[Bytes, ...], Meta(max_length=4096)] = ()  # DDP: per bucket, now
    rebuilt: bool | None = None  # DDP rebuilds its buckets after the first iteration
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None
    find_unused_parameters: bool | None = None
    first_bucket_bytes: Annotated[tuple[Bytes, ...], Meta(max_length=4096)] = ()  # DDP: before the rebuild
    comm_hook: Text | None = None  # DDP: the communication hook's name, if registered
    comm_hook_bytes: Bytes | None = None  # its state's bytes on the device: PowerSGD's error and factors
    shard_bytes: Bytes | None = None  # FSDP, ZeRO: this rank's part of the parameters
    whole_bytes: Bytes | None = None  # and all of them
    unit_bytes: Bytes | None = None  # FSDP: the largest unit gathered at once
    unit: Text | None = None  # its module
    mesh: Mesh = msgspec.field(default_factory=dict)  # dimension -> ranks: dp, tp, pp

    def __post_init__(self) -> None:
        clean_fields(self, "kind", "comm_hook", "unit")
        msgspec.structs.force_setattr(self, "mesh", {clean(k): v for k, v in self.mesh.items()})


class Model(Message, frozen=True, tag="model"):
    """A watched model. A new `revision` of the same `model` index replaces the older and its modules."""

    model: Index
    revision: Index
    name: Text
    kind: Text  # class name
    parameters: Count  # elements, tied ones once; sharded ones in full: `numel()` of a DTensor
    trainable: Count
    parameter_bytes: Bytes  # storage bytes of this process, tied ones once
    trainable_bytes: Bytes
    buffer_bytes: Bytes
    modules: Index  # number of Module messages of this revision
    devices: Annotated[tuple[Ordinal, ...], Meta(max_length=64)] = ()
    optimizers: Annotated[tuple[Optimizer, ...], Meta(max_length=64)] = ()
    parallel: Parallel | None = None
    found: bool = False  # found by the agent; False: passed to watch()

    def __post_init__(self) -> None:
        clean_fields(self, "name", "kind")


class Module(Message, frozen=True, tag="module"):
    """One module that owns parameters or buffers directly (not those of its children)."""

    model: Index
    revision: Index
    path: Text
    kind: Text
    parameters: Count  # as in `Model`
    parameter_bytes: Bytes
    trainable_bytes: Bytes
    buffer_bytes: Bytes
    shared_with: Text | None = None  # path of the module that counts the shared (tied) parameters

    def __post_init__(self) -> None:
        clean_fields(self, "path", "kind", "shared_with")


class Layer(Message, frozen=True):
    """What one module keeps on one device besides its parameters and buffers (those are in its `Module`).

    Its own only, not its children's; storage bytes, each storage counted by one module.
    """

    path: Text  # "" is the root itself
    kind: Text
    gradients: Bytes | None = None
    optimizer: Bytes | None = None
    activations: Bytes | None = None  # None if the graph was not walked

    def __post_init__(self) -> None:
        clean_fields(self, "path", "kind")


class Layers(Message, frozen=True, tag="layers"):
    """A model module by module, in a sampled step: gradients and state at its end, activations at the end of forward.
    Modules that keep nothing are left out. Newer parts with the same model and device replace the older.
    """

    model: Index
    device: Ordinal
    step: StepNumber
    part: Part  # counted from 0
    parts: Part
    layers: Annotated[tuple[Layer, ...], Meta(max_length=LAYERS_PER_PART)]
    elsewhere: Bytes | None = None  # activations of no module of this model, e.g. the loss; in the last part


class Sized(Message, frozen=True):
    """A parameter by its size. `width`: bytes an element."""

    path: Text
    shape: Shape
    width: Index
    trainable: bool = True

    def __post_init__(self) -> None:
        clean_fields(self, "path")


def layers(
    model: int, device: int, step: int, each: Iterable[Layer], elsewhere: int | None = None
) -> tuple[Layers, ...]:
    """The messages for the layers of one model: at least one, each small enough for a frame."""
    every = tuple(each)
    starts = range(0, max(1, len(every)), LAYERS_PER_PART)
    return tuple(
        Layers(
            model, device, step, part, len(starts), every[at : at + LAYERS_PER_PART],
            elsewhere if part == len(starts) - 1 else None,
        )
        for part, at in enumerate(starts)
    )  # fmt: skip
