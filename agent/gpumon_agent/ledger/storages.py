"""Which storages stand behind a tensor: the identity by which bytes are counted once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold `tensor`'s memory: itself, a DTensor's local shard, a quantized one's parts, …

    Tensors on the meta device hold none.
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:
        if tensor.device.type != "meta":
            yield tensor
        return
    parts: list[Any]
    if hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    elif tensor.layout in _SPARSE_PARTS:
        detached = tensor.detach()  # the parts of one that requires a gradient would be recorded
        parts = [getattr(detached, name)() for name in _SPARSE_PARTS[tensor.layout]]
    elif tensor.layout is torch.strided and tensor.device.type != "meta":
        yield tensor
        return
    else:
        return
    for part in parts:
        if isinstance(part, Tensor):
            yield from plain(part)


def tensors_within(value: object, depth: int = 8) -> Iterator[Tensor]:
    """The tensors in dicts, lists and tuples, which may lie in one another `depth` deep."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)) and depth:
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_within(each, depth - 1)


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


def elements(tensor: Tensor) -> int:
    """How many elements of `tensor` this process holds: of a DTensor, its local shard's."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor.numel() if local is None else int(local.numel())
