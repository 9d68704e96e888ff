"""What one node of autograd's graph keeps for backward: read without unpacking and without a hook.

`_raw_saved_*` gives what a node saved, `SavedTensor.data` the tensor itself, or, where somebody's pack hook changed it,
what that hook returned. Nothing is unpacked: no version is checked, no hook runs, nothing is recomputed. What was
released reads as None. Looked into as well: the attributes of a custom Function's `ctx` (`ctx.x = tensor`), what
non-reentrant checkpointing keeps to run a forward again, and tensors within what a pack hook returned. What else a hook
returned is told by the hook's name, for nobody can look into it.

Source: torch/csrc/autograd/saved_variable.h, torch/utils/checkpoint.py. `SavedTensor.data` came after torch 2.8: before
it a graph cannot be read, and `READABLE` is False.
Known limitations. An object that a `ctx` keeps and that holds tensors in turn is not looked into.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_SavedTensor: Any = torch._C._autograd.SavedTensor
_CustomNode: Any = torch._C._FunctionBase
READABLE = hasattr(_SavedTensor, "data")
CONTEXT = ""
"""stands for the attributes of a custom Function's ctx among the names of `fields`"""

_PREFIX = "_raw_saved_"
_DEPTH_MAX = 3  # of containers within a ctx or what a hook packed


@functools.cache
def fields(kind: Any) -> tuple[str, ...]:
    """The names under which nodes of this class keep tensors."""
    names = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
    return (*names, CONTEXT) if issubclass(kind, _CustomNode) else names


class Reader:
    """Reads nodes of one walk."""

    def __init__(self) -> None:
        self.hidden: dict[str, None] = {}
        """names of pack hooks whose results nobody can look into, in the order in which they were met"""
        self.packed = 0
        """how often a pack hook's result was met"""
        self._frames: set[int] = set()  # of checkpoints, by id: their arguments are kept once

    def read(self, node: Any, name: str) -> list[Tensor]:
        """What `node` keeps under one of its `fields`."""
        if name == CONTEXT:  # a custom Function's node is its ctx
            return [tensor for value in list(vars(node).values()) for tensor in _tensors(value, _DEPTH_MAX)]
        try:
            kept = getattr(node, name)
        except RuntimeError:  # released: some kinds of node raise, the others say None
            return []
        if type(kept) is _SavedTensor and type(data := kept.data) is Tensor:  # nearly always
            return [data]
        found: list[Tensor] = []
        for each in kept if isinstance(kept, tuple) else (kept,):
            if isinstance(each, _SavedTensor):
                data = each.data
                if isinstance(data, Tensor):
                    found.append(data)
                elif data is not None:
                    found += self._packed(each, data)
        return found

    def _packed(self, kept: Any, data: Any) -> Iterator[Tensor]:
        """What stands behind something that a pack hook returned."""
        self.packed += 1
        hook = kept.unpack_hook
        frame = next((cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()), None)
        arguments = getattr(frame, "saved_args", None)
        if arguments is not None:  # a non-reentrant checkpoint, which holds nothing else
            if id(frame) not in self._frames:
                self._frames.add(id(frame))
                for each in arguments:
                    yield from _tensors(each.data if isinstance(each, _SavedTensor) else each, _DEPTH_MAX)
            return
        found = list(_tensors(data, _DEPTH_MAX))
        yield from found
        if not found:
            self.hidden[getattr(hook, "__qualname__", type(hook).__name__)] = None


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, depth - 1)
