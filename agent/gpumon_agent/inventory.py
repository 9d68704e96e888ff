"""Bytes by owner on one device: weights, buffers, gradients, optimizer state, buckets, the current inputs.

Model: each storage is counted once, whole and unrounded, by the first that claims it in that order. With DDP's
gradient_as_bucket_view the gradients are views of the buckets: the buckets hold the bytes, the gradients none. FSDP2's
unsharded parameters, while they are gathered, count as buckets.
Gradients are read at every call. Weights, buffers and optimizer state change rarely: their sums are kept until a call
says `fresh`, or a mark that the usual changes move has moved (an optimizer's state object and its size, the first
parameter's storage). The list of modules is made anew every 64 fresh calls.
Cost, measured for 1,000 parameters with AdamW: see tests/inventory.
Known limitations: a parameter moved by itself between two fresh calls is seen at the next one; a module added late
without an optimizer of its own, at the next list; master copies that a wrapper keeps outside `state` are not found.
Nothing here keeps a tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from .describe import bucket_sizes, ddp_logging, state_tensors
from .storages import storages

_INPUT_DEPTH_MAX = 6
_LIST_EVERY_FRESH = 64
_BUCKETS_SETTLE_LOOKS = 64  # DDP rebuilds its buckets in its second forward and logs it in the third
_PLAIN = (Tensor, Parameter)

Sizes = dict[torch.device, int]


class Owners(NamedTuple):
    """Storage bytes on one device, each counted once. Fields as in wire.Ledger."""

    weights: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    buckets: int = 0
    inputs: int = 0


class _Sums(NamedTuple):
    """What rarely changes, by device, and the storages it claims."""

    mark: tuple[object, ...]
    claimed: set[int]
    weights: Sizes
    buffers: Sizes
    optimizer: Sizes


class Inventory:
    """What the models and optimizers that the agent watches hold. They are known by weak reference only."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._inputs: list[weakref.ref[Tensor]] = []
        self._sums: _Sums | None = None
        self._buckets: Sizes = {}
        self._bucket_looks = 0
        self._until_list = 0
        self._modules: list[weakref.ref[Module]] = []  # those with parameters or buffers of their own
        self._strays: list[weakref.ref[Tensor]] = []  # parameters of optimizers that are in no watched model
        self._ddp: list[weakref.ref[Module]] = []
        self._sharded: list[weakref.ref[Any]] = []  # FSDP2's own record of a parameter
        self._views: set[int] = set()  # ids of parameters whose gradients are views of DDP buckets

    def watch(self, model: Module, optimizers: Iterable[Optimizer] = ()) -> None:
        """Counts `model` and `optimizers` too, each once however often it is given."""
        if all(known() is not model for known in self._models):
            self._models.append(weakref.ref(model))
        for optimizer in optimizers:
            if all(known() is not optimizer for known in self._optimizers):
                self._optimizers.append(weakref.ref(optimizer))
        self._sums = None
        self._until_list = self._bucket_looks = 0

    def forget(self, model: Module) -> None:
        """No longer counts `model`: another that holds it took its place."""
        self._models = [known for known in self._models if known() is not model]
        self._sums = None
        self._until_list = 0

    def inputs(self, *batch: object) -> tuple[int, list[tuple[int, ...]]]:
        """Notes, weakly, the tensors handed to a root's forward; their storage bytes and their shapes."""
        tensors = list(_tensors_in(batch, _INPUT_DEPTH_MAX))
        self._inputs = [weakref.ref(tensor) for tensor in tensors]
        sizes = {identity: nbytes for tensor in tensors for identity, nbytes, _ in storages(tensor)}
        return sum(sizes.values()), [tuple(tensor.shape) for tensor in tensors]

    def owners(self, device: torch.device, *, fresh: bool = True) -> Owners:
        """What each owner holds on `device` now. `fresh=False` may reuse the sums of what rarely changes."""
        sums = self._sums
        if sums is None or fresh or sums.mark != self._mark():
            sums = self._sums = self._take_sums()
        claimed = sums.claimed.copy()
        gathered: Sizes = {}
        _add(gathered, self._gathered(), claimed)
        gradients, viewed = self._gradients(claimed)
        buckets = self._bucket_sizes(viewed)
        for where, nbytes in gathered.items():
            buckets[where] = buckets.get(where, 0) + nbytes
        inputs: Sizes = {}
        _add(inputs, _alive(self._inputs), claimed)
        return Owners(
            weights=sums.weights.get(device, 0),
            buffers=sums.buffers.get(device, 0),
            gradients=gradients.get(device, 0),
            optimizer=sums.optimizer.get(device, 0),
            buckets=buckets.get(device, 0),
            inputs=inputs.get(device, 0),
        )

    def _mark(self) -> tuple[object, ...]:
        states = [(id(optimizer.state), len(optimizer.state)) for optimizer in _alive(self._optimizers)]
        first = next(self._parameters(), None)
        return (*states, None if first is None else next(storages(first), None))

    def _take_sums(self) -> _Sums:
        if self._until_list <= 0:
            self._list()
            self._until_list = _LIST_EVERY_FRESH
        self._until_list -= 1
        # while FSDP2 has a parameter gathered, that stands in the module in its shard's place
        gathered = {identity for tensor in self._gathered() for identity, _, _ in storages(tensor)}
        claimed = gathered.copy()
        weights: Sizes = {}
        buffers: Sizes = {}
        state: Sizes = {}
        _add(weights, self._parameters(), claimed)
        for module in _alive(self._modules):
            if module._buffers:
                _add(buffers, (buffer for buffer in module._buffers.values() if buffer is not None), claimed)
        for optimizer in _alive(self._optimizers):
            _add(state, state_tensors(optimizer), claimed)
        return _Sums(self._mark(), claimed - gathered, weights, buffers, state)

    def _list(self) -> None:
        """Goes through the whole tree of every model: what the calls after it go through in a straight line."""
        self._modules, self._strays, self._ddp, self._sharded = [], [], [], []
        self._views = set()
        seen: set[int] = set()
        for model in _alive(self._models):
            for module in model.modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                if module._parameters or module._buffers:
                    self._modules.append(weakref.ref(module))
                if type(module).__name__ == "DistributedDataParallel":
                    self._ddp.append(weakref.ref(module))
                    if getattr(module, "gradient_as_bucket_view", False):
                        self._views.update(id(parameter) for parameter in module.parameters())
                self._sharded += [weakref.ref(each) for each in _fsdp_parameters(module)]
        owned = {id(parameter) for parameter in self._parameters()}
        for optimizer in _alive(self._optimizers):
            for group in optimizer.param_groups:
                self._strays += [weakref.ref(p) for p in group["params"] if id(p) not in owned]

    def _parameters(self) -> Iterator[Tensor]:
        for module in _alive(self._modules):
            for parameter in module._parameters.values():
                if parameter is not None:
                    yield parameter
        for sharded in _alive(self._sharded):
            yield sharded.sharded_param
        yield from _alive(self._strays)

    def _gradients(self, claimed: set[int]) -> tuple[Sizes, Sizes]:
        """Bytes of gradients that own their storage, and of the storages in which the others are views."""
        owned: Sizes = {}
        viewed: Sizes = {}
        views = self._views
        for parameter in self._parameters():
            gradient = parameter.grad
            if gradient is not None:
                _add(viewed if id(parameter) in views else owned, (gradient,), claimed)
        for sharded in _alive(self._sharded):
            gradient = getattr(sharded, "unsharded_accumulated_grad", None)  # no_sync: not yet reduced
            if gradient is not None:
                _add(owned, (gradient,), claimed)
        return owned, viewed

    def _bucket_sizes(self, viewed: Sizes) -> Sizes:
        """DDP's own figures; where gradients are views of the buckets, at least what those views show."""
        if self._bucket_looks < _BUCKETS_SETTLE_LOOKS:
            self._bucket_looks += 1
            self._buckets = {}
            for module in _alive(self._ddp):
                parameter = next(module.parameters(), None)
                if parameter is not None:
                    size = sum(bucket_sizes(ddp_logging(module)))
                    self._buckets[parameter.device] = self._buckets.get(parameter.device, 0) + size
        return {
            device: max(self._buckets.get(device, 0), viewed.get(device, 0))
            for device in self._buckets.keys() | viewed.keys()
        }

    def _gathered(self) -> Iterator[Tensor]:
        for sharded in _alive(self._sharded):
            yield from sharded.all_gather_outputs


T = TypeVar("T")


def _alive(references: Iterable[weakref.ref[T]]) -> Iterator[T]:
    return (target for reference in references if (target := reference()) is not None)


def _add(sizes: Sizes, tensors: Iterable[Tensor], claimed: set[int]) -> None:
    """Adds the bytes of the storages behind `tensors` that nobody has claimed yet, and claims them."""
    for tensor in tensors:
        if type(tensor) in _PLAIN and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            identity = storage._cdata
            if identity not in claimed and tensor.device.type != "meta":
                claimed.add(identity)
                device = tensor.device
                sizes[device] = sizes.get(device, 0) + storage.nbytes()
        else:
            for identity, nbytes, device in storages(tensor):
                if identity not in claimed:
                    claimed.add(identity)
                    sizes[device] = sizes.get(device, 0) + nbytes


def _fsdp_parameters(module: Module) -> Iterable[Any]:
    """FSDP2's records of the parameters that `module` shards; none for other modules and other versions of torch."""
    read = getattr(module, "_get_fsdp_state", None)
    if read is None:
        return []
    state = read()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [each for group in groups if group is not None for each in group.fsdp_params]


def _tensors_in(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth:
        inner: Iterable[object] = ()
        if isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, (list, tuple)):
            inner = value
        elif is_dataclass(value) and not isinstance(value, type):
            inner = [getattr(value, field.name) for field in fields(value)]
        for each in inner:
            yield from _tensors_in(each, depth - 1)
