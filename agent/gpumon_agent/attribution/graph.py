"""What autograd saved for backward: a graph walked from its roots, without unpacking and without a hook.

Model. From the roots' `grad_fn` every node is reached through `next_functions`; saving.py reads what each one keeps.
Which module a node belongs to (no hook tells, so nothing changes for torch.compile):
1. one that uses a parameter, directly or through views and casts of it, or that saved one: the parameter's module.
   Of a tied parameter, the first use belongs to the first module that holds it, the second to the second.
2. any other: where the newest of the nodes that feed it belongs; if that one used parameters, the module around it.
   Within that module a child without parameters whose class is the node's operator (a GELU for `GeluBackward`) takes
   it, if there is one such child, or else the first one that stands behind the child which feeds it.
3. one that nothing of the model feeds: none.

A step's graph is mostly the last one's: the same kinds of node in the same order, feeding one another in the same way,
from the same parameters. Then what was found out about it holds (a `_Plan`): where each node belongs, and which of its
fields hold nothing but weights, which the ledger counts elsewhere and nobody has to read. A walk that has no time to
find it all out leaves what it found to the next.

Cost: 2 to 3 µs a node, 4 where the graph is new; see benchmarks/inventory.py.
Known limitations. Rule 2 says "at or around": an operator called between two modules belongs to the one around the
first.
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
from gpumon_agent.attribution.saving import CONTEXT, Reader, SavedTensor, fields
from gpumon_agent.attribution.spread import fsdp_parameters
from gpumon_agent.guard import pass_on
from gpumon_agent.hooks.backward_roots import node_of
from gpumon_agent.storages import storages

_Leaf: Any = torch._C._functions.AccumulateGrad

Place = tuple[int, str]
"""index of a watched model, path of a module in it"""
Around = tuple[Place, str]
"""a module that holds others, and the name of the child that was left last"""

_PLAIN = (Tensor, Parameter)
HALF = 2
"""bytes"""
_LOOK_AT_CLOCK_EVERY = 64  # nodes
_PLANS_MAX = 8  # of a model: graphs of other shapes (an evaluation, a last batch) take turns
_NO_WEIGHTS: frozenset[int] = frozenset()


class Cast(NamedTuple):
    """A parameter's copy in half precision."""

    parameter: int  # its id
    device: int
    nbytes: int


class TooLarge(Exception):
    """The graph could not be walked within the time allowed. `learns`: more of it is known now, the next is faster."""

    def __init__(self, *, learns: bool) -> None:
        super().__init__()
        self.learns = learns


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
        self.plans: dict[tuple[Any, ...], _Plan] = {}
        """what was found out about graphs, by their structure"""
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


class _Plan:
    """What holds for every graph of one structure: of its first `known` nodes, if a walk had no time for the rest."""

    def __init__(self) -> None:
        self.known = 0
        self.reads: list[tuple[int, Place | None, tuple[str, ...]]] = []
        """nodes by their position, where each belongs, and which of its fields are to be read"""
        self.frozen: list[tuple[int, str, int]] = []
        """what told a node's place where no parameter did: position, field, identity of a frozen weight's storage"""
        self.placed: list[_Placed] = []
        self.uses: dict[int, int] = {}
        """id of a tied parameter → how often it was used so far"""
        self.casts: dict[int, Cast] = {}
        """copies of parameters in half precision that no node keeps, by the position of the node that made each"""
        self.copies: dict[int, Cast] = {}
        """all copies of parameters in half precision, by the parameter's id"""


class GraphWalk:
    """One walk over what `roots` (tensors, or gradient edges) were computed from.

    `after`: nodes with no later sequence number were walked before. `budget_ns`, of this thread's time: raises
    TooLarge beyond it. `weights`: identities of storages that need not be told. `reader` keeps what it has met.
    """

    def __init__(
        self,
        roots: Iterable[object],
        places: Places,
        *,
        after: int = -1,
        budget_ns: int | None = None,
        weights: Container[int] = _NO_WEIGHTS,
        reader: Reader | None = None,
    ) -> None:
        self.saved: list[tuple[Tensor, Place | None]] = []
        """what is kept for backward, and where it belongs"""
        self.newest = after
        """sequence number of the newest node"""
        self.learns = False
        """whether there is something in this graph that was not known before"""
        self._places = places
        self._weights = weights
        self._reader = reader or Reader()
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
        """copies of parameters in half precision that nothing in this graph keeps: those that are left autocast has"""
        self.copies = plan.copies
        """these and those that are kept: what autocast copies when the model is called without a graph"""
        self.learns = plan.known < len(nodes)
        self._follow(plan, nodes)
        self._attribute(plan, nodes)

    @property
    def hidden(self) -> dict[str, None]:
        """Names of pack hooks whose results nobody can look into, in the order in which they were met."""
        return self._reader.hidden

    def _collect(self, roots: Iterable[object], after: int) -> list[tuple[int, Any, Any]]:
        """(sequence number, node, its next functions), oldest first; parameters' own nodes are not among them."""
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
        """False where another frozen layer was taken than in the graph that the plan was made with."""
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
        """What the plan does not know yet: oldest first, so that a node's feeders have their places before it."""
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
            casts: list[int] = []  # what it takes of them
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
                    if not names and len(edges) == 1:  # a view or a cast of it: whoever takes that uses it
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
            # what is empty in a node that was not released always is, unless somebody packs what is kept there
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
    """What is known of a node that was passed."""

    around: Around | None  # of the operators that it feeds
    parameter: int | None  # id of the one that it only reshapes or casts
    cast: int | None = None  # position of the node that cast it


def _structure(nodes: list[tuple[int, Any, Any]]) -> tuple[Any, ...]:
    """Kinds of node, whom each takes from, and which parameters: equal where a plan holds."""
    at = {node: position for position, (_, node, _) in enumerate(nodes)}
    told: list[Any] = []
    for _, node, edges in nodes:
        told.append(id(type(node)))  # no class is kept: a compiled function's holds what it was compiled with
        for below, _ in edges:
            told.append(id(below.variable) if type(below) is _Leaf else at.get(below))
    return tuple(told)


def _operator(node: Any) -> str:
    return _operator_named(type(node).__name__)


@functools.cache
def _operator_named(name: str) -> str:
    """GeluBackward0 → gelu."""
    return name.rpartition("::")[2].partition("Backward")[0].lower()


def _cast(node: Any, below: Any) -> Cast | None:
    """What `node` made of a parameter, if that is a copy of it in half precision."""
    if type(below) is not _Leaf or not type(node).__name__.startswith("ToCopyBackward"):
        return None
    told, variable = getattr(node, "_input_metadata", None), below.variable
    if not told or told[0].dtype.itemsize != HALF or variable.dtype is not torch.float32:
        return None
    return Cast(id(variable), variable.get_device(), variable.numel() * HALF)


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if type(tensor) in _PLAIN and tensor.layout is torch.strided else 0


def _identity(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if type(tensor) in _PLAIN and tensor.layout is torch.strided else 0
