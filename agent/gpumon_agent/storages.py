"""The storages behind a tensor, and what identifies each, so that its bytes are counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from sys import getrefcount
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from gpumon_agent.guard import pass_on

SMALL_BYTES = 16_384
INPUT_DEPTH_MAX = 6  # containers within one another, in what a model is given or returns
_PIECES, _ID_BITS = 127, 4
V = TypeVar("V")
_PLAIN = (Tensor, Parameter)
has_storage: Callable[[Tensor], bool] = torch._C._has_storage
"""Of its own: a sparse tensor has none, nor has one within torch.func's transforms (`untransformed`)."""
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


class Pieces(Generic[V]):
    """A dict of very many entries. No call takes long: it grows, and goes away, in pieces."""

    def __init__(self) -> None:
        self._pieces: list[dict[object, V]] = [{} for _ in range(_PIECES)]

    def get(self, key: object) -> V | None:
        return self._pieces[(hash(key) >> _ID_BITS) % _PIECES].get(key)

    def __contains__(self, key: object) -> bool:
        return key in self._pieces[(hash(key) >> _ID_BITS) % _PIECES]

    def __setitem__(self, key: object, value: V) -> None:
        self._pieces[(hash(key) >> _ID_BITS) % _PIECES][key] = value

    def clear(self) -> Iterator[None]:
        """Yields after every piece."""
        for piece in self._pieces:
            piece.clear()
            yield


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold `tensor`'s memory: itself, a DTensor's local shard, a quantized one's parts, …

    Tensors on the meta device hold none.
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
        detached = tensor.detach()  # the parts of one that requires a gradient would be recorded
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
    """Not a FakeTensor, nor a wrapper subclass without `__tensor_flatten__`: its storage raises when asked where."""
    storage = tensor.untyped_storage()
    if storage.device.type == "meta":  # a FakeTensor's, which warns when asked
        return False
    try:
        storage.data_ptr()
    except RuntimeError as error:
        pass_on(error)
        return False
    return True


def tensors_within(value: object, depth: int = 8) -> Iterator[Tensor]:
    """The tensors in dicts, lists and tuples, which may lie in one another `depth` deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_within(each, depth - 1)


def tensors_in(value: object, depth: int = INPUT_DEPTH_MAX) -> Iterator[Tensor]:
    """The tensors in what a model is given or returns: mappings and dataclasses too, as libraries' outputs are."""
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
    """Inside torch.func's transforms (vmap, grad) a tensor stands for the one that has the storage: that one."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def storages(tensor: Tensor) -> Iterator[tuple[int, int, torch.device]]:
    """(identity, bytes, device) of each storage behind `tensor`. Identities hold as long as the storage lives."""
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
    """Whether nothing else has `tensor`'s storage, which begins where it does. Asked without making an object of it.

    False where this torch cannot tell, and where somebody has asked for the storage.
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
    """Whether `tensor` is so small, and alone in its storage, that its own size is taken for the storage's.

    To ask for a storage makes an object of 90 bytes that stays with it, and that the garbage collector goes through.
    A large tensor is asked all the same: it may be the part that was kept of a storage once cut to pieces.
    """
    return tensor.nbytes <= SMALL_BYTES and alone(tensor)


def _counts(values: list[Any]) -> list[int]:
    return [getrefcount(value) for value in values]


def _count_of_one() -> int:
    one = {0: object()}
    return _counts(list(one.values()))[0]


_HELD_BY_ONE_DICT = _count_of_one()


def held_once(values: list[Any]) -> list[bool]:
    """Of a list of a dict's values: whether that dict alone has each, so that it is met nowhere else."""
    return [count <= _HELD_BY_ONE_DICT for count in _counts(values)]


def shared(identity: int) -> bool:
    """Whether more than one tensor has the storage, of which Python's object is there; True where nobody can tell."""
    return _users is None or _users(identity) > 2


def elements(tensor: Tensor) -> int:
    """How many elements of `tensor` this process holds: of a DTensor, its local shard's."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor.numel() if local is None else int(local.numel())
