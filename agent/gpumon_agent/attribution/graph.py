"""Reads what autograd saved for backward: walks the graph from its roots, without unpacking and without hooks.

Model. All nodes are reached from the roots' `grad_fn` through `next_functions`; saving.py reads what each one saved.
A node is attributed to a module without hooks, so torch.compile is not affected:
1. A node that uses a parameter (directly, or through views and casts), or saved one: to the parameter's module.
   For a tied parameter, the nth use belongs to the nth module that holds it.
2. Any other: to the module of its newest input node, or to that module's parent if that node used parameters. Within
   it, to a child without parameters whose class matches the node's operator (a GELU for `GeluBackward`): the only one,
   or else the first one after the child that feeds it.
3. A node without inputs from the model: to none.

A step's graph usually equals the last one: the same node types in the same order with the same edges and parameters.
Then the results are reused (a `_Plan`): each node's module, and which fields hold only weights and need not be read. If
the time runs out, the next walk continues the plan.

Cost: 2 to 3 µs per node, 4 for a new graph.
Known limitations. Rule 2 is approximate: an operator called between two modules belongs to the parent of the first.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Container, Iterable
from operator import itemgetter
from time import thread_time_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from gpumon_agent.attribution import saving
from gpumon_agent.attribution.saving import CONTEXT, NodeReader, SavedTensor, fields
from gpumon_agent.attribution.spread import fsdp_parameters
from gpumon_agent.guard import pass_on
from gpumon_agent.hooks.backward_roots import node_of
from gpumon_agent.storages import storages

_Leaf: Any = torch._C._functions.AccumulateGrad

Place = tuple[int, str]
"""index of a watched model, path of a module in it"""
Around = tuple[Place, str]
"""a module with children, and the name of the last child that ran"""

_PLAIN = (Tensor, Parameter)
HALF = torch.half.itemsize
_LOOK_AT_CLOCK_EVERY = 64  # nodes
_PLANS_MAX = 8  # different graphs (an evaluation, a smaller last batch) alternate
_NO_WEIGHTS: frozenset[int] = frozenset()


class Cast(NamedTuple):
    """A parameter's copy in half precision."""

    parameter: int  # its id
    device: int
    nbytes: int


class TooLarge(Exception):
    """The walk ran out of time. `learns`: the plan was extended, so the next walk is faster."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self.learns = learns


class Places:
    """Which module a parameter belongs to, and each module's parent and children."""

    def __init__(self) -> None:
        self.by_parameter: dict[int, list[Place]] = {}
        """id of a parameter → the modules that hold it, in the model's order; several if it is tied"""
        self.frozen: dict[int, Place] = {}
        """identity of a frozen parameter's storage → the first module that holds it"""
        self.children: dict[Place, list[tuple[str, str]]] = {}
        """module → (name, class in lower case) of its children; class "" for those with parameters or children"""
        self.kinds: dict[Place, str] = {}
        """module → its class, in the model's order"""
        self.plans: dict[tuple[Any, ...], _Plan] = {}
        """by structure of the graph"""
        self._positions: dict[Around, int] = {}
        self._alike: dict[tuple[Place, str], list[int]] = {}  # positions of children that match an operator

    def add(self, index: int, root: Module) -> None:
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
        """Where an operator belongs that consumes the output of the module at `place`."""
        if place in self.children:
            return place, ""
        model, path = place
        above, _, name = path.rpartition(".")
        return (model, above), name

    def within(self, around: Around, operator: str) -> tuple[Place, Around]:
        """The module of `operator`, and where the operators that it feeds belong."""
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


class _Plan:
    """Results for graphs of one structure; only for the first `known` nodes if a walk ran out of time."""

    def __init__(self) -> None:
        self.known = 0
        self.reads: list[tuple[int, Place | None, tuple[str, ...]]] = []
        """position of a node, its module, its fields to be read"""
        self.frozen: list[tuple[int, str, int]] = []
        """nodes attributed by a frozen weight: position, field, identity of the weight's storage"""
        self.placed: list[_Placed] = []
        self.uses: dict[int, int] = {}
        """id of a tied parameter → uses so far"""
        self.casts: dict[int, Cast] = {}
        """half-precision copies of parameters that no node saved, by the position of the node that made each"""
        self.copies: dict[int, Cast] = {}
        """all half-precision copies of parameters, by the parameter's id"""


class GraphWalk:
    """One walk of the graph behind `roots` (tensors, or gradient edges).

    `after`: sequence number of the newest node that was already walked. `budget_ns`: thread time; raises TooLarge
    beyond it. `weights`: identities of storages to skip. `reader` records the pack hooks it meets.
    """

    def __init__(
        self,
        roots: Iterable[object],
        places: Places,
        *,
        after: int = -1,
        budget_ns: int | None = None,
        weights: Container[int] = _NO_WEIGHTS,
        reader: NodeReader | None = None,
    ) -> None:
        self.saved: list[tuple[Tensor, Place | None]] = []
        """tensors saved for backward, and their modules"""
        self.newest = after
        """sequence number of the newest node"""
        self.learns = False
        """whether this walk extends the plan"""
        self._places = places
        self._weights = weights
        self._reader = reader or NodeReader()
        self._until = None if budget_ns is None else thread_time_ns() + budget_ns
        nodes = self._collect(roots, after)
        structure = _structure(nodes)
        plan = places.plans.get(structure)
        if plan is not None and not self._holds(plan, nodes):
            plan = None
        if plan is None:
            if len(places.plans) >= _PLANS_MAX:
                places.plans.clear()
            plan = places.plans[structure] = _Plan()
        self.casts = plan.casts
        """half-precision copies of parameters that this graph does not save: only autocast's cache holds them"""
        self.copies = plan.copies
        """all half-precision copies: what autocast copies if the model is called without a graph"""
        self.learns = plan.known < len(nodes)
        self._follow(plan, nodes)
        self._attribute(plan, nodes)

    @property
    def hidden(self) -> dict[str, None]:
        return self._reader.hidden

    def _collect(self, roots: Iterable[object], after: int) -> list[tuple[int, Any, Any]]:
        """(sequence number, node, its next functions), oldest first, without AccumulateGrad nodes."""
        waiting = [node for root in roots if (node := node_of(root)) is not None and type(node) is not _Leaf]
        seen = set(waiting)
        nodes: list[tuple[int, Any, Any]] = []
        while waiting:
            node = waiting.pop()
            number = node._sequence_nr()
            if number <= after:
                continue
            edges = node.next_functions
            nodes.append((number, node, edges))
            for below, _ in edges:
                if below is not None and type(below) is not _Leaf and below not in seen:
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
            raise TooLarge(learns=self.learns)

    def _holds(self, plan: _Plan, nodes: list[tuple[int, Any, Any]]) -> bool:
        """False if this graph uses other frozen layers than the plan's."""
        read = self._reader.read
        return all(
            any(_identity(tensor) == identity for tensor in read(nodes[at][1], name))
            for at, name, identity in plan.frozen
        )

    def _follow(self, plan: _Plan, nodes: list[tuple[int, Any, Any]]) -> None:
        saved, read, has_data = self.saved, self._reader.read, saving.HAS_DATA
        for count, (at, place, names) in enumerate(plan.reads, 1):
            node = nodes[at][1]
            for name in names:
                try:
                    kept: Any = getattr(node, name) if has_data and name != CONTEXT else None
                except RuntimeError as error:  # released
                    pass_on(error)
                    continue
                if type(kept) is SavedTensor and type(data := kept.data) is Tensor:  # nearly always
                    saved.append((data, place))
                else:
                    saved += [(tensor, place) for tensor in read(node, name)]
            if not count % _LOOK_AT_CLOCK_EVERY:
                self._look_at_clock()

    def _attribute(self, plan: _Plan, nodes: list[tuple[int, Any, Any]]) -> None:
        """Attributes the nodes that the plan does not have yet, oldest first: inputs before the nodes they feed."""
        if plan.known == len(nodes):
            return
        positions = {node: at for at, (_, node, _) in enumerate(nodes)}
        placed, frozen = plan.placed, self._places.frozen
        read, weights = self._reader.read, self._weights
        for at in range(plan.known, len(nodes)):
            _, node, edges = nodes[at]
            kind: Any = type(node)
            names = fields(kind)
            used: Place | None = None
            passes: int | None = None
            fed: tuple[int, _Placed] | None = None
            casts: list[int] = []  # positions of casts among its inputs
            for below, _ in edges:
                if below is None:
                    continue
                parameter = id(below.variable) if type(below) is _Leaf else None
                position = positions.get(below)
                feeder = placed[position] if position is not None and position < at else None
                if parameter is None and feeder is not None:
                    parameter = feeder.parameter
                    if feeder.cast is not None:
                        casts.append(feeder.cast)
                if parameter is not None:
                    if not names and len(edges) == 1:  # a view or a cast: the node that consumes it uses the parameter
                        passes = parameter
                    elif used is None:
                        used = self._use(plan, parameter)
                elif feeder is not None and position is not None and (fed is None or position > fed[0]):
                    fed = position, feeder
            packed = self._reader.packed
            kept = {name: read(node, name) for name in names}
            if frozen and used is None and passes is None:
                for field, identity in ((name, _identity(tensor)) for name in names for tensor in kept[name]):
                    if (used := frozen.get(identity)) is not None:
                        plan.frozen.append((at, field, identity))
                        break
            cast = casts[0] if casts and passes is not None else None
            if passes is not None and cast is None and (made := _cast(node, edges[0][0])) is not None:
                plan.casts[at], cast = made, at
                plan.copies[made.parameter] = made
            for taken in casts if passes is None else ():
                copy = plan.casts.get(taken)
                if copy is not None and any(_bytes(each) == copy.nbytes for held in kept.values() for each in held):
                    del plan.casts[taken]
            place, around = None, None
            if used is not None:
                place, around = used, self._places.around(used)
            elif fed is not None and fed[1].around is not None:
                place, around = self._places.within(fed[1].around, _operator(node))
            placed.append(_Placed(around, passes, cast))
            self.saved += [(tensor, place) for tensors in kept.values() for tensor in tensors]
            # fields empty in an unreleased node are always empty, unless pack hooks are used
            whole = any(kept.values()) and self._reader.packed == packed
            to_read = tuple(
                name
                for name, held in kept.items()
                if any(_identity(each) not in weights for each in held) or not (held or whole) or name == CONTEXT
            )
            if to_read:
                plan.reads.append((at, place, to_read))
            plan.known = at + 1
            if not plan.known % _LOOK_AT_CLOCK_EVERY:
                self._look_at_clock()
        plan.placed = []

    def _use(self, plan: _Plan, parameter: int) -> Place | None:
        places = self._places.by_parameter.get(parameter)
        if not places:
            return None
        if len(places) == 1:
            return places[0]
        use = plan.uses.get(parameter, 0)
        plan.uses[parameter] = use + 1
        return places[min(use, len(places) - 1)]


class _Placed(NamedTuple):
    around: Around | None  # of the operators that it feeds
    parameter: int | None  # id of the parameter that it only reshapes or casts
    cast: int | None = None  # position of the node that cast it


def _structure(nodes: list[tuple[int, Any, Any]]) -> tuple[Any, ...]:
    """Node types, edges and parameters of a graph: the key of its plan."""
    at = {node: position for position, (_, node, _) in enumerate(nodes)}
    structure: list[Any] = []
    for _, node, edges in nodes:
        structure.append(id(type(node)))  # the id: the class of a compiled function would keep its tensors alive
        for below, _ in edges:
            structure.append(id(below.variable) if type(below) is _Leaf else at.get(below))
    return tuple(structure)


def _operator(node: Any) -> str:
    return _operator_named(type(node).__name__)


@functools.cache
def _operator_named(name: str) -> str:
    """GeluBackward0 → gelu."""
    return name.rpartition("::")[2].partition("Backward")[0].lower()


def _cast(node: Any, below: Any) -> Cast | None:
    """The half-precision copy of a parameter that `node` made, if any."""
    if type(below) is not _Leaf or not type(node).__name__.startswith("ToCopyBackward"):
        return None
    metadata, variable = getattr(node, "_input_metadata", None), below.variable
    if not metadata or metadata[0].dtype.itemsize != HALF or variable.dtype is not torch.float32:
        return None
    return Cast(id(variable), variable.get_device(), variable.numel() * HALF)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if type(tensor) in _PLAIN and tensor.layout is torch.strided else 0


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if type(tensor) in _PLAIN and tensor.layout is torch.strided else 0
