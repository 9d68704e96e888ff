"""Builds the Model and Module messages of one watched root. Long: all facts about a model are read in one pass.

Bytes are storage bytes of this process. Each storage counts once; tied parameters count for the first module in
`named_modules` order. DTensors and ZeRO 3's parameters count all elements, but only this rank's bytes; meta tensors
count elements and no bytes. `foreach` and `fused` are resolved as torch will at the step. `parts` works in slices, for
models of many thousand modules or tensors; cost: about 4 µs per module, 2 µs per tensor.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from gpumon_agent import wire
from gpumon_agent.attribution import zero
from gpumon_agent.attribution.spread import Meshes, parallel
from gpumon_agent.hooks.wrappers import unwrapped
from gpumon_agent.module_tree import buffer_names, parameter_names, tree
from gpumon_agent.storages import (
    Pieces,
    alone,
    elements,
    held_once,
    plain,
    shared,
    small,
    storages,
    tensors_within,
)

_MATTERS_FOR_BYTES = (
    "amsgrad", "betas", "capturable", "centered", "decoupled_weight_decay", "differentiable", "history_size",
    "maximize", "momentum", "nesterov", "optim_bits", "weight_decay",
)  # fmt: skip
SLICE_TENSORS = 64
"""Tensors between two clock checks. A module without tensors counts as one."""
_PLAIN = (Tensor, Parameter)
OPTIMIZERS_MAX = 64  # newest ones per message; a script may keep a new optimizer per epoch


def model(
    root: Module, optimizers: Sequence[Optimizer], *, index: int, revision: int, name: str, found: bool
) -> tuple[wire.Model, list[wire.Module]]:
    *_, described = parts(root, optimizers, index=index, revision=revision, name=name, found=found)
    assert described is not None
    return described


def _always() -> bool:
    return True


def parts(
    root: Module,
    optimizers: Sequence[Optimizer],
    *,
    index: int,
    revision: int,
    name: str,
    found: bool,
    over: Callable[[], bool] = _always,
) -> Iterator[tuple[wire.Model, list[wire.Module]] | None]:
    """Yields None after each slice if the time is `over`, and the description at the end."""
    modules: list[wire.Module] = []
    tally = _Tally(over)
    kinds: dict[type, weakref.ref[Module]] = {}  # one module of each class
    since = 0
    own = weakref.ref(root)
    known = [weakref.ref(each) for each in optimizers[-OPTIMIZERS_MAX:]]
    found_modules = tree([root])
    del root, optimizers
    for path, reference in found_modules:
        module = reference()
        if module is None:
            continue
        kinds.setdefault(type(module), reference)
        tensors = len(module._parameters) + len(module._buffers)
        since += max(1, min(tensors, SLICE_TENSORS))
        if tensors > SLICE_TENSORS:
            slices = tally.slices(path, reference, index, revision)
            del module
            described = None
            for each in slices:
                described = each
                if each is None:
                    yield None
        else:
            described = tally.module(path, module, index, revision) if tensors else None
            del module
        if described is not None:
            modules.append(described)
        if since >= SLICE_TENSORS:
            since = 0
            if over():
                yield None
    for _ in tally.clear():
        if over():
            yield None
    settings = []
    for optimizer_known in known:
        optimizer = yield from _optimizer_in_slices(optimizer_known, over)
        if optimizer is not None:
            settings.append(optimizer)
    whole = own()
    if whole is None:
        return
    yield (
        wire.Model(
            model=index,
            revision=revision,
            name=name,
            kind=type(unwrapped(whole)).__name__,
            parameters=tally.elements,
            trainable=tally.trainable,
            parameter_bytes=sum(m.parameter_bytes for m in modules),
            trainable_bytes=sum(m.trainable_bytes for m in modules),
            buffer_bytes=sum(m.buffer_bytes for m in modules),
            modules=len(modules),
            devices=tuple(sorted({device.index or 0 for device in tally.devices})),
            optimizers=tuple(settings),
            parallel=parallel(whole, {k: m for k, ref in kinds.items() if (m := ref()) is not None}, tally.meshes),
            found=found,
        ),
        modules,
    )


class _Tally:
    """Counts storages and parameters module by module, each where it is met first."""

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self.elements = 0
        self.trainable = 0
        self.devices: set[torch.device] = set()
        self.meshes = Meshes()
        self._storages: Pieces[bool] = Pieces()  # identities of shared storages, and ids of buffers
        self._parameters: Pieces[str] = Pieces()  # identity of a parameter → path of its first module

    def module(self, path: str, module: Module, index: int, revision: int) -> wire.Module | None:
        *_, described = self.slices(path, weakref.ref(module), index, revision)
        return described

    def slices(
        self, path: str, reference: weakref.ref[Module], index: int, revision: int
    ) -> Iterator[wire.Module | None]:
        """Yields None after each slice if the time is over; at the end the message, or None without tensors."""
        counted = parameter_bytes = trainable_bytes = buffer_bytes = at = 0
        shared_with = None
        kind, seen = "", False
        names = parameter_names(reference())
        parameters = len(names)
        names += buffer_names(reference())
        while (module := reference()) is not None:
            kind = type(module).__name__
            more = False
            for place in range(at, len(names)):
                if place > at and not place % SLICE_TENSORS and self._over():
                    at, more = place, True
                    break
                tensor = (module._parameters if place < parameters else module._buffers).get(names[place])
                if tensor is None:
                    continue
                seen = True
                if place >= parameters:
                    buffer_bytes += self._claim(tensor)[1]
                    self._storages[id(tensor)] = True
                    continue
                part = zero.partition(tensor)
                identity, nbytes = self._claim(tensor) if part is None else self._partitioned(tensor, part)
                parameter_bytes += nbytes
                first = self._parameters.get(identity)
                if first is None:
                    self._parameters[identity] = path
                    count = tensor.numel() if part is None else zero.elements(tensor)  # on all ranks together
                    self.meshes.see(tensor, nbytes)
                    counted += count
                    self.elements += count
                    if tensor.requires_grad:
                        self.trainable += count
                elif first != path:
                    shared_with = first
                if tensor.requires_grad:
                    trainable_bytes += nbytes
            tensor = part = None  # hold no user tensors until the next slice
            del module
            if not more:
                break
            yield None
        if not seen:
            yield None
            return
        yield wire.Module(
            model=index,
            revision=revision,
            path=path,
            kind=kind,
            parameters=counted,
            parameter_bytes=parameter_bytes,
            trainable_bytes=trainable_bytes,
            buffer_bytes=buffer_bytes,
            shared_with=shared_with,
        )

    def clear(self) -> Iterator[None]:
        """Frees the records, after the last module, in slices."""
        return chain(self._parameters.clear(), self._storages.clear())

    def _partitioned(self, parameter: Tensor, part: Tensor) -> tuple[object, int]:
        """As `_claim`, for a ZeRO 3 parameter: the partitions of all parameters share one storage."""
        identity = id(parameter)
        if identity in self._parameters:
            return identity, 0
        self.devices.add(part.device)
        return identity, part.numel() * part.element_size()

    def _claim(self, tensor: Tensor) -> tuple[object, int]:
        """(identity: id, or storage and offset if shared, since tied parameters may be two objects; unclaimed bytes)"""
        identity: object = id(tensor)
        nbytes = 0
        if type(tensor) in _PLAIN and small(tensor):
            self.devices.add(tensor.device)
            known = id(tensor) in self._parameters or id(tensor) in self._storages
            return id(tensor), 0 if known else tensor.nbytes
        for part in plain(tensor):
            storage = part.untyped_storage()
            key = storage._cdata
            if not shared(key):  # need not be recorded
                if nbytes == 0:
                    identity = id(tensor)
                self.devices.add(part.device)
                if id(tensor) not in self._parameters and id(tensor) not in self._storages:
                    nbytes += storage.nbytes()
                continue
            if nbytes == 0:
                identity = (key, part.storage_offset(), part.numel())
            if key not in self._storages:
                self._storages[key] = True
                self.devices.add(part.device)
                nbytes += storage.nbytes()
        return identity, nbytes


# ---------------------------------------------------------------------------------------------------------- optimizers


def optimizer(optimizer: Optimizer) -> wire.Optimizer:
    """The message of one optimizer; `state_bytes` is None before its first step."""
    slices = _optimizer_in_slices(weakref.ref(optimizer))
    while True:
        try:
            next(slices)
        except StopIteration as ended:
            described: wire.Optimizer = ended.value
            return described


def _optimizer_in_slices(
    reference: weakref.ref[Optimizer], over: Callable[[], bool] = _always
) -> Generator[None, None, wire.Optimizer | None]:
    """Yields after each slice if the time is over. Returns None if the optimizer was freed."""
    counted = parameter_bytes = state_bytes = 0
    resolved: list[tuple[bool | None, bool | None]] = []
    claimed: set[int] = set()
    group = at = 0
    while (outer := reference()) is not None:
        groups = stepping(outer).param_groups
        if group >= len(groups):
            break
        looked_at = groups[group]["params"][at : at + SLICE_TENSORS]
        taken = [each for each in looked_at if each.requires_grad]  # others have no gradient, so no state
        counted += sum(map(elements, taken))
        parameter_bytes += sum(
            each.nbytes if type(each) in _PLAIN and small(each) else _nbytes((each,), claimed) for each in taken
        )
        part = _resolve({**groups[group], "params": taken})
        if at:
            foreach, fused = resolved[-1]
            resolved[-1] = (foreach if foreach is None else foreach and bool(part[0]), fused)
        else:
            resolved.append(part)
        at += SLICE_TENSORS
        if len(looked_at) < SLICE_TENSORS:
            group, at = group + 1, 0
        del outer, groups
        taken = looked_at = []
        if over():
            yield
    claimed.clear()
    at = 0
    while (outer := reference()) is not None:
        states = stepping(outer).state
        left: Any = islice(states.values(), at, None)
        least, more, state = max(SLICE_TENSORS // 4, len(states) // 200), False, None
        for place, state in enumerate(left, at):
            if place - at >= least and not place % (SLICE_TENSORS // 4) and over():
                at, more = place, True
                break
            state_bytes += _state_bytes(state, claimed)
        left = state = None
        if not more:
            break
        del outer, states
        yield
    if outer is None:
        return None
    inner = stepping(outer)
    for each in inner.param_groups:
        for key, value in each.items():
            if key != "params":
                state_bytes += _nbytes(tensors_within(value), claimed)
    kind = type(inner).__name__
    if outer is not inner:
        kind = f"{type(outer).__name__} of {kind}"
    settings = {
        key: _text({_text(group[key]): None for group in inner.param_groups if key in group})
        for key in _MATTERS_FOR_BYTES
        if any(key in group for group in inner.param_groups)
    }
    return wire.Optimizer(
        kind=kind,
        parameters=counted,
        parameter_bytes=parameter_bytes,
        state_bytes=state_bytes if inner.state else None,
        foreach=_agreed(foreach for foreach, _ in resolved),
        fused=_agreed(fused for _, fused in resolved),
        settings=settings,
    )


def stepping(optimizer: Optimizer) -> Optimizer:
    """The optimizer with the state: for ZeroRedundancyOptimizer its inner one, of this rank's partition."""
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def state_tensors(optimizer: Optimizer) -> Iterator[Tensor]:
    """All tensors of an optimizer: its state, also nested, and settings that are tensors (a capturable lr)."""
    optimizer = stepping(optimizer)
    for state in optimizer.state.values():
        yield from tensors_within(state)
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                yield from tensors_within(value)


def _resolve(group: dict[str, Any]) -> tuple[bool | None, bool | None]:
    """(foreach, fused) as the step will choose them; rules of torch.optim's functional forms.

    If neither is set: foreach, if every parameter is a plain tensor on a device with such kernels and, unless
    capturable, the learning rate is a number. (None, None) for an optimizer without the setting.
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


def _nbytes(tensors: Iterable[Tensor], claimed: set[int]) -> int:
    """Claims the storages of `tensors` that are not in `claimed`, and returns their bytes."""
    total = 0
    for tensor in tensors:
        for identity, nbytes, _ in storages(tensor):
            if identity not in claimed:
                claimed.add(identity)
                total += nbytes
    return total


def _state_bytes(state: object, claimed: set[int]) -> int:
    """The same for one parameter's state, without recording unshared storages."""
    if type(state) is not dict:
        return _nbytes(tensors_within(state), claimed)
    values = list(state.values())
    return sum(
        value.nbytes if once and type(value) is Tensor and alone(value) else _nbytes(tensors_within(value), claimed)
        for value, once in zip(values, held_once(values), strict=True)
    )


def _text(value: object) -> str:
    return " | ".join(value) if isinstance(value, dict) else str(value)
