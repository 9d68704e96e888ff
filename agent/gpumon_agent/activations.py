"""Activations: the bytes that autograd saved for backward, and what forward returned, for as long as they are alive.

Model. On a sampled step the graph is walked (graph.py) as the root's forward ends, from what it returned, and as
backward begins, from where it begins: then the loss is there too. (An evaluation has no graph; what it returned is
noted all the same.) Each storage is noted once, weakly. At any boundary
activations are the noted storages that are still alive and that no owner (weights, inputs, ...) claims: after a plain
backward none, with a graph or an output that somebody keeps, those. A storage's Python object lives exactly as long as
the storage, so a weak reference tells.
Cost: graph.py's 3 to 5 µs a node; a look at the clock ends a walk that takes longer than `WALK_NS`, and after
`GIVEN_UP_AFTER` of those in a row no more walks are made.
Known limitations. What was saved on a step that was not sampled and is still kept is not noted: it is unexplained.
Nothing here keeps a tensor or a graph alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .graph import READABLE, Place, Places, TooLarge, Walk
from .storages import plain, untransformed

WALK_NS = 7_000_000
GIVEN_UP_AFTER = 3
_STRIDED = torch.strided


class _Noted(weakref.ref[Any]):
    """A storage that was saved, and by which module."""

    __slots__ = ("address", "index", "place")
    address: int
    index: int
    place: Place | None


class Alive(NamedTuple):
    """A storage that was saved and is still there."""

    address: int
    nbytes: int
    place: Place | None


class Activations:
    """What was noted of the models' graphs. `limited`: a walk may be given up (the governor is on)."""

    def __init__(self, places: Callable[[], Places], tell: Callable[[str], None], *, limited: bool) -> None:
        self.known = READABLE
        """whether the graphs of the present step were walked whole"""
        self.hidden: dict[str, None] = {}
        """who packed what nobody can look into, by name"""
        self._places = places
        self._tell = tell
        self._budget_ns = WALK_NS if limited else None
        self._noted: dict[int, _Noted] = {}  # by the storage's identity
        self._walked: tuple[int, int] = (0, -1)  # thread, number of the newest node that was walked
        self._given_up = 0

    def begin_step(self, *, walks: bool) -> None:
        """Another step: nothing of its graph was walked yet. `walks`: it will be."""
        self.known = walks and READABLE and self._given_up < GIVEN_UP_AFTER
        self.hidden.clear()
        self._walked = (0, -1)

    def walk(self, roots: Iterable[object], claimed: Container[int] = (), *, whole: bool = False) -> None:
        """Notes what the graphs behind `roots` keep, as far as they were not walked before in this step.

        `claimed`: identities of storages that an owner has. `whole`: with what was walked, for nodes made in different
        threads cannot be put in order.
        """
        if not self.known:
            return
        roots = list(roots)
        thread = get_ident()
        after = self._walked[1] if self._walked[0] == thread and not whole else -1
        try:
            walk = Walk(roots, self._places(), after=after, budget_ns=self._budget_ns)
        except TooLarge:
            self.known = False
            self._given_up += 1
            if self._given_up == GIVEN_UP_AFTER:
                self._tell("the graph is too large to be walked within a sampled step: activations stay unattributed")
            return
        self._given_up = 0
        self._walked = (thread, walk.newest)
        self.hidden |= walk.hidden
        for tensor, place in walk.saved:
            self._note(tensor, place, claimed)
        for root in roots:
            if isinstance(root, Tensor):
                self._note(root, None, claimed)

    def _note(self, tensor: Tensor, place: Place | None, claimed: Container[int]) -> None:
        tensor = untransformed(tensor)
        for part in (tensor,) if type(tensor) is Tensor and tensor.layout is _STRIDED else plain(tensor):
            storage = part.untyped_storage()
            identity = storage._cdata
            if identity in claimed:
                continue
            known = self._noted.get(identity)
            if known is None or known() is None:
                known = self._noted[identity] = _Noted(storage)
                known.address, known.index, known.place = storage.data_ptr(), part.get_device(), place

    def alive(self, index: int, claimed: set[int]) -> list[Alive]:
        """What is alive on one device and not in `claimed`, which it joins."""
        found = []
        gone = []
        for identity, noted in self._noted.items():
            storage = noted()
            if storage is None:
                gone.append(identity)
            elif noted.index == index and identity not in claimed:
                found.append(Alive(noted.address, storage.nbytes(), noted.place))
                claimed.add(identity)
        for identity in gone:
            del self._noted[identity]
        return found
