"""Follows the tensors of loaded checkpoints, by weak references to their storages, until they are freed or owned.

Model. We wrap `torch.serialization._load` (used by torch.load) and `safetensors.torch.load_file`, which most libraries
call. Every storage of the result gets a weak reference, whose callback reports that it was freed. `load_state_dict`, of
a module or a watched optimizer, marks the load that its tensors come from as used; if they were converted on the way,
the newest unused load with enough tensors. Tensors that stay alive after that without an owner are retained. Tensors of
no known load that are passed to `load_state_dict` before the first step (from `safetensors.safe_open`,
`safetensors.torch.load`, `torch.distributed.checkpoint` or custom code) become a load themselves. If `load_state_dict`
gets different tensors with the same shapes (a library re-read the file), the load is a twin of what was used. A twin is
reported only if it is reachable by name, was not written to and is not a parameter, which rules out EMA copies and
second models.
Cost: 2 µs per tensor of a load; nothing per step.
Known limitations. Loads in the file format before torch 1.6 are only seen through `load_state_dict`. At most
`TENSORS_MAX` tensors per load are followed.
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
from gpumon_agent.attribution.kept import Claimed
from gpumon_agent.guard import protect
from gpumon_agent.patching import Patches
from gpumon_agent.registry import REGISTRY
from gpumon_agent.storages import plain

TENSORS_MAX = 200_000
LOADS_MAX = 64  # followed at one time; then the oldest is dropped
TWINS_LEAST = 2  # tensors: the shape of a single one proves nothing
TWINS_SHARE = 0.125  # of a load's tensors: a model's share in a file with optimizer state
GIVEN = "load_state_dict"  # source of tensors from no known load


class _Followed(weakref.ref[Any]):
    __slots__ = ("device", "identity", "load", "nbytes", "version")
    device: int
    identity: int
    load: Load
    nbytes: int
    version: int


class Load:
    """One load, and its tensors that are still alive."""

    def __init__(
        self, number: int, source: str, step: int, file: str | None, where: frames.Place | None, mapped: bool | None
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
        self.looked_step: int | None = None  # at which `owned` was updated
        self.holders: dict[int, Counter[Any]] = {}  # device → names that hold its tensors
        self.searched = False
        self.shapes: Counter[torch.Size] = Counter()
        self.twin = False  # only equal shapes were used, and no holder that merely keeps it was found yet
        self.at_work: set[int] = set()  # identities of a twin's tensors that are in use

    def keeps(self, tensor: Tensor, identity: int) -> bool:
        """Whether a tensor with a storage of this load is merely kept; of a twin, neither written to nor trained."""
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
        """Storages that are alive and have no owner."""
        return sum(identity not in self.owned for identity in self.followed)

    def alive(self, device: int) -> dict[int, int]:
        """identity → bytes of the storages on `device` that have no owner and are not in use."""
        return {
            identity: each.nbytes
            for identity, each in self.followed.items()
            if each.device == device and identity not in self.owned and identity not in self.at_work
        }


class Loads:
    """The loads of this process. `step` returns the current step."""

    def __init__(self) -> None:
        self.step: Callable[[], int] = lambda: 0
        self.loads: list[Load] = []
        self.fires = True
        self._count = 0
        self._depth = 0  # of wrapped calls: a nested one is part of the outer
        self._gone: deque[_Followed] = deque()  # appended to in the thread that drops the last reference
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
        """Wraps its `load_file`, once the package is imported."""
        module = sys.modules.get("safetensors.torch")
        if not self._safetensors and hasattr(module, "load_file"):
            self._safetensors = True
            self._observe_load(module, "load_file", "safetensors.torch.load_file", _safetensors_arguments)

    def in_child(self) -> None:
        self.fires = False

    def stop(self) -> None:
        if REGISTRY.loads is self:
            REGISTRY.loads = None
        self.fires = False
        self._patches.restore()
        for handle in self._optimizers.values():
            handle.remove()
        self._optimizers.clear()
        self.loads.clear()

    def settle(self) -> bool:
        """Removes freed storages. Whether any load is still followed."""
        while self._gone:
            gone = self._gone.popleft()
            if gone.load.followed.get(gone.identity) is gone:
                del gone.load.followed[gone.identity]
        return bool(self.loads)

    def claim(self, device: int, claimed: Claimed) -> int:
        """Claims all unclaimed storages of loads on a device, and returns their bytes."""
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
                        claimed.others.add(identity)
                        total += each.nbytes
        return total

    def storages(self) -> list[Any]:
        """Weak references to the storages of all loads."""
        return [each for load in self.loads for each in load.followed.values()]

    # ------------------------------------------------------------------------------------------------------------ calls

    def _observe_load(
        self, owner: Any, name: str, source: str, arguments: Callable[..., tuple[Any, bool | None]]
    ) -> None:
        """`arguments` extracts from the call's arguments the file and whether it was mapped to a device."""

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
        """From here on its `load_state_dict` marks the load that the state came from as used."""
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
    """File (a path or an open file, read from torch.load's frame) and whether `map_location` was passed."""
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
    """Starts to follow loads, unless started already. Returns the process's `Loads`."""
    if REGISTRY.loads is None:
        REGISTRY.loads = Loads()
    running: Loads = REGISTRY.loads
    return running
