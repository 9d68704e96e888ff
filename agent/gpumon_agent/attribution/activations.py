"""Activations: the bytes that autograd saved for backward, and what forward returned, for as long as they are alive.

Model. On a sampled step the graph is walked (graph.py) as the root's forward ends, from what it returned, and as
backward begins, from where it begins: then the loss is there too. (An evaluation has no graph; what it returned is
noted all the same.) Each storage is noted once, weakly: its Python object lives exactly as long as the storage, so a
weak reference tells. At any boundary activations are the noted storages that are still alive and that no owner
(weights, inputs, ...) claims: after a plain backward none, with a graph or an output that somebody keeps, those.
Within autocast its cache keeps a copy of each weight that was multiplied: those that no gradient needs (a first
layer's, biases) are in no node; their sizes follow from the nodes that made them. An evaluation makes no node, and is
taken to copy what a training forward did.
Cost: graph.py's; a look at the clock ends a walk that takes longer than `WALK_NS`. Then as many sampled steps pass
without one, twice as many each time it happens again (at most `REST_MAX`), and a walk that ends well begins anew.
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

from gpumon_agent.attribution.graph import HALF, Cast, GraphWalk, Place, Places, TooLarge
from gpumon_agent.attribution.saving import READABLE, Reader, Watch
from gpumon_agent.storages import plain, untransformed

WALK_NS = 7_000_000
REST_MAX = 32
"""sampled steps without a walk"""
_TOLD_AT = 4  # steps of rest: a walk that one slow moment ended is nothing to tell
_STRIDED = torch.strided
_transformed = torch._C._functorch.is_functorch_wrapped_tensor


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
        self._recomputes = False
        """whether a checkpoint that runs a part of the forward again was met, in the newest step that was walked"""
        self._places = places
        self._casts: dict[int, Cast] = {}  # of this step, by parameter: a later copy takes the place of an earlier
        self._copied: dict[int, Cast] = {}  # what training's forwards copied so far, kept by a node or not
        self._tell = tell
        self._budget_ns = WALK_NS if limited else None
        self._noted: dict[int, _Noted] = {}  # by the storage's identity
        self._newly: list[_Noted] = []  # since the last boundary
        self._walked: tuple[int, int] = (0, -1)  # thread, number of the newest node that was walked
        self._rest = 0  # sampled steps, after a walk that took too long
        self._resting = 0  # how many of them are left
        self._told = self._told_hooked = False
        self._watch = Watch()

    @property
    def recomputes(self) -> bool:
        """Whether the last backward ran parts of the forward again."""
        return self._recomputes or self._watch.recomputed

    def begin_step(self, *, walks: bool) -> None:
        """Another step: nothing of its graph was walked yet. `walks`: it will be."""
        if self._watch.hooked and not self._told_hooked:
            self._told_hooked = True
            self._tell("with this version of torch activations cannot be read where saved-tensor hooks are used")
        self.known = walks and READABLE and not self._watch.hooked and not self._resting
        self._resting -= walks and self._resting > 0
        self._recomputes = self._recomputes and not self.known
        self._watch.recomputed = False
        self.hidden.clear()
        self._newly.clear()
        self._casts.clear()
        self._walked = (0, -1)

    def walk(
        self,
        roots: Iterable[object],
        weights: Container[int] = (),
        *,
        made: Iterable[Tensor] = (),
        whole: bool = False,
    ) -> None:
        """Notes what the graphs behind `roots` keep, as far as they were not walked before in this step.

        `weights`: identities of storages that need no note. Not of all that has an owner: a gradient may be gone by
        now, and a storage of the graph be found where its was. `made`: what somebody holds of the graph. `whole`: with
        what was walked, for nodes made in different threads cannot be put in order.
        """
        if not self.known:
            return
        if self._watch.hooked:
            self.known = False
            return
        roots = list(roots)
        thread = get_ident()
        after = self._walked[1] if self._walked[0] == thread and not whole else -1
        reader = Reader()
        try:
            walk = GraphWalk(
                roots, self._places(), after=after, budget_ns=self._budget_ns, weights=weights, reader=reader
            )
        except TooLarge as reason:
            self.known = False
            self._recomputes = self._recomputes or reader.recomputes
            if reason.learns:
                return
            self._rest = self._resting = min(max(1, self._rest * 2), REST_MAX)
            if self._rest >= _TOLD_AT and not self._told:
                self._told = True
                self._tell(
                    "the graph takes too long to be walked within a sampled step: activations stay unattributed in most"
                )
            return
        self._rest = 0
        self._recomputes = self._recomputes or reader.recomputes
        self._walked = (thread, walk.newest)
        self.hidden |= walk.hidden
        self._copied.update(walk.copies)
        for parameter in walk.copies:  # an evaluation's are no more
            self._casts.pop(parameter, None)
        self._casts.update((cast.parameter, cast) for cast in walk.casts.values())
        self._note(walk.saved, weights)
        self._note([(root, None) for root in (*roots, *made) if isinstance(root, Tensor)], weights)

    def evaluated(self, parameters: Iterable[Tensor]) -> None:
        """A model with these was called without a graph, where autocast makes the copies that training had."""
        for parameter in parameters if self.known and self._copied else ():
            cast = self._copied.get(id(parameter))
            if cast is not None and cast.nbytes == parameter.numel() * HALF:  # its id may have been another's
                self._casts[cast.parameter] = cast

    def forget_models(self) -> None:
        """Others are watched from here on, or are wrapped."""
        self._copied.clear()

    def _note(self, saved: Iterable[tuple[Tensor, Place | None]], weights: Container[int]) -> None:
        noted = self._noted
        for tensor, place in saved:
            if _transformed(tensor):
                tensor = untransformed(tensor)
            for part in (tensor,) if type(tensor) is Tensor and tensor.layout is _STRIDED else plain(tensor):
                storage = part.untyped_storage()
                identity = storage._cdata
                if identity in weights:
                    continue
                known = noted.get(identity)
                if known is None or known() is None:
                    known = _Noted(storage)
                    known.address, known.index, known.place = storage.data_ptr(), part.get_device(), place
                    noted[identity] = known
                    self._newly.append(known)

    def alive(self, index: int, claimed: set[int]) -> list[Alive]:
        """What is alive on one device and not in `claimed`, which it joins."""
        self._newly.clear()
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

    def newly(self, index: int) -> list[Alive]:
        """What was noted since the last boundary and is alive on one device."""
        return [
            Alive(noted.address, storage.nbytes(), noted.place)
            for noted in self._newly
            if noted.index == index and (storage := noted()) is not None
        ]

    def cast_bytes(self, index: int) -> int:
        """Of the copies that autocast made of weights, as far as no node keeps them."""
        return sum(cast.nbytes for cast in self._casts.values() if cast.device == index)

    def forget_casts(self) -> None:
        """Autocast has ended, and with it its cache."""
        self._casts.clear()

    def stop(self) -> None:
        """Leaves nothing replaced."""
        self._watch.stop()
