"""Checkpoints that were loaded: their tensors followed by storage, weakly, until they are gone or somebody owns them.

Model. `torch.serialization._load`, with which torch.load reads a file, and `safetensors.torch.load_file` are watched;
whatever loads a checkpoint for a library ends there. The storages behind the tensors of a result are noted by weak
reference: one that goes reports itself. `load_state_dict`, of a module or a watched optimizer, marks the load whose
tensors it is given (or, where they were converted on the way, the newest one of enough tensors) as used: what lives on
after that, and is no owner's, is retained. What no known load brought and is given to `load_state_dict` before the
first step (from `safetensors.safe_open`, `safetensors.torch.load`, `torch.distributed.checkpoint`, a reader of one's
own) is a load from there on. Where `load_state_dict` is given other tensors than a load's, but of shapes that this one
has too (a library has read the file again by itself), the load is a twin of what was used: it counts once a name is
found that leads to it, if nothing has written to it meanwhile and no parameter has it, as an average of the weights or
a second model would.
Cost: 2 µs a tensor of a load; nothing a step.
Known limitations. Of a file in the format of before torch 1.6 only what is given to `load_state_dict` is seen. Of a
load no more than `TENSORS_MAX` tensors are followed.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gpumon_agent import frames
from gpumon_agent.guard import protect
from gpumon_agent.patching import Patches
from gpumon_agent.registry import REGISTRY
from gpumon_agent.storages import plain

TENSORS_MAX = 200_000
LOADS_MAX = 64  # followed at one time; the oldest is given up
TWINS_LEAST = 2  # tensors: of a single one others of its shape say nothing
TWINS_SHARE = 0.125  # of a load's tensors: those of a model, in a file that has an optimizer's too
GIVEN = "load_state_dict"  # the source of what no known load brought
_HOST = -1  # as Tensor.get_device() has it


class _Followed(weakref.ref[Any]):
    """A storage that a load made."""

    __slots__ = ("device", "identity", "load", "nbytes", "version")
    device: int
    identity: int
    load: Load
    nbytes: int
    version: int


class Load:
    """One call, and what is left of it."""

    def __init__(
        self, number: int, source: str, step: int, file: str | None, where: str | None, mapped: bool | None
    ) -> None:
        self.number = number
        self.source = source
        self.step = step
        self.file = file
        self.where = where
        self.mapped = mapped
        self.used_step: int | None = None
        self.loaded: Counter[int] = Counter()  # bytes by device
        self.followed: dict[int, _Followed] = {}  # by the storage's identity
        self.owned: set[int] = set()  # identities that an owner of the ledger has taken over
        self.looked_step: int | None = None  # when that was found
        self.holders: dict[int, Counter[Any]] = {}  # device → who was found to hold its tensors
        self.searched = False
        self.shapes: Counter[torch.Size] = Counter()
        self.twin = False  # used by its likes only, and nobody was found yet who just keeps it
        self.at_work: set[int] = set()  # identities of a twin's tensors that somebody uses himself

    def keeps(self, tensor: Tensor, identity: int) -> bool:
        """Whether a tensor with a storage of this load is only kept, as far as can be told."""
        if not self.twin:
            return True
        known = self.followed.get(identity)
        written = known is None or _version(tensor) != known.version
        if written or tensor.requires_grad or type(tensor) is torch.nn.Parameter:
            self.at_work.add(identity)
            return False
        return True

    @property
    def left(self) -> int:
        """Tensors that live and are in nobody's books."""
        return sum(identity not in self.owned for identity in self.followed)

    def alive(self, device: int) -> dict[int, int]:
        """identity → bytes of what lives on a device and is in nobody's books."""
        return {
            identity: each.nbytes
            for identity, each in self.followed.items()
            if each.device == device and identity not in self.owned and identity not in self.at_work
        }


class Loads:
    """Those of this process. `step` tells the present one."""

    def __init__(self) -> None:
        self.step: Callable[[], int] = lambda: 0
        self.loads: list[Load] = []
        self.fires = True
        self._count = 0
        self._depth = 0  # of wrapped calls: one that another makes is part of it
        self._gone: deque[_Followed] = deque()  # appended to by whoever drops the last reference, in any thread
        self._loaded = protect("checkpoint", self._note)
        self._used = used = protect("checkpoint", self._mark)
        self._patches = Patches()
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()
        self._safetensors = False
        self._observe_load(torch.serialization, "_load", "torch.load", _torchs_arguments)
        self._patches.observe(
            Module,
            "load_state_dict",
            self._state_given,
            lambda state_dict, _, error: None if error is not None else used(state_dict),
        )
        self.wrap_safetensors()

    def wrap_safetensors(self) -> None:
        """Once that package is there."""
        module = sys.modules.get("safetensors.torch")
        if not self._safetensors and hasattr(module, "load_file"):
            self._safetensors = True
            self._observe_load(module, "load_file", "safetensors.torch.load_file", _safetensors_arguments)

    def in_child(self) -> None:
        self.fires = False

    def stop(self) -> None:
        """Nothing is replaced any more, nothing followed."""
        if REGISTRY.loads is self:
            REGISTRY.loads = None
        self.fires = False
        self._patches.restore()
        for handle in self._optimizers.values():
            handle.remove()
        self._optimizers.clear()
        self.loads.clear()

    def settle(self) -> bool:
        """Takes out what has gone. Whether anything is still followed."""
        while self._gone:
            gone = self._gone.popleft()
            if gone.load.followed.get(gone.identity) is gone:
                del gone.load.followed[gone.identity]
        return bool(self.loads)

    def claim(self, device: int, claimed: set[int]) -> int:
        """Bytes on a device that loads have left and nobody else has claimed; claims them."""
        total = 0
        if self.settle():
            step = self.step()
            for load in self.loads:
                here = [(identity, each) for identity, each in load.followed.items() if each.device == device]
                load.looked_step = step
                load.owned -= {identity for identity, _ in here}
                load.owned |= {identity for identity, _ in here if identity in claimed}
                for identity, each in here:
                    if identity not in claimed:
                        claimed.add(identity)
                        total += each.nbytes
        return total

    # ------------------------------------------------------------------------------------------------------------ calls

    def _observe_load(
        self, owner: Any, name: str, source: str, arguments: Callable[..., tuple[Any, bool | None]]
    ) -> None:
        """`arguments` gives, of a call's, the file and whether it was mapped to a device."""

        def begins(*args: Any, **kwargs: Any) -> tuple[Any, bool | None] | None:
            if not self.fires:
                return None
            self._depth += 1
            return arguments(*args, **kwargs)

        def ends(call: tuple[Any, bool | None], result: Any, error: BaseException | None) -> None:
            self._depth -= 1
            if error is None and not self._depth:
                self._loaded(result, source, *call)

        self._patches.observe(owner, name, begins, ends)

    def _state_given(self, owner: Any, state_dict: Any = None, *_: Any, **__: Any) -> Any:
        return state_dict if self.fires and (self.loads or not self.step()) else None

    def follow_optimizer(self, optimizer: Optimizer) -> None:
        """A state that it is given from here on marks the load that it came from as used."""
        if optimizer not in self._optimizers:
            self._optimizers[optimizer] = optimizer.register_load_state_dict_pre_hook(self._optimizer_given)

    def _optimizer_given(self, optimizer: Optimizer, state_dict: Any) -> None:
        if self._state_given(optimizer, state_dict) is not None:
            self._used(state_dict)

    # ------------------------------------------------------------------------------------------------------------ notes

    def _note(self, result: Any, source: str, file: Any, mapped: bool | None) -> None:
        self.settle()
        load = Load(self._count, source, self.step(), _name(file), frames.users_line(), mapped)
        for tensor in _tensors(result):
            load.shapes[tensor.shape] += 1
            for part in plain(tensor):
                storage = part.untyped_storage()
                identity = storage._cdata
                if identity in load.followed or not storage.nbytes():
                    continue
                followed = load.followed[identity] = _Followed(storage, self._gone.append)
                followed.device, followed.identity = part.get_device(), identity
                followed.load, followed.nbytes, followed.version = load, storage.nbytes(), _version(part)
                load.loaded[followed.device] += followed.nbytes
            if len(load.followed) >= TENSORS_MAX:
                break
        if load.followed:
            self._count += 1
            self.loads.append(load)
            del self.loads[:-LOADS_MAX]

    def _mark(self, state_dict: Any) -> None:
        """The loads that `state_dict` is made of are used."""
        self.settle()
        given = [tensor for tensor in _tensors(state_dict) if type(tensor) in _PLAIN and not tensor.is_meta]
        identities = {tensor.untyped_storage()._cdata for tensor in given if tensor.layout is torch.strided}
        used = [load for load in self.loads if not identities.isdisjoint(load.followed)]
        if not used and given:  # converted on the way
            used = [load for load in self.loads if len(load.followed) >= len(given) and load.used_step is None][-1:]
        step = self.step()
        if not used and given and not step:
            known = len(self.loads)
            self._note(given, GIVEN, None, None)
            used = self.loads[known:]
        for load in used:
            load.used_step, load.twin = step, False
        if len(given) >= TWINS_LEAST:
            shapes = Counter(tensor.shape for tensor in given)
            for load in self.loads:
                alike = len(given) >= TWINS_SHARE * load.shapes.total() and shapes <= load.shapes
                if alike and load.used_step is None and load.source != GIVEN:
                    load.used_step, load.twin = step, True


def _torchs_arguments(reader: Any, map_location: Any = None, *_: Any, **__: Any) -> tuple[Any, bool]:
    """Of `_load`, called by torch.load, in whose frame the file stands: a path, or an open file."""
    frame = sys._getframe(1)
    for _depth in range(4):
        if frame.f_code is _LOAD:
            return frames.variables(frame).get("f"), map_location is not None
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None, map_location is not None


def _safetensors_arguments(filename: Any, *_: Any, **__: Any) -> tuple[Any, None]:
    return filename, None


_LOAD = torch.serialization.load.__code__
_PLAIN = (Tensor, torch.nn.Parameter)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _tensors(value: Any, depth: int = 8) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Module):
        yield from value.state_dict(keep_vars=True).values()
    elif isinstance(value, dict) and depth:
        for each in value.values():
            yield from _tensors(each, depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for each in value:
            yield from _tensors(each, depth - 1)


def _name(file: Any) -> str | None:
    if isinstance(file, (str, os.PathLike)):
        return Path(file).name
    name = getattr(file, "name", None)
    return Path(name).name if isinstance(name, str) else None


def install() -> Loads:
    """From here on loads are followed; the one of this process."""
    if REGISTRY.loads is None:
        REGISTRY.loads = Loads()
    running: Loads = REGISTRY.loads
    return running
