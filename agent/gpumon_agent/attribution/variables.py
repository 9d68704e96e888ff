"""Tensors held only by variables: an EMA kept as a list, data on the device, a batch before preprocessing.

Model. The functions on the stack are read, innermost first, up to the script's module. Torch's are skipped, except
torch.optim, because an optimizer step may call the model (LBFGS then holds flat vectors). Counted are tensors held by a
variable or by an attribute of its object, directly or in up to two nested lists, tuples or dicts. Each storage that no
other line claims counts for the first variable that leads to it. Activations come first: tensors with a graph
(gradients of `torch.autograd.grad`, weights made by an inner step) count only if the step's graphs were walked.
Cost: 0.1 µs per entry, 0.5 µs per tensor on the device; at most `ENTRIES_MAX` entries per read. None at a boundary
whose other lines sum to all requested bytes: variables then hold nothing more (accounts).
Known limitations. Not seen: tensor subclasses, contents of sets, deques and slots, deeper nesting, variables of
suspended generators, and containers with more entries than are left of `ENTRIES_MAX`. Optimizers are not read. Models
with too many tensors for one step have no such line.
Nothing here keeps a tensor alive.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from gpumon_agent import wire
from gpumon_agent.attribution import caller_frames
from gpumon_agent.attribution.inventory import claim
from gpumon_agent.attribution.kept import Claimed
from gpumon_agent.naming import dict_words, instance_dict, place, stored_at

FRAMES_MAX = 8
ENTRIES_MAX = 4_096
NAMED_MAX = 4
_DEPTH = 2  # nested containers
_MANY = 32
_has_storage = torch._C._has_storage
_PLAIN = frozenset((Tensor, Parameter))
_ROWS = (list, tuple)
_CONTAINERS = frozenset((*_ROWS, dict, OrderedDict, defaultdict))
_PLAIN_VALUES = frozenset((type(None), bool, int, float, complex, str, bytes, FunctionType, BuiltinFunctionType))
_CLOSED = (type, ModuleType, FunctionType, Tensor, Optimizer)
_SKIPPED = _PLAIN_VALUES | {type, ModuleType}
_room_for_a_dict = type.__dict__["__dictoffset__"].__get__


class HeldByVariables(NamedTuple):
    """Bytes of otherwise unclaimed storages, and the variables that lead to them, largest first."""

    nbytes: int
    holders: tuple[wire.Holder, ...]


NOTHING = HeldByVariables(0, ())


class _Found(NamedTuple):
    """The tensors of one variable, or of one attribute of its object."""

    code: CodeType
    name: str
    attribute: str
    tensors: list[Tensor]


class Variables:
    """Reads the callers' variables for each ledger."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[frozenset[int], int]] = {}

    def forget(self) -> None:
        """The sums of large containers, which are reused until then."""
        self._kept.clear()

    def held(self, claimed: Claimed, device: int, *, graphs: bool) -> HeldByVariables:
        """Claims the variables' storages on `device` (as returned by Tensor.get_device()).

        `graphs`: include tensors with a graph.
        """
        total = 0
        named: list[tuple[int, _Found]] = []
        for found in _look():
            nbytes = self._claim(found.tensors, claimed, device, graphs=graphs)
            if nbytes:
                total += nbytes
                named.append((nbytes, found))
        named.sort(key=lambda each: -each[0])
        return HeldByVariables(total, tuple(_holder(found) for _, found in named[:NAMED_MAX]))

    def _claim(self, found: list[Tensor], claimed: Claimed, device: int, *, graphs: bool) -> int:
        if len(found) < _MANY:
            return claim(_own(found, device, graphs=graphs), claimed, device)
        ends = found[0], found[-1]
        addresses = (each.data_ptr() for each in _own(ends, device, graphs=True))
        mark = (graphs, device, len(found), *map(id, ends), *addresses)
        kept = self._kept.get(mark)
        if kept is None or not claimed.isdisjoint(kept[0]):
            before = claimed.others.copy()
            nbytes = claim(_own(found, device, graphs=graphs), claimed, device)
            kept = self._kept[mark] = frozenset(claimed.others - before), nbytes
        claimed.others |= kept[0]
        return kept[1]


def _own(found: Iterable[Tensor], device: int, *, graphs: bool) -> Iterator[Tensor]:
    return (e for e in found if e.get_device() == device and (graphs or e.is_leaf) and _has_storage(e))


def tensors() -> Iterator[Tensor]:
    """All tensors in variables, whether claimed or not, on any device."""
    for found in _look():
        yield from filter(_has_storage, found.tensors)


def named() -> Iterator[tuple[list[Tensor], Callable[[], wire.Holder]]]:
    """The same by variable, with what names it."""
    for found in _look():
        yield [each for each in found.tensors if _has_storage(each)], partial(_holder, found)


def _holder(found: _Found) -> wire.Holder:
    code, name = found.code, found.name
    script = code.co_name == "<module>"
    return wire.Holder(
        f"{name}{found.attribute}",
        "global" if script else "local",
        str(place(code, stored_at(code, name))),
        count=len(found.tensors),
        function=None if script else code.co_name,
    )


def _look() -> Iterator[_Found]:
    frame: FrameType | None = sys._getframe(1)
    left = FRAMES_MAX
    look = _Look()
    while frame is not None and left:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in caller_frames.OURS or module.startswith("torch.optim."):
            left -= 1
            for name, value in caller_frames.variables(frame).items():
                if type(value) not in _SKIPPED:
                    for attribute, found in look.into(value):
                        yield _Found(frame.f_code, name, attribute, found)
            if module == "__main__" and frame.f_code.co_name == "<module>":  # outer frames only started the script
                return
        frame = frame.f_back


class _Look:
    """One read: entries left, and containers and objects already seen."""

    def __init__(self) -> None:
        self._left = ENTRIES_MAX
        self._seen: set[int] = set()

    def into(self, value: Any) -> Iterator[tuple[str, list[Tensor]]]:
        """(attribute, tensors) of a variable's value."""
        kind = type(value)
        found: list[Tensor] = []
        if kind in _PLAIN or kind in _CONTAINERS:
            self._collect([value], _DEPTH, found)
            if found:
                yield "", found
            return
        if not _room_for_a_dict(kind) or issubclass(kind, _CLOSED) or id(value) in self._seen:
            return
        self._seen.add(id(value))
        for name, each in self._entries(instance_dict(value) or {}, dict.items):
            if type(each) in _PLAIN_VALUES or (name == "_modules" and issubclass(kind, Module)):
                continue
            self._collect([each], _DEPTH, found)
            if found:
                yield dict_words(value, name)[0], found
                found = []

    def _collect(self, values: list[Any], depth: int, found: list[Tensor]) -> None:
        for value in values:
            kind = type(value)
            if kind in _PLAIN:
                found.append(value)
            elif kind in _CONTAINERS and depth and value and id(value) not in self._seen:
                self._seen.add(id(value))
                row = kind in _ROWS
                if not row or len(value) <= _MANY or type(next(iter(value), None)) not in _PLAIN_VALUES:
                    self._collect(self._entries(value, iter if row else dict.values), depth - 1, found)

    def _entries(self, value: Any, read: Any) -> list[Any]:
        if len(value) > self._left:
            return []
        entries = list(read(value))
        self._left -= len(entries)
        return entries
