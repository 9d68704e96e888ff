"""Bytes by owner on one device. Long, because DDP, FSDP and ZeRO each keep tensors in places of their own.

Owners: weights, buffers, gradients, optimizer state, buckets, the current inputs.

Model: each storage counts once, whole and unrounded, for its first owner. With DDP's gradient_as_bucket_view, gradients
are views of buckets and count there. Gathered (unsharded) parameters of FSDP and ZeRO 3, tensors of DDP's communication
hooks and ZeRO's buckets count as buckets. For ZeRO, weights are partitions and master copies, gradients the reduced
ones.
Which gradients and gathered parameters there are is read at every call, their storages when they change (kept). The
lists of parameters and buffers are cached until a `fresh` call (where C++ is compiled, until one finds another in a
module's dict), or until one is freed. The sum of optimizer state is cached for 16 fresh calls; a changed mark (state
object, its size, storages of the first entry) also invalidates it. State with nested containers (LBFGS) is not cached.
The module list is rebuilt every 64 fresh calls.
Where C++ is compiled, one call of it says whether more than gradients and inputs has changed since the last call; only
then Python looks. It also reads inputs and activations. Not with DDP, FSDP and ZeRO.
Known limitations: other changes of optimizer state are seen after at most 16 fresh calls; a module added later without
an optimizer, when the module list is rebuilt; master copies outside of `state` are not found.
Nothing here keeps a tensor alive.
"""

from __future__ import annotations

import weakref
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from functools import partial
from operator import is_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from gpumon_agent.attribution import native_storages, zero
from gpumon_agent.attribution.caller_frames import beside
from gpumon_agent.attribution.describe import state_tensors, stepping
from gpumon_agent.attribution.kept import NONE, Claimed, Living, Sum, place
from gpumon_agent.attribution.native_storages import FirstEntry, Group, Held, Lists, LivingStorages, Look
from gpumon_agent.attribution.spread import bucket_sizes, ddp_logging, flat_parameter, fsdp_parameters, hook_tensors
from gpumon_agent.module_tree import SEARCHED_EVERY
from gpumon_agent.storages import (
    INPUT_DEPTH_MAX,
    has_storage,
    index_of,
    shape_of,
    storages,
    tensors_in,
    tensors_within,
    untransformed,
)

_STATE_EVERY_FRESH = 16
_PLAIN = (Tensor, Parameter)
_STATES = 3  # the bit of a look, after those of gradients, weights and buffers


class Owners(NamedTuple):
    """Storage bytes on one device, each counted once. Fields as in wire.Ledger."""

    weights: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer: int = 0
    buckets: int = 0
    inputs: int = 0


class _State(NamedTuple):
    """Optimizer state on one device and its storages; valid while the mark is unchanged."""

    mark: tuple[object, ...]
    claimed: frozenset[int]
    nbytes: int


class _Lasting(NamedTuple):
    """Weights, buffers and optimizer state on one device; valid until one of them is read again."""

    gathered: set[int]
    """identities claimed before"""
    owned: set[int]
    """identities of weights and buffers"""
    claimed: set[int]
    """those of all"""
    ids: array[int]
    """the same, sorted"""
    weights: int
    buffers: int
    state: _State


class _Sums:
    """Of one device."""

    def __init__(self, native: native_storages.Native | None) -> None:
        self.weights, self.buffers, self.gradients, self.views, self.states = (Sum(native) for _ in range(5))
        self.firsts: list[FirstEntry] = []  # one per optimizer
        self.state: _State | None = None
        self.lasting: _Lasting | None = None
        self.look: Look | None = None
        """at all of this; None: Python must look"""

    def forget(self, changed: int) -> None:
        """What a look has found changed, in C++'s bits."""
        for at, each in enumerate((self.gradients, self.weights, self.buffers)):
            if changed >> at & 1:
                each.native = False
        if changed >> _STATES & 1:
            self.state = None


class Inventory:
    """Tensors of the watched models and optimizers; holds only weak references."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Module]] = []
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._inputs: list[weakref.ref[Tensor]] = []
        self._handed = 0  # how many of them were arguments of the forward; they come first
        self._native = native_storages.load()
        self._lists = self._native and Lists(self._native)
        self._sums: defaultdict[int, _Sums] = defaultdict(partial(_Sums, self._native))
        self._state_uses = 0
        self._buckets: dict[int, int] = {}
        self._until_list = 0
        self._modules: Living[Module] = Living()  # those with their own parameters or buffers
        self._known: Living[Tensor] = Living()  # parameters of the last read, those of modules first
        self._of_modules = 0  # how many those are
        self._buffers: Living[Tensor] = Living()
        self._one_freed = False  # of them, so that others may have come
        self._strays: list[weakref.ref[Tensor]] = []  # optimizers' parameters that are in no watched model
        self._ddp: list[weakref.ref[Module]] = []
        self._sharded: list[weakref.ref[Any]] = []  # FSDPParam of FSDP2
        self._flat: list[weakref.ref[Any]] = []  # FlatParameter of FSDP1, one per unit
        self._zero: list[weakref.ref[Any]] = []  # DeepSpeed's optimizers
        self._partitioned = False  # ZeRO 3 partitions some parameters
        self.views: set[int] = set()
        """ids of parameters whose gradients are views of DDP buckets"""
        self.claimed = Claimed()
        """The storages counted by the last call of `owners`."""

    def watch(self, model: Module, optimizers: Iterable[Optimizer] = ()) -> None:
        if all(known() is not model for known in self._models):
            self._models.append(weakref.ref(model))
        for optimizer in optimizers:
            if all(known() is not optimizer for known in self._optimizers):
                self._optimizers.append(weakref.ref(optimizer))
        self._until_list = 0

    def forget(self, model: Module) -> None:
        """Removes `model`: a wrapper has replaced it."""
        self._models = [known for known in self._models if known() is not model]
        self._until_list = 0

    def inputs(self, *batch: object) -> tuple[int, list[tuple[int, ...]]]:
        """Records, weakly, the tensors passed to a root's forward. Returns their bytes (a view's own) and shapes."""
        shapes: list[tuple[int, ...]] = []
        noted: list[weakref.ref[Tensor]] = []
        sizes: dict[int, int] = {}  # of each tensor once
        for part in batch:  # args and kwargs; mostly plain tensors
            for value in part.values() if type(part) is dict else part if type(part) is tuple else (part,):
                if type(value) is Tensor and has_storage(value):
                    noted.append(weakref.ref(value))
                    shapes.append(shape_of(value))
                    if not value.is_meta:
                        sizes[id(value)] = value.nbytes
                else:
                    for tensor in map(untransformed, tensors_in(value, INPUT_DEPTH_MAX - 2)):
                        noted.append(weakref.ref(tensor))
                        shapes.append(shape_of(tensor))
                        held = sum(nbytes for _, nbytes, _ in storages(tensor))
                        sizes[id(tensor)] = min(held, tensor.nbytes) if tensor.layout is torch.strided else held
        self._inputs = noted
        self._handed = len(noted)
        return sum(sizes.values()), shapes

    def beside(self) -> None:
        """Records, weakly, other tensors of the batch in the variables of the running forward's callers."""
        self._inputs += [weakref.ref(tensor) for tensor in beside(list(_alive(self._inputs)))]

    def owners(self, device: torch.device, *, fresh: bool = True, living: LivingStorages | None = None) -> Owners:
        """Bytes of each owner on `device` now. `fresh=False` may use cached sums. If one call of C++ is enough, it also
        reads `living`, but for what an owner has (`claimed.seen`)."""
        index = index_of(device)
        if self._until_list <= 0:
            self._list()
            self._until_list = SEARCHED_EVERY
        self._until_list -= fresh
        sums = self._sums[index]
        if self._state_uses + fresh < _STATE_EVERY_FRESH:
            unchanged = self._unchanged(sums, index, living, fresh=fresh)
            if unchanged is not None:
                self._state_uses += fresh
                return unchanged
        sums.look = None  # what it reads may be freed if an error ends this call
        changed = fresh and not self._same_lists()
        parameters = self._parameters(fresh=changed)
        gathered = Claimed()  # a parameter gathered by FSDP2 replaces its shard in the module
        gathered_bytes = claim(self.gathered(), gathered, index)
        lasting = self._lasting(sums, parameters, gathered.others, index, fresh=fresh, changed=changed)
        self.claimed = claimed = Claimed(lasting.claimed)
        beside = claim(self._of_hooks_and_zero(), claimed, index) if self._ddp or self._zero else 0
        gradients, viewed = self._gradients(sums, parameters, claimed, lasting.ids, index)
        sums.look = self._look(sums, lasting.ids)
        return Owners(
            weights=lasting.weights,
            buffers=lasting.buffers,
            gradients=gradients,
            optimizer=lasting.state.nbytes,
            buckets=gathered_bytes + beside + max(self._bucket_bytes(index, fresh=fresh), viewed),
            inputs=claim(_alive(self._inputs), claimed, index),
        )

    def _look(self, sums: _Sums, owned: array[int]) -> Look | None:
        of = [sums.gradients, sums.weights, sums.buffers]
        words = [each.words for each in of if each.native and each.words is not None]
        if self._native is None or self._lists is None or len(words) < len(of):
            return None
        return Look(self._native, words, sums.firsts, owned, self._lists)

    def _unchanged(self, sums: _Sums, index: int, living: LivingStorages | None, *, fresh: bool) -> Owners | None:
        """Those of the last call, but for gradients and inputs. None, too: they may be others."""
        look, lasting, lists = sums.look, sums.lasting, self._lists
        if look is None or lasting is None or lists is None:
            return None
        known, buffers = self._known, self._buffers
        for each in look.lists:
            if each is not known.ids and each is not buffers.ids:  # nobody says that one of them was freed
                return None
        if self._sharded or self._flat or self._zero or self._ddp or self._partitioned:
            return None
        if fresh:
            lists.expect(self._modules, known, self._of_modules, buffers)
        changed = look.read(self._inputs, living, lists=fresh)
        if changed < -1:
            return None
        if changed >> 1:
            sums.forget(changed)
            return None
        gradients = sums.gradients
        if changed:
            gradients.take(look.found())
        self.claimed = claimed = Claimed(lasting.claimed)
        own, count, given, living_read = look.result
        if own:
            claimed.gradients = gradients.found
        if count < 0:
            inputs = list(_alive(self._inputs))
            if any(map(_has_gradient, inputs)):
                return None
            given = claim(inputs, claimed, index)
        else:
            claimed.others = look.given(count)
            if living_read:
                claimed.seen = len(claimed.others)
        return Owners(lasting.weights, lasting.buffers, own, lasting.state.nbytes, 0, given)

    def rolled(self, device: torch.device, sums: dict[str, int]) -> Owners:
        """The same for models with too many tensors for one step, from the sums of `Rolling`."""
        index = index_of(device)
        inputs = [each for each in _alive(self._inputs) if not isinstance(each, Parameter)]
        self.claimed = claimed = Claimed()
        gradients = claim((g for each in inputs if each.is_leaf and (g := each.grad) is not None), claimed, index)
        return Owners(
            weights=sums["weights"],
            buffers=sums["buffers"],
            gradients=sums["gradients"] + gradients,
            optimizer=sums["optimizer"],
            buckets=sums["gathered"] + max(self._bucket_bytes(index, fresh=True), sums["views"]),
            inputs=claim(inputs, claimed, index),
        )

    def models(self) -> Iterator[Module]:
        return _alive(self._models)

    def optimizers(self) -> Iterator[Optimizer]:
        return _alive(self._optimizers)

    def know_ddp(self, modules: Iterable[weakref.ref[Module]]) -> None:
        """Sets the DistributedDataParallel modules, which `Rolling` has found."""
        self._ddp = list(modules)

    def held(self, *, lasting: bool = True, fleeting: bool = True) -> Iterator[tuple[str, Tensor, Tensor | None]]:
        """(line of the ledger, tensor, its parameter if it is a gradient), in the order of claims.

        `lasting`: those that keep their addresses: weights, buffers, optimizer state, DDP hooks, ZeRO's buckets.
        """
        if fleeting:
            yield from (("buckets", tensor, None) for tensor in self.gathered())
        fresh = lasting and not self._same_lists()
        parameters = self._parameters(fresh=fresh).some()
        if lasting:
            yield from (("weights", parameter, None) for parameter in parameters)
            yield from (("buffers", buffer, None) for buffer in self._each_buffer(fresh=fresh).some())
            for optimizer in _alive(self._optimizers):
                yield from (("optimizer", tensor, None) for tensor in state_tensors(optimizer))
            yield from (("buckets", tensor, None) for tensor in self._of_hooks_and_zero())
        if not fleeting:
            return
        views = self.views
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                yield ("buckets" if id(parameter) in views else "gradients"), gradient, parameter
        for each in _alive(self._inputs):
            if each.is_leaf and (gradient := each.grad) is not None:
                yield "gradients", gradient, None
        yield from (("inputs", tensor, None) for tensor in _alive(self._inputs))

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, its gradient)"""
        for parameter in self._parameters(fresh=False).some():
            if (gradient := parameter.grad) is not None:
                yield parameter, gradient

    def states(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, tensor of an optimizer's state for it)"""
        for optimizer in _alive(self._optimizers):
            for parameter, state in stepping(optimizer).state.items():
                if isinstance(parameter, Tensor):
                    for tensor in tensors_within(state):
                        yield parameter, tensor

    def groups(self) -> dict[int, int]:
        """id of each optimizer's parameter → the index of its group."""
        return {
            id(parameter): at
            for optimizer in _alive(self._optimizers)
            for at, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def state_mark(self) -> object:
        """Equal between calls while the optimizers' state is unchanged. None: unknown."""
        states = [(index, sums.state) for index, sums in sorted(self._sums.items()) if sums.state is not None]
        marks = tuple((index, state.mark, state.nbytes) for index, state in states)
        return None if any(None in mark for _, mark, _ in marks) else marks

    @property
    def weights(self) -> Set[int]:
        """Identities of the storages of weights and buffers, from the last calls of `owners`."""
        found = [sums.lasting.owned for sums in self._sums.values() if sums.lasting is not None]
        return found[0] if len(found) == 1 else set().union(*found)

    def references(self) -> tuple[_Refs[Module], _Refs[Tensor], _Refs[Any], _Refs[Optimizer]]:
        """Modules with tensors, optimizers' parameters outside of them, FSDPParams, optimizers."""
        if not self._modules.references and not self._strays:
            self._list()
        return self._modules.references, self._strays, self._sharded, self._optimizers

    def input_storages(self) -> set[int]:
        """Identities of the live tensors passed to the newest forward. Without those found in the callers' variables:
        a leak that grows there would be taken for a part of the batch."""
        return {identity for tensor in _alive(self._inputs[: self._handed]) for identity, _, _ in storages(tensor)}

    def _each_buffer(self, *, fresh: bool = True) -> Living[Tensor]:
        """All buffers. Without `fresh` from the cache, if all are alive."""
        known = self._buffers
        if known.live and not fresh:
            return known
        self._one_freed |= not fresh
        modules = self._living_modules()
        known.keep([each for module in modules for each in module._buffers.values() if each is not None])
        return known

    def _living_modules(self) -> list[Module]:
        living = self._modules.some()
        if self._modules.freed:
            self._modules = Living(living)
        return living

    def _same_lists(self) -> bool:
        """Whether C++ says that the modules have exactly the parameters and buffers that are listed."""
        known, buffers, lists = self._known, self._buffers, self._lists
        if lists is None or self._partitioned or not (known.live and buffers.live):
            return False
        lists.expect(self._modules, known, self._of_modules, buffers)
        return lists.same() and known.live and buffers.live  # a property may have run anything

    def _lasting(
        self, sums: _Sums, parameters: Living[Tensor], gathered: set[int], index: int, *, fresh: bool, changed: bool
    ) -> _Lasting:
        buffers = self._each_buffer(fresh=changed)
        look, self._one_freed = fresh or self._one_freed, False
        others = sums.weights.read(parameters, index, look=look)
        others |= sums.buffers.read(buffers, index, look=look)
        state = self._state(sums, gathered, index, fresh)
        kept = sums.lasting
        if kept is None or others or kept.state is not state or kept.gathered != gathered:
            claimed = gathered.copy()
            own = sums.weights.claim(claimed), sums.buffers.claim(claimed)
            both = claimed | state.claimed
            kept = sums.lasting = _Lasting(gathered, claimed - gathered, both, array("q", sorted(both)), *own, state)
        return kept

    def _state(self, sums: _Sums, gathered: set[int], index: int, fresh: bool) -> _State:
        optimizers = list(_alive(self._optimizers))
        same = self._same_state(sums, optimizers)
        self._state_uses += fresh
        kept = sums.state
        if same and kept is not None and self._state_uses < _STATE_EVERY_FRESH:
            return kept
        mark = tuple([_state_mark(optimizer) for optimizer in optimizers])
        if kept is None or kept.mark != mark or None in mark or self._state_uses >= _STATE_EVERY_FRESH:
            self._state_uses = 0
            before = {*sums.weights.found.by_identity, *sums.buffers.found.by_identity} - gathered
            claimed = before.copy()
            sums.states.read(Held([each for optimizer in optimizers for each in state_tensors(optimizer)]), index)
            total = sums.states.claim(claimed)
            sums.state = kept = _State(mark, frozenset(claimed - before), total)
        return kept

    def _same_state(self, sums: _Sums, optimizers: list[Optimizer]) -> bool:
        """Whether C++ says that no mark has changed since the last call, for the same device."""
        if self._native is None:
            return False
        with_state = [stepping(each) for each in optimizers]
        known = [first.optimizer() for first in sums.firsts]
        if len(known) != len(with_state) or not all(map(is_, known, with_state)):
            sums.firsts = [FirstEntry(self._native, each) for each in with_state]
        same = [first.same(each.state) for first, each in zip(sums.firsts, with_state, strict=True)]
        return all(same)  # of each: they note what they see

    def _list(self) -> None:
        """Walks all modules of all models, and keeps flat lists for later calls."""
        self._strays, self._ddp, self._sharded, self._flat, self._zero = [], [], [], [], []
        modules: list[Module] = []
        self.views = set()
        seen: set[int] = set()
        for model in _alive(self._models):
            for module in model.modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                if module._parameters or module._buffers:
                    modules.append(module)
                if type(module).__name__ == "DistributedDataParallel":
                    self._ddp.append(weakref.ref(module))
                    if getattr(module, "gradient_as_bucket_view", False):
                        self.views.update(id(parameter) for parameter in module.parameters())
                elif (keeper := zero.keeper(module)) is not None:
                    self._zero.append(weakref.ref(keeper))
                self._sharded += [weakref.ref(each) for each in fsdp_parameters(module)]
                flat = flat_parameter(module)
                if flat is not None:
                    self._flat.append(weakref.ref(flat))
        self._modules = Living(modules)
        self._partitioned = False
        self._known.forget()
        parameters = self._parameters().some()
        self._partitioned = any(zero.partition(parameter) is not None for parameter in parameters)
        owned = {id(parameter) for parameter in parameters}
        for optimizer in _alive(self._optimizers):
            for group in optimizer.param_groups:
                self._strays += [weakref.ref(p) for p in group["params"] if id(p) not in owned]
        self._known.forget()
        self._buffers.forget()

    def _parameters(self, *, fresh: bool = True) -> Living[Tensor]:
        """All parameters. Without `fresh` from the cache, if all are alive and neither FSDP nor ZeRO is used."""
        known = self._known
        cached = not (self._sharded or self._flat or self._zero)
        if cached and not fresh:
            if known.live:
                return known
            self._one_freed = True
        modules = self._living_modules()
        found: list[Tensor] = [
            parameter for module in modules for parameter in module._parameters.values() if parameter is not None
        ]
        self._of_modules = len(found)
        found += [sharded.sharded_param for sharded in _alive(self._sharded)]
        found += [flat._local_shard for flat in _alive(self._flat) if hasattr(flat, "_local_shard")]
        found += _alive(self._strays)
        if self._partitioned:
            found += [part for parameter in found if (part := zero.partition(parameter)) is not None]
        for optimizer in _alive(self._zero):
            found += zero.masters(optimizer)
        known.keep(found)
        return known

    def _gradients(
        self, sums: _Sums, parameters: Living[Tensor], claimed: Claimed, ids: array[int], index: int
    ) -> tuple[int, int]:
        """Bytes of gradients with their own storage, and of the storages that the others are views of."""
        owned: list[Tensor] = []
        for sharded in _alive(self._sharded):
            gradient = getattr(sharded, "unsharded_accumulated_grad", None)  # no_sync: not yet reduced
            if gradient is not None:
                owned.append(gradient)
        for flat in _alive(self._flat):  # kept until the next forward, even after zero_grad on its views
            owned += [g for g in (flat.grad, getattr(flat, "_saved_grad_shard", None)) if g is not None]
        for optimizer in _alive(self._zero):
            owned += zero.gradients(optimizer)
        owned += [each.grad for each in _alive(self._inputs) if each.is_leaf and each.grad is not None]
        viewed = self.views
        others: Group[Tensor] = parameters
        if viewed:
            listed = parameters.some()
            others = Held([each for each in listed if id(each) not in viewed])
            sums.views.read(NONE, index, of=Held([each for each in listed if id(each) in viewed]))
        gradients = sums.gradients
        gradients.read(Held(owned) if owned else NONE, index, of=others)
        found = gradients.found
        if claimed.others:
            total = sum([nbytes for identity, nbytes in found.by_identity.items() if identity not in claimed])
        else:
            total = gradients.beyond(claimed.lasting, ids)
        if len(found):
            claimed.gradients = found
        if not viewed:
            return total, 0
        views = {each: n for each, n in sums.views.found.by_identity.items() if each not in claimed}
        claimed.others.update(views)
        return total, sum(views.values())

    def _bucket_bytes(self, index: int, *, fresh: bool) -> int:
        """Bucket sizes from DDP's logger: 13 µs. With gradient_as_bucket_view the views may temporarily show more."""
        if self._ddp and (fresh or not self._buckets):
            self._buckets = {}
            for module in _alive(self._ddp):
                parameter = next(module.parameters(), None)
                if parameter is not None:
                    where = parameter.get_device()
                    size = sum(bucket_sizes(ddp_logging(module)))
                    self._buckets[where] = self._buckets.get(where, 0) + size
        return self._buckets.get(index, 0)

    def _of_hooks_and_zero(self) -> Iterator[Tensor]:
        for module in _alive(self._ddp):
            yield from hook_tensors(module)
        for optimizer in _alive(self._zero):
            yield from zero.buckets(optimizer)

    def gathered(self) -> Iterator[Tensor]:
        for sharded in _alive(self._sharded):
            yield from sharded.all_gather_outputs
        for flat in _alive(self._flat):
            if hasattr(flat, "_full_param_padded"):  # set by the first forward; empty storage while not gathered
                yield flat._full_param_padded
        if self._partitioned:
            yield from (parameter for parameter in self._known.some() if zero.gathered(parameter))


T = TypeVar("T")
_Refs = list[weakref.ref[T]]


def _alive(references: Iterable[weakref.ref[T]]) -> Iterator[T]:
    return (target for reference in references if (target := reference()) is not None)


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_leaf and tensor.grad is not None


def claim(tensors: Iterable[Tensor], claimed: Claimed, index: int) -> int:
    """Claims all unclaimed storages of `tensors` on one device, and returns their bytes.

    Skips empty storages: FSDP1 frees them at every gathering, and their identity may be reused.
    """
    total = 0
    for tensor in tensors:
        if type(tensor) in _PLAIN and has_storage(tensor):
            if tensor.get_device() == index and (index >= 0 or not tensor.is_meta):
                storage = tensor.untyped_storage()
                identity = storage._cdata
                if identity not in claimed and (nbytes := storage.nbytes()):
                    claimed.others.add(identity)
                    total += nbytes
        else:
            for identity, nbytes, device in storages(tensor):
                if nbytes and identity not in claimed and index_of(device) == index:
                    claimed.others.add(identity)
                    total += nbytes
    return total


def _state_mark(optimizer: Optimizer) -> object:
    """Changes when `optimizer`'s state gains an entry, is loaded or moved. None: nested state, so no such mark."""
    state: Any = stepping(optimizer).state
    first: Any = next(iter(state.values()), {}) if state else {}
    if not isinstance(first, dict) or any(isinstance(value, (dict, list, tuple)) for value in first.values()):
        return None
    places = [place(value) for value in first.values() if isinstance(value, Tensor)]
    return (id(state), len(state), tuple(places))
