"""Reads the storages of many tensors, and compares modules' dicts, in one call of a C++ function (storages.cpp)."""

from __future__ import annotations

import ctypes
import sysconfig
from array import array
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gpumon_agent import compiled
from gpumon_agent.guard import pass_on
from gpumon_agent.storages import CPU, impl_at

_TYPES = (Tensor, Parameter)
_WORDS = 2  # of a storage: its identity, its bytes
_ENTRIES = 64


T = TypeVar("T")
_T = TypeVar("_T", covariant=True)


class Group(Protocol[_T]):
    """Objects by their ids. All of them live while `freed` is empty."""

    ids: array[int]
    freed: list[object]

    def some(self) -> Sequence[_T]:
        """Those that live."""


class Native(NamedTuple):
    storages: Any
    beyond: Any
    has: Any
    first_entry: Any
    same_values: Any
    types: Any
    """those whose memory is a storage of their own"""
    impl_at: int

    def same(self, modules: Group[Module], name: str, known: Group[Tensor], count: int) -> bool:
        """Whether the modules' dicts called `name` hold exactly the first `count` of `known`, in order, and None."""
        to, among = modules.ids.buffer_info()
        ids = known.ids.buffer_info()[0]
        return self.same_values(to, among, modules.freed, name, None, ids, count) and not known.freed


class Words:
    """The storages of tensors on one device: identity and bytes of each, as they were found last."""

    def __init__(self, native: Native) -> None:
        self._native = native
        self._found = array("q")
        self.count = -1
        """how many; -1: unknown"""

    def read(self, tensors: Group[Tensor], parameters: Group[Tensor], device: int) -> bool | None:
        """Of the tensors, then of the gradients of the parameters. Whether they changed since the last call. None: one
        of them is not plain (a subclass, sparse, on the meta device), or was freed."""
        native, before, count, changed = self._native, self.count, 0, 0
        words = _WORDS * (len(tensors.ids) + len(parameters.ids))
        if len(self._found) < words:
            self._found = array("q", bytes(words * self._found.itemsize))
        to = self._found.buffer_info()[0]
        self.count = -1
        for each, gradients in ((tensors, False), (parameters, True)):
            if each.ids:
                at, among = each.ids.buffer_info()
                place = to + count * _WORDS * self._found.itemsize
                read = native.storages(at, among, each.freed, gradients, device, native.types, native.impl_at, place)
                if read < 0:
                    return None
                count += read >> 1
                changed |= read & 1
        self.count = count
        return bool(changed) or count != before

    def found(self) -> dict[int, int]:
        """identity → bytes"""
        words = self._found[: _WORDS * self.count]
        return dict(zip(words[::2], words[1::2], strict=True))

    def beyond(self, owned: array[int]) -> int:
        """Bytes of those that are not `owned`."""
        total: int = self._native.beyond(self._found.buffer_info()[0], self.count, *owned.buffer_info())
        return total

    def has(self, identity: object) -> bool:
        has: bool = self._native.has(self._found.buffer_info()[0], self.count, identity)
        return has


class FirstEntry:
    """The first entry of an optimizer's state, as it was found last."""

    def __init__(self, native: Native) -> None:
        self._native = native
        self._found = array("q", bytes(_WORDS * _ENTRIES * 8))
        self._mark: object = None

    def same(self, state: object) -> bool:
        """Whether `state` has as many entries as in the last call, and the storages of the first are the same."""
        before, native = self._mark, self._native
        to = self._found.buffer_info()[0]
        read = native.first_entry(state, native.types, native.impl_at, to, _ENTRIES)
        self._mark = None if read < 0 else (id(state), len(state), read >> 1)  # type: ignore[arg-type]
        return read >= 0 and not read & 1 and before == self._mark


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
        native = Native(
            library.gpumon_storages,
            library.gpumon_beyond,
            library.gpumon_has,
            library.gpumon_first_entry,
            library.gpumon_same_values,
            (ctypes.c_size_t * len(_TYPES))(*map(id, _TYPES)),
            impl_at(),
        )
    except (AttributeError, LookupError) as error:
        pass_on(error)
        return None
    pointer, number, thing = ctypes.c_void_p, ctypes.c_int64, ctypes.py_object
    native.storages.restype = number
    native.storages.argtypes = [pointer, number, thing, ctypes.c_bool, number, pointer, ctypes.c_int, pointer]
    native.beyond.restype = number
    native.beyond.argtypes = [pointer, number, pointer, number]
    native.has.restype = ctypes.c_bool
    native.has.argtypes = [pointer, number, number]
    native.first_entry.restype = number
    native.first_entry.argtypes = [thing, pointer, ctypes.c_int, pointer, number]
    native.same_values.restype = ctypes.c_bool
    native.same_values.argtypes = [pointer, number, thing, thing, thing, pointer, number]
    return native if _is_right(native) else None


def _is_right(native: Native) -> bool:
    """Whether it says the same as torch of tensors and a module of ours."""
    tensors = [torch.ones(3, device="cpu"), torch.ones(8, device="cpu")[2:], torch.empty(0, device="cpu")]
    parameters = [Parameter(each) for each in tensors[:2]]
    parameters[0].grad = gradient = torch.ones(3, device="cpu")
    expected = {_identity(each): each.untyped_storage().nbytes() for each in (*tensors[:2], gradient)}
    words = Words(native)
    group = Held(tensors), Held(parameters)
    if [words.read(*group, CPU), words.read(*group, CPU), words.found()] != [True, False, expected]:
        return False
    if words.read(Held([torch.ones(1, device="meta")]), Held([]), CPU) is not None:
        return False
    module = Module()
    module.register_parameter("none", None)
    for at, parameter in enumerate(parameters):
        module.register_parameter(str(at), parameter)
    same = [native.same(Held([module]), "_parameters", Held(each), len(each)) for each in (parameters, parameters[:1])]
    return same == [True, False] and not native.same(Held([module]), "_parameters", Held(tensors[:2]), 2)


def _identity(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity
