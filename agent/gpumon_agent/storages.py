"""The storages behind a tensor, and their identities, so that bytes are counted once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from sys import getrefcount
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gpumon_agent.guard import pass_on

SMALL_BYTES = 16_384
CPU = -1
"""the CPU's index, as Tensor.get_device() returns it"""
INPUT_DEPTH_MAX = 6  # nested containers in a model's inputs and outputs
_WORD_BYTES = ctypes.sizeof(ctypes.c_size_t)
_PIECES = 127  # a prime: ids and addresses are multiples of 16
V = TypeVar("V")
_PLAIN = (Tensor, Parameter)
has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""Whether it has its own: sparse tensors and those in torch.func's transforms (`untransformed`) have none."""
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def index_of(where: torch.device) -> int:
    """As Tensor.get_device() returns it."""
    return CPU if where.type == "cpu" else where.index or 0


def impl_at() -> int:
    """Bytes from a tensor's address to that of its TensorImpl. Raises LookupError."""
    at = set()
    for tensor in (torch.empty(1, device="cpu"), torch.empty(2, device="cpu")):
        words = (ctypes.c_size_t * (torch.Tensor.__basicsize__ // _WORD_BYTES)).from_address(id(tensor))
        found = [at for at, word in enumerate(words) if word == tensor._cdata]
        if len(found) != 1:
            raise LookupError("a tensor's TensorImpl")
        at.add(found[0] * _WORD_BYTES)
    if len(at) != 1:
        raise LookupError("a tensor's TensorImpl")
    return at.pop()


class Pieces(Generic[V]):
    """A dict for very many entries. No call takes long: it grows, and is freed, in pieces."""

    def __init__(self) -> None:
        self._pieces: list[dict[object, V]] = [{} for _ in range(_PIECES)]

    def get(self, key: object) -> V | None:
        return self._pieces[hash(key) % _PIECES].get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._pieces[hash(key) % _PIECES]

    def __setitem__(self, key: object, value: V) -> None:
        self._pieces[hash(key) % _PIECES][key] = value

    def clear(self) -> Iterator[None]:
        """Yields after every piece."""
        for piece in self._pieces:
            piece.clear()
            yield


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with `tensor`'s memory: itself, a DTensor's local shard, a quantized one's parts, …

    Tensors on the meta device have none.
    """
    if type(tensor) in _PLAIN and has_storage(tensor):
        if tensor.device.type != "meta":
            yield tensor
        return
    tensor = untransformed(tensor)
    parts: list[Any]
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout in _SPARSE_PARTS:
        detached = tensor.detach()  # autograd would record parts of a tensor that requires grad
        parts = [getattr(detached, name)() for name in _SPARSE_PARTS[tensor.layout]]
    elif has_storage(tensor) and tensor.device.type != "meta" and _has_memory(tensor):
        yield tensor
        return
    else:
        return
    for part in parts:
        if isinstance(part, Tensor):
            yield from plain(part)


def _has_memory(tensor: Tensor) -> bool:
    """False for a FakeTensor or a wrapper subclass without `__tensor_flatten__`: its `data_ptr` raises."""
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":  # a FakeTensor's, whose `data_ptr` warns
        return False
    try:
        storage.data_ptr()
    except RuntimeError as error:
        pass_on(error)
        return False
    return True


def tensors_within(value: object, depth: int = 8) -> Iterator[Tensor]:
    """The tensors in dicts, lists and tuples, nested up to `depth` deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_within(each, depth - 1)


def tensors_in(value: object, depth: int = INPUT_DEPTH_MAX) -> Iterator[Tensor]:
    """The tensors in a model's inputs or outputs, including mappings and dataclasses (libraries' outputs)."""
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
            yield from tensors_in(each, depth - 1)


def untransformed(tensor: Tensor) -> Tensor:
    """The tensor with the storage, behind a wrapper of torch.func's transforms (vmap, grad)."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Its shape; of a nested tensor, whose dimensions are not all numbers, that of its values."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    values = next(plain(tensor), tensor)
    return (values.numel(),) if values.is_nested else tuple(values.shape)


def storages(tensor: Tensor) -> Iterator[tuple[int, int, torch.device]]:
    """(identity, bytes, device) of each storage behind `tensor`. Identities are valid while the storage lives."""
    for part in plain(tensor):
        storage = part.untyped_storage()
        yield storage._cdata, storage.nbytes(), part.device


def addresses(tensor: Tensor) -> Iterator[tuple[int, int, int]]:
    """(address, bytes, device) of each storage behind `tensor` that has any; the device as `Tensor.get_device()`."""
    for part in plain(tensor):
        storage = part.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes:
            yield storage.data_ptr(), nbytes, part.get_device()


_address: Callable[[Tensor], int] | None = getattr(torch._C, "_storage_address", None)
_users: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def alone(tensor: Tensor) -> bool:
    """Whether only `tensor` uses its storage, from its beginning. Creates no storage object.

    False if this torch cannot say, or if a Python object of the storage exists.
    """
    return (
        _address is not None
        and _users is not None
        and has_storage(tensor)
        and not tensor.storage_offset()
        and not tensor.is_meta
        and _users(_address(tensor)) == 1
        and tensor.is_contiguous()
    )


def small(tensor: Tensor) -> bool:
    """Whether `tensor` is so small, and alone in its storage, that its own size is used as the storage's.

    Reading a storage creates an object of 90 bytes that stays with it and is tracked by the garbage collector. Large
    tensors are read anyway: they may be a kept slice of a larger storage.
    """
    return tensor.nbytes <= SMALL_BYTES and alone(tensor)


def _counts(values: list[Any]) -> list[int]:
    return [getrefcount(value) for value in values]


def _count_of_one() -> int:
    one = {0: object()}
    return _counts(list(one.values()))[0]


_HELD_BY_ONE_DICT = _count_of_one()


def held_once(values: list[Any]) -> list[bool]:
    """For a list of a dict's values: whether only that dict refers to each, so that it occurs nowhere else."""
    return [count <= _HELD_BY_ONE_DICT for count in _counts(values)]


def shared(identity: int) -> bool:
    """Whether several tensors use the storage, whose Python object exists; True if unknown."""
    return _users is None or _users(identity) > 2


def elements(tensor: Tensor) -> int:
    """Number of `tensor`'s elements in this process: of a DTensor, its local shard's."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor.numel() if local is None else int(local.numel())
