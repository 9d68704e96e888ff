"""What autograd saved for backward: a graph walked from its roots, without unpacking and without a hook.

Model. From the roots' `grad_fn` every node is reached through `next_functions`; `_raw_saved_*` gives what a node saved,
`SavedTensor.data` the tensor itself, or, where somebody's pack hook changed it, what that hook returned. Nothing is
unpacked: no version is checked, no hook runs, nothing is recomputed. What was released reads as None.
Looked into as well: the attributes of a custom Function's `ctx` (`ctx.x = tensor`), what non-reentrant checkpointing
keeps to run a forward again, and tensors within what a pack hook returned. What else a hook returned is told by the
hook's name, for nobody can look into it.

Which module a node belongs to (no hook tells, so nothing changes for torch.compile):
1. one that uses a parameter, directly or through views and casts of it, or that saved one: the parameter's module.
   Of a tied parameter, the first use belongs to the first module that holds it, the second to the second.
2. any other: where the newest of the nodes that feed it belongs; if that one used parameters, the module around it.
   Within that module a child without parameters whose class is the node's operator (a GELU for `GeluBackward`) takes
   it, if there is one such child, or else the first one that stands behind the child which feeds it.
3. one that nothing of the model feeds: none.

Source: torch/csrc/autograd/saved_variable.h, torch/utils/checkpoint.py. `SavedTensor.data` came after torch 2.8: before
it a graph cannot be read, and `READABLE` is False.
Cost: 3 to 5 µs a node; see benchmarks/inventory.py.
Known limitations. An object that a `ctx` keeps and that holds tensors in turn is not looked into. Rule 2 says "at or
around": an operator called between two modules belongs to the one around the first.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter
from time import thread_time_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from .spread import fsdp_parameters
from .storages import storages

_SavedTensor: Any = torch._C._autograd.SavedTensor
_CustomNode: Any = torch._C._FunctionBase
READABLE = hasattr(_SavedTensor, "data")

Place = tuple[int, str]
"""index of a watched model, path of a module in it"""
Around = tuple[Place, str]
"""a module that holds others, and the name of the child that was left last"""

_PREFIX = "_raw_saved_"
_LEAF = 2**64 - 1  # the sequence number of every AccumulateGrad
_LOOK_AT_CLOCK_EVERY = 64  # nodes
_DEPTH_MAX = 3  # of containers within a ctx or what a hook packed


class Saved(NamedTuple):
    """One tensor that is kept for backward."""

    tensor: Tensor
    place: Place | None


class TooLarge(Exception):
    """The graph could not be walked within the time allowed."""


class Places:
    """Which module a parameter belongs to, and what stands around and beside each module."""

    def __init__(self) -> None:
        self.by_parameter: dict[int, list[Place]] = {}
        """id of a parameter → the modules that hold it, in the model's order; several where it is tied"""
        self.frozen: dict[int, Place] = {}
        """identity of the storage of a parameter that needs no gradient → the first module that holds it"""
        self.children: dict[Place, list[tuple[str, str]]] = {}
        """module → (name, class in lower case) of its children; the class is "" of those that hold more than nothing"""
        self.kinds: dict[Place, str] = {}
        """module → its class, in the model's order"""
        self._positions: dict[Around, int] = {}
        self._alike: dict[tuple[Place, str], list[int]] = {}  # children that are an operator, by position

    def add(self, index: int, root: Module) -> None:
        """One more model."""
        bare: set[Module] = set()
        paths = {module: path for path, module in root.named_modules()}
        for module, path in reversed(paths.items()):  # children before the modules that hold them
            children = [(name, child) for name, child in module._modules.items() if child is not None]
            if children:
                self.children[index, path] = [
                    (name, type(child).__name__.lower() if child in bare else "") for name, child in children
                ]
                self._positions.update((((index, path), name), at) for at, (name, _) in enumerate(children))
            elif not any(parameter is not None for parameter in module._parameters.values()):
                bare.add(module)
        for module, path in paths.items():
            place = (index, path)
            self.kinds[place] = type(module).__name__
            for parameter in module._parameters.values():
                if parameter is not None:
                    self._add_parameter(parameter, place)
            for record in fsdp_parameters(module):
                holder = (index, paths.get(record._module_info.module, path))
                for parameter in (getattr(record, "_unsharded_param", None), record.sharded_param):
                    if parameter is not None:
                        self._add_parameter(parameter, holder)

    def _add_parameter(self, parameter: Tensor, place: Place) -> None:
        holders = self.by_parameter.setdefault(id(parameter), [])
        if place not in holders:
            holders.append(place)
        if not parameter.requires_grad:
            for identity, _, _ in storages(parameter):
                self.frozen.setdefault(identity, place)

    def around(self, place: Place) -> Around:
        """Where an operator belongs that takes what the module at `place` made with its own parameters."""
        if place in self.children:
            return place, ""
        model, path = place
        above, _, name = path.rpartition(".")
        return (model, above), name

    def within(self, around: Around, operator: str) -> tuple[Place, Around]:
        """Where `operator` belongs, and those that it feeds."""
        place, fed_by = around
        alike = self._alike.get((place, operator))
        if alike is None:
            children = enumerate(self.children.get(place, ()))
            alike = [at for at, (_, kind) in children if kind and (kind in operator or operator in kind)]
            self._alike[place, operator] = alike
        if not alike:
            return place, around
        at = alike[0]
        if len(alike) > 1:
            after = bisect_right(alike, self._positions.get((place, fed_by), -1))
            if after == len(alike):
                return place, around
            at = alike[after]
        chosen = self.children[place][at][0]
        model, path = place
        return (model, f"{path}.{chosen}" if path else chosen), (place, chosen)


class Walk:
    """One walk over what `roots` (tensors, or gradient edges) were computed from.

    `after`: nodes with no later sequence number were walked before. `budget_ns`, of this thread's time: raises
    TooLarge beyond it.
    """

    def __init__(
        self, roots: Iterable[object], places: Places, *, after: int = -1, budget_ns: int | None = None
    ) -> None:
        self.saved: list[Saved] = []
        self.hidden: dict[str, None] = {}
        """names of pack hooks whose results nobody can look into, in the order in which they were met"""
        self.newest = after
        """sequence number of the newest node"""
        self._places = places
        self._uses: dict[int, int] = {}  # id of a tied parameter → how often it was used so far
        self._frames: set[int] = set()  # of checkpoints, by id: their arguments are kept once
        self._until = None if budget_ns is None else thread_time_ns() + budget_ns
        self._attribute(self._collect(roots, after))

    def _collect(self, roots: Iterable[object], after: int) -> list[tuple[int, Any, Any]]:
        """(sequence number, node, its next functions), oldest first; parameters' own nodes are not among them."""
        waiting = [node for root in roots if (node := _node_of(root)) is not None]
        seen = set(waiting)
        nodes: list[tuple[int, Any, Any]] = []
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            if number <= after or number == _LEAF:
                continue
            edges = node.next_functions
            nodes.append((number, node, edges))
            for below, _ in edges:
                if below is not None and below not in seen:
                    seen.add(below)
                    waiting.append(below)
            if not len(nodes) % _LOOK_AT_CLOCK_EVERY:
                self._look_at_clock()
        nodes.sort(key=itemgetter(0))
        if nodes:
            self.newest = nodes[-1][0]
        return nodes

    def _look_at_clock(self) -> None:
        if self._until is not None and thread_time_ns() > self._until:
            raise TooLarge

    def _attribute(self, nodes: list[tuple[int, Any, Any]]) -> None:
        """Oldest first, so that a node's feeders have their places before it."""
        placed: dict[Any, _Placed] = {}
        frozen = self._places.frozen
        for count, (_, node, edges) in enumerate(nodes, 1):
            kind: Any = type(node)
            names = _fields(kind)
            used: Place | None = None
            passes: Tensor | None = None
            fed: _Placed | None = None
            for below, _ in edges:
                if below is None:
                    continue
                parameter = below.variable if below._sequence_nr() == _LEAF else None
                at = placed.get(below)
                if parameter is None and at is not None:
                    parameter = at.parameter
                if parameter is not None:
                    if not names and len(edges) == 1:  # a view or a cast of it: whoever takes that uses it
                        passes = parameter
                    elif used is None:
                        used = self._use(parameter)
                elif at is not None and (fed is None or at.number > fed.number):
                    fed = at
            tensors = self._saved_by(node, names)
            if frozen and used is None and passes is None:
                for tensor in tensors:
                    if (used := frozen.get(_identity(tensor))) is not None:
                        break
            place, around = None, None
            if used is not None:
                place, around = used, self._places.around(used)
            elif fed is not None and fed.around is not None:
                place, around = self._places.within(fed.around, _operator(node))
            placed[node] = _Placed(count, around, passes)
            self.saved += [Saved(tensor, place) for tensor in tensors]
            if not count % _LOOK_AT_CLOCK_EVERY:
                self._look_at_clock()

    def _use(self, parameter: Tensor) -> Place | None:
        places = self._places.by_parameter.get(id(parameter))
        if not places:
            return None
        if len(places) == 1:
            return places[0]
        use = self._uses.get(id(parameter), 0)
        self._uses[id(parameter)] = use + 1
        return places[min(use, len(places) - 1)]

    def _saved_by(self, node: Any, names: tuple[str, ...]) -> list[Tensor]:
        found: list[Tensor] = []
        for name in names:
            try:
                kept = getattr(node, name)
            except RuntimeError:  # released: some kinds of node raise, the others say None
                continue
            for each in kept if isinstance(kept, tuple) else (kept,):
                if isinstance(each, _SavedTensor):
                    data = each.data
                    if isinstance(data, Tensor):
                        found.append(data)
                    elif data is not None:
                        found += self._packed(each, data)
        if isinstance(node, _CustomNode):  # a custom Function's node is its ctx
            for value in list(vars(node).values()):
                found += _tensors(value, _DEPTH_MAX)
        return found

    def _packed(self, kept: Any, data: Any) -> Iterator[Tensor]:
        """What stands behind something that a pack hook returned."""
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


class _Placed(NamedTuple):
    """What is known of a node that was passed."""

    number: int
    around: Around | None  # of the operators that it feeds
    parameter: Tensor | None  # that it only reshapes or casts


def _node_of(root: object) -> Any:
    return root.grad_fn if isinstance(root, Tensor) else getattr(root, "node", None)


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith(_PREFIX))


def _operator(node: Any) -> str:
    return _operator_named(type(node).__name__)


@functools.cache
def _operator_named(name: str) -> str:
    """GeluBackward0 → gelu."""
    return name.rpartition("::")[2].partition("Backward")[0].lower()


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if type(tensor) is Tensor and tensor.layout is torch.strided else 0


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each, depth - 1)
