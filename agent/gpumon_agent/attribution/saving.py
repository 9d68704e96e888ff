"""Reads the tensors that one autograd node saved for backward, without unpacking and without hooks.

`_raw_saved_*` returns SavedTensors; `SavedTensor.data` is the tensor, or the result of a pack hook. Nothing is
unpacked: no version check, no hook, no recomputation. Released tensors read as None. We also read the attributes of a
custom Function's `ctx` (`ctx.x = tensor`), the arguments that non-reentrant checkpointing keeps for recomputation, and
tensors inside a pack hook's result. Other results are opaque, and reported by the hook's name.

Before torch 2.9 there is no `SavedTensor.data`. A saved tensor can then only be unpacked (`_saved_*`), which gives a
tensor on the same storage; a version mismatch raises here without side effects. But unpacking runs unpack hooks, and
torch cannot tell whether there are any. `SavedTensorWatch` detects whether hooks are ever set, which ends the reading.

Source: torch/csrc/autograd/saved_variable.h, torch/utils/checkpoint.py.
Known limitations. Objects in a `ctx` that hold tensors are opaque. Before torch 2.9: nothing is known with
saved-tensor hooks (non-reentrant checkpointing, save_on_cpu), nor of tensors changed in place after they were saved.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from gpumon_agent.guard import pass_on
from gpumon_agent.patching import Patches
from gpumon_agent.storages import tensors_within

SavedTensor: Any = torch._C._autograd.SavedTensor
_CustomNode: Any = torch._C._FunctionBase
HAS_DATA = hasattr(SavedTensor, "data")
"""if not, saved tensors can only be unpacked"""
_SETS_HOOKS = (
    (torch._C._autograd, "_push_saved_tensors_default_hooks"),  # torch.autograd.graph.saved_tensors_hooks
    (SavedTensor, "register_hooks"),
)
READABLE = HAS_DATA or all(hasattr(owner, name) for owner, name in _SETS_HOOKS)
CONTEXT = ""
"""the name in `fields` for the attributes of a custom Function's ctx"""

_PREFIX = "_raw_saved_"
_DEPTH_MAX = 3  # nested containers in a ctx or a pack hook's result


@functools.cache
def fields(kind: Any) -> tuple[str, ...]:
    """The attributes under which nodes of this class save tensors."""
    names = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
    return (*names, CONTEXT) if issubclass(kind, _CustomNode) else names


class SavedTensorWatch:
    """Before torch 2.9: detects whether saved-tensor hooks were ever set, and whether a checkpoint recomputes."""

    def __init__(self) -> None:
        self.hooked = False
        self.recomputed = False  # a checkpoint that recomputes was used
        self._patches = Patches()
        if not HAS_DATA and READABLE:
            for owner, name in _SETS_HOOKS:
                self._patches.observe(owner, name, self._note, lambda *_: None)

    def stop(self) -> None:
        self._patches.restore()

    def _note(self, pack: Any = None, *_: Any, **__: Any) -> None:
        self.hooked = True
        if type(pack) is FunctionType and pack.__qualname__.startswith("_recomputation_hook."):
            self.recomputed = True


class NodeReader:
    """Reads nodes of one walk."""

    def __init__(self) -> None:
        self.hidden: dict[str, None] = {}
        """names of pack hooks whose results are opaque, in the order met"""
        self.packed = 0
        """number of pack hook results met"""
        self.recomputes = False
        """whether a checkpoint was met that will recompute a part of the forward"""
        self._frames: set[int] = set()  # ids of checkpoints that were read

    def read(self, node: Any, name: str) -> list[Tensor]:
        """Tensors that `node` saved under one of its `fields`."""
        if name == CONTEXT:  # a custom Function's node is its ctx
            return [tensor for value in list(vars(node).values()) for tensor in tensors_within(value, _DEPTH_MAX)]
        try:
            kept = getattr(node, name) if HAS_DATA else _unpack(node, name)
        except RuntimeError as error:  # released: some node types raise, others return None
            pass_on(error)
            return []
        if not HAS_DATA:
            return [each for each in (kept if isinstance(kept, (tuple, list)) else (kept,)) if isinstance(each, Tensor)]
        if type(kept) is SavedTensor and type(data := kept.data) is Tensor:  # nearly always
            return [data]
        found: list[Tensor] = []
        for each in kept if isinstance(kept, tuple) else (kept,):
            if isinstance(each, SavedTensor):
                data = each.data
                if isinstance(data, Tensor):
                    found.append(data)
                elif data is not None:
                    found += self._packed(each, data)
        return found

    def _packed(self, kept: Any, data: Any) -> Iterator[Tensor]:
        """Tensors behind a pack hook's result."""
        self.packed += 1
        hook = kept.unpack_hook
        frame = next((cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()), None)
        arguments = getattr(frame, "saved_args", None)
        if arguments is not None:  # a non-reentrant checkpoint, which saves only its arguments
            self.recomputes = True
            if id(frame) not in self._frames:
                self._frames.add(id(frame))
                for each in arguments:
                    yield from tensors_within(each.data if isinstance(each, SavedTensor) else each, _DEPTH_MAX)
            return
        found = list(tensors_within(data, _DEPTH_MAX))
        yield from found
        if not found:
            self.hidden[getattr(hook, "__qualname__", type(hook).__name__)] = None


def _unpack(node: Any, name: str) -> Any:
    with torch._C._DisableTorchDispatch():  # the user's dispatch modes would see a detach
        return getattr(node, _unpacked(name, isinstance(node, _CustomNode)))


@functools.cache
def _unpacked(name: str, custom: bool) -> str:
    """_raw_saved_self → _saved_self; for a custom Function, _raw_saved_tensors → saved_tensors."""
    return name.removeprefix("_raw_" if custom else "_raw")
