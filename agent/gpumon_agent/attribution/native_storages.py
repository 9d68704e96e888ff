"""Reads the storages of many tensors, and compares modules' dicts, in one call of a C++ function (storages.cpp)."""

from __future__ import annotations

import ctypes
import sysconfig
import weakref
from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from gpumon_agent import compiled
from gpumon_agent.guard import pass_on
from gpumon_agent.storages import CPU, impl_at

_TYPES = (Tensor, Parameter)
_WORDS = 2  # of a storage: its identity, its bytes
_WORD_BYTES = 8
_ENTRIES = 64
_POINTER, _NUMBER, _OBJECT = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object


T = TypeVar("T")
_T = TypeVar("_T", covariant=True)


class Group(Protocol[_T]):
    """Objects by their ids. All of them live while `freed` is empty."""

    ids: array[int]
    freed: list[object]

    def some(self) -> Sequence[_T]:
        """Those that live."""


class _Plain(ctypes.Structure):
    _fields_ = [("types", _POINTER * len(_TYPES)), ("impl_at", _NUMBER)]


class _Reading(ctypes.Structure):
    _fields_ = [
        ("plain", _Plain),
        ("device", _NUMBER),
        ("tensors", _POINTER),
        ("tensor_count", _NUMBER),
        ("tensors_freed", _OBJECT),
        ("parameters", _POINTER),
        ("parameter_count", _NUMBER),
        ("parameters_freed", _OBJECT),
        ("found", _POINTER),
        ("found_count", _NUMBER),
    ]


class _First(ctypes.Structure):
    _fields_ = [
        ("plain", _Plain),
        ("optimizer", _OBJECT),
        ("name", _OBJECT),
        ("state", _POINTER),
        ("size", _NUMBER),
        ("found", _POINTER),
        ("found_count", _NUMBER),
        ("room", _NUMBER),
    ]


class _Values(ctypes.Structure):
    _fields_ = [("name", _OBJECT), ("known", _POINTER), ("count", _NUMBER)]


class _Lists(ctypes.Structure):
    _fields_ = [
        ("modules", _POINTER),
        ("count", _NUMBER),
        ("freed", _OBJECT),
        ("names", _Values * 2),
        ("none", _OBJECT),
    ]


class _Look(ctypes.Structure):
    _fields_ = [
        ("lists", _POINTER),
        ("readings", _POINTER),
        ("count", _NUMBER),
        ("firsts", _POINTER),
        ("first_count", _NUMBER),
        ("owned", _POINTER),
        ("owned_count", _NUMBER),
        ("table", _POINTER),
        ("size", _NUMBER),
        ("given", _POINTER),
        ("room", _NUMBER),
        ("result", _POINTER),
    ]


class _Alive(ctypes.Structure):
    _fields_ = [
        ("references", _POINTER),
        ("identities", _POINTER),
        ("count", _NUMBER),
        ("device", _NUMBER),
        ("taken", _POINTER),
        ("taken_count", _NUMBER),
        ("found", _POINTER),
        ("found_count", _NUMBER),
        ("bytes", _NUMBER),
    ]


class Native(NamedTuple):
    read: Any
    beyond: Any
    has: Any
    same_first: Any
    look: Any
    alive: Any
    same_lists: Any
    plain: _Plain
    """the types whose memory is a storage of their own"""


class Found:
    """Storages that C++ has found: identity and bytes of each."""

    __slots__ = ("_has", "_words", "count")

    def __init__(self, native: Native, words: array[int], count: int) -> None:
        self._has = native.has
        self._words = words
        self.count = count

    def by_identity(self) -> dict[int, int]:
        """identity → bytes"""
        words = self._words[: _WORDS * self.count]
        return dict(zip(words[::_WORDS], words[1::_WORDS], strict=True))

    def has(self, identity: object) -> bool:
        has: bool = self._has(self._words.buffer_info()[0], self.count, identity)
        return has


class Words:
    """The storages of tensors on one device, and of the gradients of parameters, as they were found last."""

    def __init__(self, native: Native) -> None:
        self._native = native
        self._read = native.read
        self._words = array("q")
        self._asked: tuple[array[int], array[int], int] | None = None
        self._reading = _Reading(plain=native.plain, found_count=-1)
        self.address = ctypes.addressof(self._reading)

    def read(self, tensors: Group[Tensor], parameters: Group[Tensor], device: int) -> bool | None:
        """Whether they changed since the last call. None: one of the tensors is not plain (a subclass, sparse, on the
        meta device), or was freed."""
        asked = self._asked
        if asked is None or asked[0] is not tensors.ids or asked[1] is not parameters.ids or asked[2] != device:
            self._ask(tensors, parameters, device)
        changed = self._read(self.address)
        return None if changed < 0 else changed > 0

    def _ask(self, tensors: Group[Tensor], parameters: Group[Tensor], device: int) -> None:
        reading = self._reading
        words = _WORDS * (len(tensors.ids) + len(parameters.ids))
        if len(self._words) < words:
            self._words = _words(words)
            reading.found_count = -1
        reading.found, reading.device = self._words.buffer_info()[0], device
        reading.tensors, reading.tensor_count = tensors.ids.buffer_info()
        reading.parameters, reading.parameter_count = parameters.ids.buffer_info()
        reading.tensors_freed, reading.parameters_freed = tensors.freed, parameters.freed
        self._asked = tensors.ids, parameters.ids, device

    @property
    def read_of(self) -> tuple[array[int], ...]:
        """The ids of what is read."""
        return self._asked[:2] if self._asked is not None else ()

    @property
    def count(self) -> int:
        """How many; -1: unknown."""
        count: int = self._reading.found_count
        return count

    def beyond(self, owned: array[int]) -> int:
        """Bytes of those that are not `owned`."""
        table = _table(self.count)
        to, words = table.buffer_info()
        found = self._words.buffer_info()[0]
        total: int = self._native.beyond(found, self.count, *owned.buffer_info(), to, words // _WORDS)
        return total

    @property
    def room(self) -> int:
        """The most that can be found."""
        return len(self._words) // _WORDS

    def found(self) -> Found:
        """Valid until the next call of `read`."""
        return Found(self._native, self._words, self.count)


class FirstEntry:
    """The first entry of an optimizer's state, as it was found last. Keeps the optimizer by weak reference."""

    def __init__(self, native: Native, optimizer: Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self._words = words = _words(_WORDS * _ENTRIES)
        first = _First(native.plain, self.optimizer, "state", size=-1, found=words.buffer_info()[0], room=_ENTRIES)
        self._first = first
        self.address = ctypes.addressof(first)
        self._same = partial(native.same_first, self.address)

    def same(self, state: object) -> bool:
        """Whether `state` is the same object, with as many entries as in the last call, and the first one's storages
        are the same."""
        same: bool = self._same(state)
        return same


class Lists:
    """Modules, and what their dicts of parameters and buffers are expected to hold, in order, beside None."""

    def __init__(self, native: Native) -> None:
        self._lists = _Lists(none=None)
        self._lists.names[0].name, self._lists.names[1].name = "_parameters", "_buffers"
        self.address = ctypes.addressof(self._lists)
        self._same = partial(native.same_lists, self.address)
        self._of: tuple[array[int], ...] = ()

    def expect(self, modules: Group[Module], parameters: Group[Tensor], count: int, buffers: Group[Tensor]) -> None:
        """Of the parameters the first `count`. All of them must live when C++ reads this."""
        of, lists = self._of, self._lists
        if not (of and of[0] is modules.ids and of[1] is parameters.ids and of[2] is buffers.ids):
            self._of = modules.ids, parameters.ids, buffers.ids
            lists.modules, lists.count = modules.ids.buffer_info()
            lists.freed = modules.freed
            lists.names[0].known = parameters.ids.buffer_info()[0]
            lists.names[1].known, lists.names[1].count = buffers.ids.buffer_info()
        lists.names[0].count = count

    def same(self) -> bool:
        same: bool = self._same()
        return same


class Look:
    """Reads what was read last of several, in one call."""

    def __init__(
        self,
        native: Native,
        words: Sequence[Words],
        firsts: Sequence[FirstEntry],
        owned: array[int],
        lists: Lists,
    ) -> None:
        self._of = words, firsts, owned, lists
        self._words, self._firsts = (array("Q", [each.address for each in of]) for of in (words, firsts))
        self._table, self._given = _table(words[0].room), _words(_WORDS * _ENTRIES)
        self._look = look = _Look(lists.address, *self._words.buffer_info(), *self._firsts.buffer_info())
        look.owned, look.owned_count = owned.buffer_info()
        look.table, look.size = self._table.buffer_info()[0], len(self._table) // _WORDS
        look.given, look.room = self._given.buffer_info()[0], _ENTRIES
        self.result = array("q", (-1, -1, 0, 0))
        """bytes of what the first reading found that are not owned; how many storages of the inputs are neither, -1:
        Python must look; their bytes; whether `living` was read, but for all these"""
        look.result = self.result.buffer_info()[0]
        self._read = partial(native.look, ctypes.addressof(look))
        self.lists = [ids for each in words for ids in each.read_of if ids]
        """the ids of what it reads"""

    def read(self, inputs: list[weakref.ref[Tensor]], living: LivingStorages | None, *, lists: bool) -> int:
        """As gpumon_look."""
        changed: int = self._read(lists, inputs, None if living is None else living.address)
        return changed

    def found(self) -> Found:
        """What the first reading found. Valid until the next one."""
        return self._of[0][0].found()

    def given(self, count: int) -> set[int]:
        """The first storages of the inputs."""
        return set(self._given[: _WORDS * count : _WORDS])


class LivingStorages:
    """Storages by weak references to their Python objects, which live as long as they do."""

    def __init__(self, native: Native) -> None:
        self._native = native
        self._alive = _Alive()
        self.address = ctypes.addressof(self._alive)
        self._identities = array("q")
        self._ids = array("Q")
        self._kept: list[object] = []  # the references, and older ones
        self._words = array("q")

    def __len__(self) -> int:
        """How many lived at the last reading, and were added since."""
        count: int = self._alive.count
        return count

    def add(self, identities: Iterable[int], references: Sequence[object]) -> None:
        """None of them is known and lives."""
        count = len(self)
        del self._identities[count:], self._ids[count:]
        self._kept += references
        self._identities.extend(identities)
        self._ids.extend(map(id, references))
        alive = self._alive
        alive.references, alive.count = self._ids.buffer_info()
        alive.identities = self._identities.buffer_info()[0]
        if len(self._words) < _WORDS * alive.count:
            self._words = _words(_WORDS * alive.count)
            alive.found = self._words.buffer_info()[0]

    def identities(self) -> array[int]:
        return self._identities[: len(self)]

    def keep(self, references: Iterable[object]) -> None:
        """From now on only these, which are of all that live."""
        self._kept = list(references)

    def read(self, device: int, taken: array[int]) -> tuple[Found, int] | None:
        """Those on `device` that are not `taken`, and their bytes. Forgets the dead ones. None: Python must look."""
        alive = self._alive
        alive.device = device
        alive.taken, alive.taken_count = taken.buffer_info()
        return self.found() if self._native.alive(self.address, None) else None

    def found(self) -> tuple[Found, int]:
        """Those of the last reading, and their bytes."""
        count = self._alive.found_count
        return Found(self._native, self._words[: _WORDS * count], count), self._alive.bytes


def _table(count: int) -> array[int]:
    """For gpumon_beyond, of so many storages."""
    return _words(_WORDS << (2 * count).bit_length())


def _words(count: int) -> array[int]:
    return array("q", bytes(_WORD_BYTES * count))


class Held(Generic[T]):
    """Objects that are kept alive."""

    def __init__(self, objects: Sequence[T] = ()) -> None:
        self._objects = objects
        self.ids = array("Q", map(id, objects))
        self.freed: list[object] = []

    def some(self) -> list[T]:
        return list(self._objects)


def load() -> Native | None:
    """None: it was not built, or gives wrong answers here, or another thread could free a gradient as it is read."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    library: Any = compiled.load()
    if not library:
        return None
    try:
        plain = _Plain((_POINTER * len(_TYPES))(*map(id, _TYPES)), impl_at())
        native = Native(
            library.gpumon_read,
            library.gpumon_beyond,
            library.gpumon_has,
            library.gpumon_same_first,
            library.gpumon_look,
            library.gpumon_alive,
            library.gpumon_same_lists,
            plain,
        )
    except (AttributeError, LookupError) as error:
        pass_on(error)
        return None
    native.read.restype = _NUMBER
    native.read.argtypes = [_POINTER]
    native.beyond.restype = _NUMBER
    native.beyond.argtypes = [_POINTER, _NUMBER, _POINTER, _NUMBER, _POINTER, _NUMBER]
    native.has.restype = ctypes.c_bool
    native.has.argtypes = [_POINTER, _NUMBER, _NUMBER]
    native.same_first.restype = ctypes.c_bool
    native.same_first.argtypes = [_POINTER, _OBJECT]
    native.look.restype = _NUMBER
    native.look.argtypes = [_POINTER, ctypes.c_bool, _OBJECT, _POINTER]
    native.alive.restype = ctypes.c_bool
    native.alive.argtypes = [_POINTER, _OBJECT]
    native.same_lists.restype = ctypes.c_bool
    native.same_lists.argtypes = [_POINTER]
    return native if _is_right(native) else None


def _is_right(native: Native) -> bool:
    """Whether it says the same as torch of tensors and a module of ours."""
    tensors = [torch.ones(3, device="cpu"), torch.ones(8, device="cpu")[2:], torch.empty(0, device="cpu")]
    parameters = [Parameter(each) for each in tensors[:2]]
    parameters[0].grad = gradient = torch.ones(3, device="cpu")
    expected = {_identity(each): each.untyped_storage().nbytes() for each in (*tensors[:2], gradient)}
    words = Words(native)
    group = Held(tensors), Held(parameters)
    if [words.read(*group, CPU), words.read(*group, CPU), words.found().by_identity()] != [True, False, expected]:
        return False
    owned = array("q", list(expected)[:2])
    if words.beyond(owned) != gradient.nbytes:
        return False
    if words.read(Held([torch.ones(1, device="meta")]), Held(), CPU) is not None:
        return False
    module = Module()
    module.register_parameter("none", None)
    for at, parameter in enumerate(parameters):
        module.register_parameter(str(at), parameter)
    module.register_buffer("buffer", tensors[0])
    held, buffers = Held(parameters), Held(tensors[:1])
    lists, same = Lists(native), []
    modules = Held([module])
    for count, known in ((2, buffers), (1, buffers), (2, Held(parameters[:1]))):
        lists.expect(modules, held, count, known)
        same.append(lists.same())
    if same != [True, False, False]:
        return False
    stores = [each.untyped_storage() for each in (*parameters, torch.ones(1, device="cpu"))]
    living = LivingStorages(native)
    living.add([each._cdata for each in stores], [weakref.ref(each) for each in stores])
    stores.pop()
    read = living.read(CPU, array("q", [stores[0]._cdata]))
    return (
        read is not None
        and (read[0].by_identity(), read[1]) == ({stores[1]._cdata: 32}, 32)
        and living.identities().tolist() == [each._cdata for each in stores]
    )


def _identity(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity
