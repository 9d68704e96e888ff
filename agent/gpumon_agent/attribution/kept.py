"""Lists of tensors and their storages, kept by weak reference from one look to the next.

Storages are read again when one of them was freed, or a tensor of their list has another address. That is enough: while
all of them live, no other storage is at the address of one. Lists with tensors without an address (sparse ones,
DTensors) are read at each look. Nothing here keeps a tensor alive.
Cost: 0.2 µs per tensor while nothing changes, nothing without `look`; 1.3 µs per tensor to read. Where C++ is compiled
(storages.cpp), storages are read at each look, for 0.02 µs per tensor, five times that if the caches are cold.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Iterable, Set
from operator import attrgetter, is_
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gpumon_agent.attribution.native_storages import Found, Group, Held, Native, Words
from gpumon_agent.guard import pass_on
from gpumon_agent.storages import has_storage, plain, storages

_PLAIN = frozenset((Tensor, Parameter))
_identity = attrgetter("_cdata")
_nbytes = torch.UntypedStorage.nbytes
_ASKED = 16  # so often a dict of storages is not yet worth its making
T = TypeVar("T")


class Living(Generic[T]):
    """A list of objects, as long as all of them live."""

    def __init__(self, objects: Iterable[T] = ()) -> None:
        self.freed: list[object] = []
        """appended to as one of them is freed, in any thread"""
        self.ids = array("Q")
        self.references: list[weakref.ref[T]] = []
        self._kept = False
        self._keep(list(objects))

    @property
    def live(self) -> bool:
        """Whether a list is kept, and none of it was freed."""
        return self._kept and not self.freed

    def keep(self, objects: list[T]) -> None:
        known = self.some()
        if not self.live or len(known) != len(objects) or not all(map(is_, known, objects)):
            self._keep(objects)
        self._kept = True

    def some(self) -> list[T]:
        """Those that live."""
        found: list[Any] = [reference() for reference in self.references]
        return [each for each in found if each is not None] if self.freed else found

    def forget(self) -> None:
        self._kept = False

    def _keep(self, objects: list[T]) -> None:
        freed: list[object] = []
        self.freed, self.ids = freed, array("Q", map(id, objects))
        self.references = [weakref.ref(each, freed.append) for each in objects]


NONE: Held[Tensor] = Held()


class Storages:
    """Storages of one device: identity → bytes. `found`: as C++ found them, so that no dict is made before it is asked
    for."""

    def __init__(self, found: dict[int, int] | Found) -> None:
        self._found = found
        self._asked = 0

    @property
    def by_identity(self) -> dict[int, int]:
        if isinstance(self._found, Found):
            self._found = self._found.by_identity()
        return self._found

    def __len__(self) -> int:
        return self._found.count if isinstance(self._found, Found) else len(self._found)

    def __contains__(self, identity: object) -> bool:
        self._asked += 1
        if isinstance(self._found, Found) and self._asked < _ASKED:
            return self._found.has(identity)
        return identity in self.by_identity


NO_STORAGES = Storages({})


class Claimed:
    """Identities of the storages that have an owner, by how long they are likely to have it."""

    __slots__ = ("activations", "gradients", "lasting", "others", "seen")

    def __init__(self, lasting: Set[int] = frozenset()) -> None:
        self.lasting = lasting
        """not changed here: shared by all claims while nothing changes"""
        self.gradients = NO_STORAGES
        """likewise"""
        self.activations = NO_STORAGES
        self.others: set[int] = set()
        self.seen = -1
        """how many others there were as C++ found the activations that none of all these owns; -1: it did not"""

    def __contains__(self, identity: int) -> bool:
        return (
            identity in self.others
            or identity in self.lasting
            or (self.gradients is not NO_STORAGES and identity in self.gradients)
            or (self.activations is not NO_STORAGES and identity in self.activations)
        )

    def isdisjoint(self, identities: Set[int]) -> bool:
        return (
            self.others.isdisjoint(identities)
            and self.lasting.isdisjoint(identities)
            and not any(identity in self.gradients or identity in self.activations for identity in identities)
        )


class Sum:
    """The storages of a list of tensors on one device, and of the gradients of a list of parameters."""

    def __init__(self, native: Native | None = None) -> None:
        self.words = native and Words(native)
        self.native = False
        """whether the last call read in C++"""
        self.found = Storages({})
        """without empty ones"""
        self._mark: object = None  # the length of the list, and the first tensor's storage
        self._addresses: list[int] | None = None  # of the tensors; None: some have none
        self._freed: list[object] = []
        self._references: list[weakref.ref[Any]] = []
        self._beyond: tuple[Set[int], int] | None = None

    def read(self, tensors: Group[Tensor], index: int, *, of: Group[Tensor] = NONE, look: bool = True) -> bool:
        """Whether other storages were found. `of`: parameters, whose gradients count, too. Without `look` (and C++) a
        change is noticed only if one is freed, or the list's length or first tensor differs."""
        if self.words is not None and (changed := self.words.read(tensors, of, index)) is not None:
            if changed or not self.native:  # no address is compared: same identity and bytes count the same
                self.native, self._mark, self._addresses, self._references = True, None, None, []
                self.take(self.words.found())
                return True
            return False
        self.native = False
        listed = [*tensors.some()] + [gradient for each in of.some() if (gradient := each.grad) is not None]
        if self._freed or (look and self._addresses is None):
            same = False
        elif look:
            same = _addresses(listed) == self._addresses
        else:
            same = _mark(listed) == self._mark
        if not same:
            self._read(listed, index)
        return not same

    def take(self, found: dict[int, int] | Found) -> None:
        self.found, self._beyond = Storages(found), None

    def beyond(self, owned: Set[int], ids: array[int]) -> int:
        """Bytes of those that are not `owned`, which does not change later, and has these `ids`."""
        if not len(self.found):
            return 0
        if self._beyond is None or self._beyond[0] is not owned:
            if self.native and self.words is not None:
                total = self.words.beyond(ids)
            else:
                found = self.found.by_identity
                total = sum([nbytes for identity, nbytes in found.items() if identity not in owned])
            self._beyond = owned, total
        return self._beyond[1]

    def claim(self, claimed: set[int]) -> int:
        """Claims the unclaimed storages, and returns their bytes."""
        found = self.found.by_identity
        if claimed.isdisjoint(found):
            claimed.update(found)
            return sum(found.values())
        new = found.keys() - claimed
        claimed |= new
        return sum([found[identity] for identity in new])

    def _read(self, tensors: list[Tensor], index: int) -> None:
        freed: list[object] = []
        self._freed, self._mark = freed, _mark(tensors)
        parts, self._addresses = tensors, _addresses(tensors)
        if self._addresses is None or (index < 0 and any(each.is_meta for each in tensors)):
            parts, self._addresses = [part for each in tensors for part in plain(each)], None
        held: list[Any] = list(map(Tensor.untyped_storage, parts))
        self._references = [weakref.ref(storage, freed.append) for storage in held]
        each = zip(map(_identity, held), map(_nbytes, held), map(Tensor.get_device, parts), strict=True)
        self.take({identity: nbytes for identity, nbytes, where in each if nbytes and where == index})


def _addresses(tensors: list[Tensor]) -> list[int] | None:
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        return list(map(Tensor.data_ptr, tensors))
    except RuntimeError as error:  # a sparse one
        pass_on(error)
        return None


def _mark(tensors: list[Tensor]) -> object:
    return len(tensors), place(tensors[0]) if tensors else None


def place(tensor: Tensor) -> object:
    """Changes when another storage takes the place of `tensor`'s."""
    if type(tensor) in _PLAIN and has_storage(tensor):
        storage = tensor.untyped_storage()
        return storage._cdata, storage.nbytes(), tensor.data_ptr()
    return tuple(storages(tensor))
