"""Reads the storages of many tensors in one call of a C++ function (storages.cpp)."""

from __future__ import annotations

import ctypes
import sysconfig
from array import array
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gpumon_agent import compiled
from gpumon_agent.guard import pass_on
from gpumon_agent.storages import CPU, impl_at

Read = Callable[[list[Tensor], list[Tensor], int], "array[int] | None"]
"""Tensors, parameters, device → of the tensors, then of the gradients of the parameters: identity and bytes of the
storage of each on that device. None: one of them is not plain (a subclass, sparse, on the meta device)"""
_TYPES = (Tensor, Parameter)


def load() -> Read | None:
    """None: it was not built, or gives wrong answers here, or another thread could free a gradient as it is read."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    library: Any = compiled.load()
    try:
        function: Any = library and library.gpumon_storages
        if function is None:
            return None
        read = _reader(function, impl_at())
    except (AttributeError, LookupError) as error:
        pass_on(error)
        return None
    return read if _is_right(read) else None


def _reader(function: Any, at: int) -> Read:
    types = (ctypes.c_size_t * len(_TYPES))(*map(id, _TYPES))
    function.restype = ctypes.c_int64
    function.argtypes = [
        *(ctypes.py_object, ctypes.c_bool, ctypes.c_int64),
        *(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p),
    ]

    def read(tensors: list[Tensor], parameters: list[Tensor], device: int) -> array[int] | None:
        found = array("q", bytes(16 * (len(tensors) + len(parameters))))
        to, count = found.buffer_info()[0], 0
        for each, gradients in ((tensors, False), (parameters, True)):
            if each:
                written = function(each, gradients, device, types, at, to + 16 * count)
                if written < 0:
                    return None
                count += written
        return found[: 2 * count]

    return read


def _is_right(read: Read) -> bool:
    """Whether it says the same as torch of tensors of ours."""
    tensors = [torch.ones(3, device="cpu"), torch.ones(8, device="cpu")[2:], torch.empty(0, device="cpu")]
    parameters: list[Tensor] = [Parameter(each) for each in tensors[:2]]
    parameters[0].grad = gradient = torch.ones(3, device="cpu")
    expected = [
        word for each in (*tensors[:2], gradient) for word in (_identity(each), each.untyped_storage().nbytes())
    ]
    found = read(tensors, parameters, CPU)
    return found is not None and found.tolist() == expected and read([torch.ones(1, device="meta")], [], CPU) is None


def _identity(tensor: Tensor) -> int:
    identity: int = tensor.untyped_storage()._cdata
    return identity
