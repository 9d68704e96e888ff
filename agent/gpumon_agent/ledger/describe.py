"""What is being trained, as far as memory is concerned: the Model and Module messages of one watched root.

Bytes are storage bytes of this process, each storage counted once (tied parameters by the module that comes first in
`named_modules` order); of a DTensor and of ZeRO 3's parameters this rank's part; meta tensors count elements and no
bytes. Optimizer settings are read as torch will resolve them at the step. `parts` works in slices, for models of many
thousand modules; cost about 4 µs a module.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from gpumon_agent import wire
from gpumon_agent.ledger import zero
from gpumon_agent.ledger.spread import Meshes, parallel
from gpumon_agent.ledger.storages import elements, plain, storages, tensors_within
from gpumon_agent.steps.wrappers import unwrapped

_MATTERS_FOR_BYTES = (
    "amsgrad", "betas", "capturable", "centered", "decoupled_weight_decay", "differentiable", "history_size",
    "maximize", "momentum", "nesterov", "optim_bits", "weight_decay",
)  # fmt: skip
_SLICE_MODULES = 100
OPTIMIZERS_MAX = 64  # of a message; of more (one made anew each epoch, and the old ones kept) the newest are told


def model(
    root: Module, optimizers: Sequence[Optimizer], *, index: int, revision: int, name: str, found: bool
) -> tuple[wire.Model, list[wire.Module]]:
    """The whole description at once."""
    *_, described = parts(root, optimizers, index=index, revision=revision, name=name, found=found)
    assert described is not None
    return described


def parts(
    root: Module, optimizers: Sequence[Optimizer], *, index: int, revision: int, name: str, found: bool
) -> Iterator[tuple[wire.Model, list[wire.Module]] | None]:
    """None after every slice of work (about 1 ms each), at the end the description."""
    modules: list[wire.Module] = []
    tally = _Tally()
    kinds: dict[type, Module] = {}  # one module of each class
    for count, (path, module) in enumerate(root.named_modules(), 1):
        if count % _SLICE_MODULES == 0:
            yield None
        kinds.setdefault(type(module), module)
        if module._parameters or module._buffers:
            described = tally.module(path, module, index, revision)
            if described is not None:
                modules.append(described)
    yield (
        wire.Model(
            model=index,
            revision=revision,
            name=name,
            kind=type(unwrapped(root)).__name__,
            parameters=tally.elements,
            trainable=tally.trainable,
            parameter_bytes=sum(m.parameter_bytes for m in modules),
            trainable_bytes=sum(m.trainable_bytes for m in modules),
            buffer_bytes=sum(m.buffer_bytes for m in modules),
            modules=len(modules),
            devices=tuple(sorted({device.index or 0 for device in tally.devices})),
            optimizers=tuple(optimizer(each) for each in optimizers[-OPTIMIZERS_MAX:]),
            parallel=parallel(root, kinds, tally.meshes),
            found=found,
        ),
        modules,
    )


class _Tally:
    """Goes from module to module and counts every storage, and every parameter, where it turns up first."""

    def __init__(self) -> None:
        self.elements = 0
        self.trainable = 0
        self.devices: set[torch.device] = set()
        self.meshes = Meshes()
        self._storages: set[int] = set()
        self._parameters: dict[object, str] = {}  # what tells one parameter from another → path of its first module

    def module(self, path: str, module: Module, index: int, revision: int) -> wire.Module | None:
        own = [p for p in module._parameters.values() if p is not None]
        buffers = [b for b in module._buffers.values() if b is not None]
        if not own and not buffers:
            return None
        counted = parameter_bytes = trainable_bytes = 0
        shared_with = None
        for parameter in own:
            part = zero.partition(parameter)
            identity, nbytes = self._claim(parameter) if part is None else self._partitioned(parameter, part)
            parameter_bytes += nbytes
            first = self._parameters.get(identity)
            if first is None:
                self._parameters[identity] = path
                count = elements(parameter if part is None else part)
                self.meshes.see(parameter, nbytes)
                counted += count
                self.elements += count
                if parameter.requires_grad:
                    self.trainable += count
            elif first != path:
                shared_with = first
            if parameter.requires_grad:
                trainable_bytes += nbytes
        return wire.Module(
            model=index,
            revision=revision,
            path=path,
            kind=type(module).__name__,
            parameters=counted,
            parameter_bytes=parameter_bytes,
            trainable_bytes=trainable_bytes,
            buffer_bytes=sum(self._claim(buffer)[1] for buffer in buffers),
            shared_with=shared_with,
        )

    def _partitioned(self, parameter: Tensor, part: Tensor) -> tuple[object, int]:
        """The same of one of ZeRO 3's: every parameter's part lies in one storage."""
        identity = id(parameter)
        if identity in self._parameters:
            return identity, 0
        self.devices.add(part.device)
        return identity, part.numel() * part.element_size()

    def _claim(self, tensor: Tensor) -> tuple[object, int]:
        """(what tells it from others: storage and offset, as tied ones may be two objects; bytes nobody claimed)."""
        identity: object = id(tensor)
        nbytes = 0
        for part in plain(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if nbytes == 0:
                identity = (key, part.storage_offset(), part.numel())
            if key not in self._storages:
                self._storages.add(key)
                self.devices.add(part.device)
                nbytes += storage.nbytes()
        return identity, nbytes


# ---------------------------------------------------------------------------------------------------------- optimizers


def optimizer(optimizer: Optimizer) -> wire.Optimizer:
    """One optimizer as it stands; `state_bytes` is None before its first step."""
    outer, optimizer = optimizer, stepping(optimizer)
    kind = type(optimizer).__name__
    if outer is not optimizer:
        kind = f"{type(outer).__name__} of {kind}"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    settings = {
        key: _text({_text(group[key]): None for group in optimizer.param_groups if key in group})
        for key in _MATTERS_FOR_BYTES
        if any(key in group for group in optimizer.param_groups)
    }
    resolved = [_resolve(group) for group in optimizer.param_groups]
    return wire.Optimizer(
        kind=kind,
        parameters=sum(elements(p) for p in parameters),
        parameter_bytes=_nbytes(parameters),
        state_bytes=_nbytes(state_tensors(optimizer)) if optimizer.state else None,
        foreach=_agreed(foreach for foreach, _ in resolved),
        fused=_agreed(fused for _, fused in resolved),
        settings=settings,
    )


def stepping(optimizer: Optimizer) -> Optimizer:
    """The one that holds the state: inside ZeroRedundancyOptimizer, the optimizer of this rank's share."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """Every tensor an optimizer keeps: its state, however deep, and settings that are tensors (a capturable lr)."""
    optimizer = stepping(optimizer)
    for state in optimizer.state.values():
        yield from tensors_within(state)
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                yield from tensors_within(value)


def _resolve(group: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """(foreach, fused) as the step will choose them. The rules are those of torch.optim's functional forms.

    Neither asked for: foreach if every parameter is a plain tensor on a device with such kernels, and, unless
    capturable, the learning rate is a number. An optimizer without the setting tells nothing.
    """
    if "foreach" not in group:
        return None, None
    foreach, fused = group["foreach"], group.get("fused")
    if foreach is None and fused is None:
        probe = getattr(sys.modules["torch.optim.optimizer"], "_default_to_fused_or_foreach", None)
        if probe is None:
            return None, None
        _, foreach = probe(group["params"], group.get("differentiable", False), use_fused=False)
        if isinstance(group.get("lr"), Tensor) and not group.get("capturable", True):
            foreach = False
    return bool(foreach) and not fused, bool(fused)


def _agreed(values: Iterable[bool | None]) -> bool | None:
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else None


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum({identity: nbytes for tensor in tensors for identity, nbytes, _ in storages(tensor)}.values())


def _text(value: object) -> str:
    return " | ".join(value) if isinstance(value, dict) else str(value)
