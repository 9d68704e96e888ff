"""Bytes by owner for models with too many tensors for one step: reads chunks over many steps, in repeated passes.

Each chunk, identified by its position, is compared with the previous pass. The sums are known once all chunks in a row
were equal, and unknown as soon as one differs. So a model whose gradients differ between steps (experts of an MoE) gets
no ledger, instead of one mixed from several steps. All reads are at the end of the optimizer step.

Model. Storages count once, by identity. A gradient, state or small weight with an unshared storage counts by its own
size (storages.py, `small`).
Cost: 0.5 µs per tensor. Memory: 90 bytes per parameter during a pass.
Known limitations. No sums for FSDP1 and DeepSpeed's ZeRO, nor if an optimizer keeps state under keys other than its
parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from gpumon_agent.attribution import zero
from gpumon_agent.attribution.describe import stepping
from gpumon_agent.attribution.spread import flat_parameter, fsdp_parameters, hook_tensors
from gpumon_agent.module_tree import MODULE_AS_TENSORS, parameter_names, tree
from gpumon_agent.storages import (
    CPU,
    Pieces,
    alone,
    has_storage,
    held_once,
    index_of,
    shared,
    small,
    storages,
    tensors_within,
)
from gpumon_agent.thread_clock import ThreadClock

CHUNK_TENSORS = 128
SLICE_NS = 1_000_000
"""Thread time per step, after the first chunk."""
HURRIED_CIRCLES = 3
"""After a start or a restart, this many passes continue at every step, later ones only at sampled steps."""
LINES = ("weights", "buffers", "gradients", "optimizer", "gathered", "views", "other_models")
_PLAIN = (Tensor, Parameter)
_Sums = dict[tuple[int, str], int]
"""(device, line) → bytes"""


class Rolling:
    """The sums of all models and optimizers. `others` iterates over the unwatched models, in slices."""

    def __init__(
        self,
        models: Callable[[], Iterable[Module]],
        optimizers: Callable[[], Iterable[Optimizer]],
        others: Callable[[], Iterator[weakref.ref[Module] | None] | None],
    ) -> None:
        self.unreadable: str | None = None
        """why there will be no sums"""
        self.looked = 0
        """tensors read by the last call of `look`"""
        self._models = models
        self._optimizers = optimizers
        self._others = others
        self.ddp: list[tuple[weakref.ref[Module], str | None]] = []
        """DDP modules, and the path prefix below which gradients are views of its buckets"""
        self.restart()

    def restart(self) -> None:
        self._circle: Iterator[None] | None = None
        self._before: list[_Sums] = []
        self._now: list[_Sums] = []
        self._alike = 0  # consecutive chunks equal to those of the previous pass
        self._circles = 0
        self._mark: object = None
        self._chunk: _Sums = {}
        self._sums: _Sums | None = None
        self._others_known = False

    @property
    def hurries(self) -> bool:
        """Whether the next slice should run at the next step, sampled or not."""
        return self._sums is None and self.unreadable is None and self._circles < HURRIED_CIRCLES

    def look(self) -> None:
        self.looked = 0
        if self.unreadable is not None:
            return
        mark = self._marks()
        if mark != self._mark:
            self.restart()
            self._mark = mark
        self._next_chunk()
        clock = ThreadClock(SLICE_NS)
        while self._circle is not None and not clock.over():  # never two passes in one step: they would be equal
            self._next_chunk()

    def sums(self, device: int) -> dict[str, int] | None:
        """The sums of one device, or None if the last two passes differ."""
        if self._sums is None or self._marks() != self._mark:
            return None
        return {line: self._sums.get((device, line), 0) for line in LINES}

    @property
    def knows_others(self) -> bool:
        return self._others_known

    def _marks(self) -> object:
        """Changes when optimizer state is created or loaded, or a model is moved."""
        states = tuple((id(state), len(state)) for each in self._optimizers() for state in (stepping(each).state,))
        first = tuple(
            (parameter.get_device(), parameter.dtype)
            for each in self._optimizers()
            for parameter in each.param_groups[0]["params"][:1]
        )
        return states, first

    def _next_chunk(self) -> None:
        if self._circle is None:
            self._circle = self._go_round()
        ended = next(self._circle, self) is self
        chunk, self._chunk = self._chunk, {}
        at = len(self._now)
        self._now.append(chunk)
        if at < len(self._before) and self._before[at] == chunk:
            self._alike += 1
        else:
            self._alike, self._sums = 0, None
        if not ended:
            return
        if len(self._before) != len(self._now):
            self._alike, self._sums = 0, None
        self._circle = None
        self._circles += 1
        self._before, self._now = self._now, []
        if self._sums is None and self._alike >= len(self._before):
            self._circles = 0
            self._sums = {}
            for each in self._before:
                for key, nbytes in each.items():
                    self._sums[key] = self._sums.get(key, 0) + nbytes

    def _go_round(self) -> Iterator[None]:
        """One pass; yields after each chunk."""
        claimed: Pieces[bool] = Pieces()  # ids of parameters, and identities of storages that several tensors share
        states = 0
        looked = 0
        self.ddp = []
        for path, reference in tree(self._models()):
            start: int | None = 0
            self._note_ddp(path, reference())
            names = parameter_names(reference())  # a list: with 100,000 names the next ones are found at once
            while start is not None:
                count, met, start = self._take(path, reference(), names, start, claimed)
                states += met
                looked += count
                if looked >= CHUNK_TENSORS:
                    looked = 0
                    yield
                    if self.unreadable is not None:
                        return
        for optimizer in [weakref.ref(each) for each in self._optimizers()]:
            at: tuple[int, int] | None = (0, 0)
            while at is not None:
                met, at = self._take_strays(optimizer(), at, claimed)
                states += met
                yield
        if states != sum(len(stepping(each).state) for each in self._optimizers()):
            self.unreadable = "an optimizer's state has other keys than its parameters"
            return
        others = self._others()
        self._others_known = others is not None
        for other in others or ():
            start = 0
            while other is not None and start is not None:
                start = self._take_other(other(), start, claimed)
                yield
            if other is None:
                yield
        for _ in claimed.clear():
            yield

    def _note_ddp(self, path: str, module: Module | None) -> None:
        if type(module).__name__ == "DistributedDataParallel" and module is not None:
            viewed = getattr(module, "gradient_as_bucket_view", False)
            self.ddp.append((weakref.ref(module), (f"{path}." if path else "") if viewed else None))

    def _take_other(self, module: Module | None, start: int, claimed: Pieces[bool]) -> int | None:
        if module is None:
            return None
        size = max(CHUNK_TENSORS, len(module._parameters) // 200)
        tensors = list(islice(chain(module._parameters.values(), module._buffers.values()), start, start + size))
        for tensor in tensors:
            if tensor is not None and id(tensor) not in claimed:
                claimed[id(tensor)] = True
                self._claim("other_models", tensor, claimed)
        self.looked += len(tensors)
        return start + size if len(tensors) == size else None

    def _take_strays(
        self, optimizer: Optimizer | None, at: tuple[int, int], claimed: Pieces[bool]
    ) -> tuple[int, tuple[int, int] | None]:
        """Reads an optimizer's parameters outside of watched models. Returns (states met, next group and position)."""
        group, start = at
        if optimizer is None:
            return 0, None
        if group == len(optimizer.param_groups):
            for each in optimizer.param_groups:  # settings that are tensors: a capturable learning rate
                for key, value in each.items():
                    for tensor in () if key == "params" else tensors_within(value):
                        self._claim("optimizer", tensor, claimed)
            return 0, None
        known = optimizer.param_groups[group]["params"][start : start + CHUNK_TENSORS * 4]
        strays = [parameter for parameter in known if id(parameter) not in claimed][: CHUNK_TENSORS // 2]
        met = self._take_parameters(strays, "gradients", claimed)[1]
        self.looked += len(known)
        if len(strays) == CHUNK_TENSORS // 2:
            return met, at  # there may be more: those just read are claimed, and skipped next time
        return met, (group, start + len(known)) if len(known) == CHUNK_TENSORS * 4 else (group + 1, 0)

    def _take(
        self, path: str, module: Module | None, names: list[str], start: int, claimed: Pieces[bool]
    ) -> tuple[int, int, int | None]:
        """Reads a module from its parameter `start` on. Returns (tensors read, states met, next start or None)."""
        if module is None:
            return 0, 0, None
        looked = MODULE_AS_TENSORS
        size = CHUNK_TENSORS // 2
        parameters: list[Any] = [module._parameters.get(name) for name in names[start : start + size]]
        more = start + size if len(parameters) == size else None
        if not start:
            if flat_parameter(module) is not None or zero.keeper(module) is not None:
                self.unreadable = f"{type(module).__name__} shards them"
                return 0, 0, None
            for record in fsdp_parameters(module):
                looked += 2
                for tensor in record.all_gather_outputs:
                    self._claim("gathered", tensor, claimed)
                parameters.append(record.sharded_param)
                gradient = getattr(record, "unsharded_accumulated_grad", None)
                if gradient is not None:
                    self._add("gradients", gradient, claimed)
            for tensor in hook_tensors(module) if type(module).__name__ == "DistributedDataParallel" else ():
                looked += 1
                self._claim("gathered", tensor, claimed)
            for buffer in module._buffers.values():
                if buffer is not None:
                    looked += 1
                    if id(buffer) not in claimed:
                        claimed[id(buffer)] = True
                        self._claim("buffers", buffer, claimed)
        viewed = any(prefix is not None and path.startswith(prefix) for _, prefix in self.ddp)
        more_looked, met = self._take_parameters(parameters, "views" if viewed else "gradients", claimed)
        self.looked += looked + more_looked
        return looked + more_looked, met, more

    def _take_parameters(self, parameters: Iterable[Any], gradients: str, claimed: Pieces[bool]) -> tuple[int, int]:
        """(tensors read, states met)"""
        looked = met = 0
        optimizers = [stepping(each).state for each in self._optimizers()]
        for parameter in parameters:
            looked += 1
            if parameter is None or not self._claim_parameter(parameter, claimed):
                continue
            gradient = parameter.grad
            if gradient is not None:
                looked += 1
                self._add(gradients, gradient, claimed)
            for states in optimizers:
                state = states.get(parameter)
                if state is not None:
                    met += 1
                    looked += self._take_state(state, claimed)
        return looked, met

    def _take_state(self, state: Any, claimed: Pieces[bool]) -> int:
        looked = 0
        values = list(state.values()) if type(state) is dict else [state]
        for value, once in zip(values, held_once(values), strict=True):
            if once and type(value) is Tensor and alone(value):
                looked += 1
                key = value.get_device(), "optimizer"
                self._chunk[key] = self._chunk.get(key, 0) + value.nbytes
            else:
                for tensor in tensors_within(value):
                    looked += 1
                    if id(tensor) not in claimed:
                        claimed[id(tensor)] = True
                        self._claim("optimizer", tensor, claimed)
        return looked

    def _claim_parameter(self, parameter: Tensor, claimed: Pieces[bool]) -> bool:
        """False: this parameter was met before."""
        if id(parameter) in claimed:  # ids and storage identities share the set: both are addresses, so never equal
            return False
        claimed[id(parameter)] = True
        self._claim("weights", parameter, claimed)
        return True

    def _claim(self, line: str, tensor: Tensor, claimed: Pieces[bool]) -> None:
        """Counts the bytes of the storage, which may be larger than the tensor."""
        chunk = self._chunk
        if type(tensor) in _PLAIN and has_storage(tensor):
            device = tensor.get_device()
            if device == CPU and tensor.is_meta:
                return
            if small(tensor):
                chunk[device, line] = chunk.get((device, line), 0) + tensor.nbytes
                return
            storage = tensor.untyped_storage()
            if not shared(storage._cdata):
                chunk[device, line] = chunk.get((device, line), 0) + storage.nbytes()
                return
            each: Iterable[tuple[int, int, int]] = ((storage._cdata, storage.nbytes(), device),)
        else:
            each = [(identity, nbytes, index_of(where)) for identity, nbytes, where in storages(tensor)]
        for identity, nbytes, device in each:
            if nbytes and identity not in claimed:
                claimed[identity] = True
                chunk[device, line] = chunk.get((device, line), 0) + nbytes

    def _add(self, line: str, tensor: Tensor, claimed: Pieces[bool]) -> None:
        """Counts a tensor; an unshared storage need not be recorded."""
        if type(tensor) is Tensor and alone(tensor):
            key = tensor.get_device(), line
            self._chunk[key] = self._chunk.get(key, 0) + tensor.nbytes
        else:
            self._claim(line, tensor, claimed)
