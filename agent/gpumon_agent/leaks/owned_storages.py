"""Collects the storages that have an owner: a census does not report these. Runs in slices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor
from torch.nn import Module

from gpumon_agent.attribution.inventory import Inventory
from gpumon_agent.storages import plain, storages, tensors_within
from gpumon_agent.thread_clock import ThreadClock

ALIKE_MAX = 3  # unwatched models of one class and size; more suggest a leak of models, so none is an owner
_AT_ONCE = 8
_SEEN = ""  # in place of a buffer's name: marks the module as seen
_Claim = Callable[[Any, int], bool]


class OwnedStorages:
    """Identities of owned storages. Call `run` until it returns True, then use `claimed` or `claim`.

    Of several optimizers for the same parameters only the newest owns its state, and more than `ALIKE_MAX` equal
    unwatched models own nothing: otherwise leaked optimizers or model copies would stay hidden. A buffer that has grown
    or is new since the previous census is unowned too; `sizes` has the bytes of each.
    """

    def __init__(
        self, inventory: Inventory, others: Callable[[], Iterable[Module]], sizes: dict[tuple[int, str], int]
    ) -> None:
        self.claimed: set[int] = set()
        self.addresses: set[int] = set()  # of the claimed storages
        self._gradients: dict[int, weakref.ref[Tensor]] = {}
        self._inventory = inventory
        self._work: Iterator[tuple[_Claim, weakref.ref[Any]]] = iter(())
        self._now: tuple[_Claim, weakref.ref[Any]] | None = None
        self._cursor = 0
        self._others = others
        self._sizes = sizes
        self._listed = False

    def run(self, clock: ThreadClock) -> bool:
        if not self._listed:
            self._list()
            self._listed = True
        while True:
            if self._now is None:
                self._now = next(self._work, None)
                self._cursor = 0
                if self._now is None:
                    return True
            claim, reference = self._now
            target = reference()
            if target is None or claim(target, self._cursor):
                self._now = None
            else:
                self._cursor += _AT_ONCE
            target = None
            if clock.over():
                return False

    def claim(self, identity: int) -> bool:
        """Whether a storage has an owner. Gradients are freed every step and their ids are reused, so the leaf's
        current gradient is checked."""
        if identity in self.claimed:
            return True
        reference = self._gradients.get(identity)
        leaf = reference() if reference is not None else None
        gradient = leaf.grad if leaf is not None else None
        return gradient is not None and any(mine == identity for mine, _, _ in storages(gradient))

    def _list(self) -> None:
        modules, tensors, sharded, optimizers = self._inventory.references()
        newest: dict[int, weakref.ref[Any]] = {}
        for reference in optimizers:
            optimizer = reference()
            if optimizer is not None:
                newest[_first_parameter(optimizer)] = reference
        unwatched: list[weakref.ref[Any]] = []
        alike: dict[tuple[type, int], list[Module]] = {}
        for other in self._others():
            size = sum(1 for _ in islice(other.parameters(), 1_000))
            alike.setdefault((type(other), size), []).append(other)
        for others in alike.values():
            if len(others) <= ALIKE_MAX:
                unwatched += [weakref.ref(each) for other in others for each in other.modules()]
        kinds: tuple[tuple[_Claim, Iterable[weakref.ref[Any]]], ...] = (
            (self._module, modules),
            (self._tensor, tensors),
            (self._shard, sharded),
            (self._optimizer, newest.values()),
            (self._module, unwatched),
        )
        self._work = ((claim, reference) for claim, references in kinds for reference in references)

    def _tensor(self, tensor: Tensor, _: int = 0) -> bool:
        if not tensor.is_meta:
            self._claim(tensor)
        gradient = tensor.grad if tensor.is_leaf else None
        if gradient is not None:
            leaf = weakref.ref(tensor)
            self._gradients.update((identity, leaf) for identity, _, _ in storages(gradient))
        return True

    def _module(self, module: Module, cursor: int) -> bool:
        held = [*module._parameters.items(), *module._buffers.items()]
        for name, tensor in held[cursor : cursor + _AT_ONCE]:
            if tensor is not None and not (name in module._buffers and self._grew(module, name, tensor)):
                self._tensor(tensor)
        complete = cursor + _AT_ONCE >= len(held)
        if complete:
            self._sizes[id(module), _SEEN] = 0
        return complete

    def _grew(self, module: Module, name: str, buffer: Tensor) -> bool:
        """Whether a buffer is larger than at any previous census, or is new in a known module."""
        nbytes = sum(size for _, size, _ in storages(buffer))
        key = id(module), name
        before = self._sizes.get(key, 0 if (id(module), _SEEN) in self._sizes else nbytes)
        self._sizes[key] = max(before, nbytes)
        return nbytes > before

    def _shard(self, record: Any, _: int) -> bool:
        self._tensor(record.sharded_param)
        for tensor in (*record.all_gather_outputs, getattr(record, "unsharded_accumulated_grad", None)):
            if tensor is not None:
                self._claim(tensor)
        return True

    def _optimizer(self, optimizer: Any, cursor: int) -> bool:
        states = list(islice(optimizer.state.values(), cursor, cursor + _AT_ONCE))
        for state in states:
            for tensor in tensors_within(state):
                self._claim(tensor)
        return len(states) < _AT_ONCE

    def _claim(self, tensor: Tensor) -> None:
        for part in plain(tensor):
            storage = part.untyped_storage()
            self.claimed.add(storage._cdata)
            self.addresses.add(storage.data_ptr())


def _first_parameter(optimizer: Any) -> int:
    return next((id(parameter) for group in optimizer.param_groups for parameter in group["params"]), id(optimizer))
