"""What one node of autograd's graph keeps for backward: read without unpacking and without a hook.

`_raw_saved_*` gives what a node saved, `SavedTensor.data` the tensor itself, or, where somebody's pack hook changed it,
what that hook returned. Nothing is unpacked: no version is checked, no hook runs, nothing is recomputed. What was
released reads as None. Looked into as well: the attributes of a custom Function's `ctx` (`ctx.x = tensor`), what
non-reentrant checkpointing keeps to run a forward again, and tensors within what a pack hook returned. What else a hook
returned is told by the hook's name, for nobody can look into it.

`SavedTensor.data` came after torch 2.8. Before it a saved tensor can only be unpacked (`_saved_*`), which gives a
tensor on the same storage; a version that does not match raises, here, and changes nothing. But it would run an unpack
hook, and nobody can ask whether there is one: so there it is watched whether hooks are ever set (`Watch`), and from
then on no graph is read.

Source: torch/csrc/autograd/saved_variable.h, torch/utils/checkpoint.py.
Known limitations. An object that a `ctx` keeps and that holds tensors in turn is not looked into. Before torch 2.9:
nothing is known with saved-tensor hooks (non-reentrant checkpointing, save_on_cpu), nor of what was changed in place
after it was saved.
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
"""else what is saved can only be unpacked"""
_SETS_HOOKS = (
    (torch._C._autograd, "_push_saved_tensors_default_hooks"),  # torch.autograd.graph.saved_tensors_hooks
    (SavedTensor, "register_hooks"),
)
READABLE = HAS_DATA or all(hasattr(owner, name) for owner, name in _SETS_HOOKS)
CONTEXT = ""
"""stands for the attributes of a custom Function's ctx among the names of `fields`"""

_PREFIX = "_raw_saved_"
_DEPTH_MAX = 3  # of containers within a ctx or what a hook packed


@functools.cache
def fields(kind: Any) -> tuple[str, ...]:
    """The names under which nodes of this class keep tensors."""
    names = tuple(name for name in dir(kind) if name.startswith(_PREFIX))
    return (*names, CONTEXT) if issubclass(kind, _CustomNode) else names


class Watch:
    """Where saved tensors have to be unpacked: whether a hook was ever set that this would run.

    And whether a checkpoint runs a part of the forward again, which no graph tells there.
    """

    def __init__(self) -> None:
        self.hooked = False
        self.recomputed = False  # a checkpoint has run a part of the forward again
        self._patches = Patches()
        if not HAS_DATA and READABLE:
            for owner, name in _SETS_HOOKS:
                self._patches.observe(owner, name, self._note, lambda *_: None)

    def stop(self) -> None:
        """Puts back what is torch's."""
        self._patches.restore()

    def _note(self, pack: Any = None, *_: Any, **__: Any) -> None:
        self.hooked = True
        if type(pack) is FunctionType and pack.__qualname__.startswith("_recomputation_hook."):
            self.recomputed = True


class Reader:
    """Reads nodes of one walk."""

    def __init__(self) -> None:
        self.hidden: dict[str, None] = {}
        """names of pack hooks whose results nobody can look into, in the order in which they were met"""
        self.packed = 0
        """how often a pack hook's result was met"""
        self.recomputes = False
        """whether a checkpoint was met that will run a part of the forward again"""
        self._frames: set[int] = set()  # of checkpoints, by id: their arguments are kept once

    def read(self, node: Any, name: str) -> list[Tensor]:
        """What `node` keeps under one of its `fields`."""
        if name == CONTEXT:  # a custom Function's node is its ctx
            return [tensor for value in list(vars(node).values()) for tensor in tensors_within(value, _DEPTH_MAX)]
        try:
            kept = getattr(node, name) if HAS_DATA else _unpack(node, name)
        except RuntimeError as error:  # released: some kinds of node raise, the others say None
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
        """What stands behind something that a pack hook returned."""
        self.packed += 1
        hook = kept.unpack_hook
        frame = next((cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()), None)
        arguments = getattr(frame, "saved_args", None)
        if arguments is not None:  # a non-reentrant checkpoint, which holds nothing else
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
    with torch._C._DisableTorchDispatch():  # a dispatch mode of the user's would see a detach
        return getattr(node, _unpacked(name, isinstance(node, _CustomNode)))


@functools.cache
def _unpacked(name: str, custom: bool) -> str:
    """_raw_saved_self → _saved_self; of a custom Function, _raw_saved_tensors → saved_tensors."""
    return name.removeprefix("_raw_" if custom else "_raw")
