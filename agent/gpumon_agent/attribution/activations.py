"""Activations: tensors saved by autograd for backward, and outputs of forward, while they are alive.

Model. In a sampled step the graph is walked (graph.py) from the root's output as forward ends, and from backward's
roots as it begins, which adds the loss. (An evaluation has no graph; its output is still recorded.) Each storage gets a
weak reference: its Python object lives exactly as long as the storage. At a boundary, activations are the recorded
storages that are alive and have no owner (weights, inputs, ...): none after a plain backward, unless the script keeps a
graph or an output. Where C++ is compiled, one call of it finds them; their list is made when somebody reads it.
Autocast's cache keeps a half-precision copy of each weight that it casts. Copies that no gradient needs (a first
layer's, biases) are in no node; their sizes follow from the nodes that made them. An evaluation makes no nodes, and is
assumed to copy what a training forward copied.
Cost: that of graph.py; a walk stops after `WALK_NS`. Unless it extended its plan, sampled steps are then skipped: 1,
doubled each time, at most `REST_MAX`; a complete walk resets this.
Known limitations. Tensors saved in a step that was not sampled, and still alive, are unexplained.
Nothing here keeps a tensor or a graph alive.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpumon_agent.attribution import native_storages
from gpumon_agent.attribution.graph import HALF, Cast, GraphWalk, Place, Places, TooLarge
from gpumon_agent.attribution.kept import NO_STORAGES, Claimed, Storages
from gpumon_agent.attribution.native_storages import LivingStorages
from gpumon_agent.attribution.saving import READABLE, NodeReader, SavedTensorWatch
from gpumon_agent.governor import Rest
from gpumon_agent.storages import plain, untransformed

WALK_NS = 7_000_000
REST_MAX = 32
"""sampled steps without a walk, or turns without a breakdown of the peak"""
_REPORTED_AT = 4  # skipped steps from which a notice is sent: a single slow walk is not worth one
_STRIDED = torch.strided
_transformed = torch._C._functorch.is_functorch_wrapped_tensor


class _Noted(weakref.ref[Any]):
    __slots__ = ("address", "index", "place")
    address: int
    index: int
    place: Place | None


class Alive(NamedTuple):
    address: int
    nbytes: int
    place: Place | None


class Saved:
    """The activations on one device at a boundary."""

    def __init__(self, storages: Storages, nbytes: int, noted: Mapping[int, _Noted]) -> None:
        self.storages = storages
        self.nbytes = nbytes
        self._noted = noted

    def __iter__(self) -> Iterator[Alive]:
        for identity, nbytes in self.storages.by_identity.items():
            noted = self._noted[identity]
            yield Alive(noted.address, nbytes, noted.place)


NOTHING = Saved(NO_STORAGES, 0, {})


class Activations:
    """Saved storages of the models' graphs. `limited`: walks are limited in time (the governor is on)."""

    def __init__(self, places: Callable[[], Places], tell: Callable[[str], None], *, limited: bool) -> None:
        self.known = READABLE
        """whether the current step's graphs were walked completely"""
        self.hidden: dict[str, None] = {}
        """names of pack hooks whose results are opaque"""
        self._recomputes = False
        """whether the newest walked step had a checkpoint that recomputes a part of the forward"""
        self._places = places
        self._casts: dict[int, Cast] = {}  # of this step, by parameter: a later copy replaces an earlier one
        self._copied: dict[int, Cast] = {}  # all copies by training forwards so far, saved by a node or not
        self._tell = tell
        self._budget_ns = WALK_NS if limited else None
        native = native_storages.load()
        self._noted: dict[int, _Noted] = {}  # by the storage's identity; shared with `Saved`
        self._living = native and LivingStorages(native)
        self._newly: list[_Noted] = []  # since the last boundary
        self._walked: tuple[int, int] = (0, -1)  # thread, sequence number of the newest walked node
        self._rest = Rest(REST_MAX)
        self._reported = self._reported_hooked = False
        self._watch = SavedTensorWatch()

    @property
    def recomputes(self) -> bool:
        """Whether the last backward recomputed parts of the forward."""
        return self._recomputes or self._watch.recomputed

    @property
    def walked(self) -> bool:
        """A graph of the current step was walked."""
        return self.known and self._walked[1] >= 0

    def begin_step(self, *, walks: bool) -> None:
        """A sampled step begins. `walks`: its graph will be walked."""
        if self._watch.hooked and not self._reported_hooked:
            self._reported_hooked = True
            self._tell("with this version of torch, activations cannot be read if saved-tensor hooks are used")
        self.known = walks and READABLE and not self._watch.hooked and self._rest.is_over()
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
        """Records what the graphs behind `roots` saved, except nodes already walked in this step.

        `weights`: identities of storages to skip; gradients must not be among them, because a freed one's identity may
        be reused in the graph. `made`: other tensors of the graph. `whole`: walks all nodes again, because sequence
        numbers do not order nodes of different threads.
        """
        if not self.known:
            return
        if self._watch.hooked:
            self.known = False
            return
        roots = list(roots)
        thread = get_ident()
        after = self._walked[1] if self._walked[0] == thread and not whole else -1
        reader = NodeReader()
        try:
            walk = GraphWalk(
                roots, self._places(), after=after, budget_ns=self._budget_ns, weights=weights, reader=reader
            )
        except TooLarge as reason:
            self.known = False
            self._recomputes = self._recomputes or reader.recomputes
            if reason.learns:
                return
            self._rest.judge(dear=True)
            if self._rest.turns >= _REPORTED_AT and not self._reported:
                self._reported = True
                self._tell("walking the graph takes too long: activations stay unattributed in most sampled steps")
            return
        self._rest.judge(dear=False)
        self._recomputes = self._recomputes or reader.recomputes
        self._walked = (thread, walk.newest)
        self.hidden |= walk.hidden
        self._copied.update(walk.copies)
        for parameter in walk.copies:  # replaces an evaluation's copies
            self._casts.pop(parameter, None)
        self._casts.update((cast.parameter, cast) for cast in walk.casts.values())
        self._note(walk.saved, weights)
        self._note([(root, None) for root in (*roots, *made) if isinstance(root, Tensor)], weights)

    def evaluated(self, parameters: Iterable[Tensor]) -> None:
        """A model with these parameters was called without a graph under autocast: it makes training's copies."""
        for parameter in parameters if self.known and self._copied else ():
            cast = self._copied.get(id(parameter))
            if cast is not None and cast.nbytes == parameter.numel() * HALF:  # the id may be reused
                self._casts[cast.parameter] = cast

    def forget_models(self) -> None:
        """Call it when the watched models change."""
        self._copied.clear()

    def _note(self, saved: Iterable[tuple[Tensor, Place | None]], weights: Container[int]) -> None:
        noted = self._noted
        new: dict[int, _Noted] = {}
        for tensor, place in saved:
            if _transformed(tensor):
                tensor = untransformed(tensor)
            for part in (tensor,) if type(tensor) is Tensor and tensor.layout is _STRIDED else plain(tensor):
                storage = part.untyped_storage()
                identity = storage._cdata
                if identity in weights or identity in new:
                    continue
                known = noted.get(identity)
                if known is None or known() is None:
                    new[identity] = known = _Noted(storage)
                    known.address, known.index, known.place = storage.data_ptr(), part.get_device(), place
        self._newly += new.values()
        if noted.keys().isdisjoint(new):
            noted.update(new)
        else:  # an identity is used again
            self._noted = noted | new
        if self._living is not None:
            self._living.add(new, list(new.values()))

    def alive(self, index: int, claimed: Claimed) -> Saved:
        """Claims the live storages on one device that are not in `claimed`."""
        self._newly.clear()
        saved = NOTHING
        if self._noted:
            saved = self._seen(claimed) or self._found(index, claimed) or self._looked_up(index, claimed)
        claimed.activations = saved.storages
        return saved

    def _looked_up(self, index: int, claimed: Claimed) -> Saved:
        self._living = None  # C++ has forgotten the dead
        self._noted = {identity: noted for identity, noted in self._noted.items() if noted() is not None}
        found = {
            identity: storage.nbytes()
            for identity, noted in self._noted.items()
            if noted.index == index and (storage := noted()) is not None and identity not in claimed
        }
        return Saved(Storages(found), sum(found.values()), self._noted)

    @property
    def storages(self) -> LivingStorages | None:
        """Those that C++ reads."""
        return self._living if self._noted else None

    def _seen(self, claimed: Claimed) -> Saved | None:
        """The same if C++ has found it with what is `claimed`. None: it has not."""
        living = self._living
        if living is None or claimed.seen != len(claimed.others):
            return None
        storages, nbytes = living.found()
        return Saved(Storages(storages), nbytes, self._without_dead(living))

    def _without_dead(self, living: LivingStorages) -> dict[int, _Noted]:
        noted = self._noted
        if len(living) < len(noted) // 2:
            noted = self._noted = {identity: noted[identity] for identity in living.identities()}
            living.keep(noted.values())
        return noted

    def _found(self, index: int, claimed: Claimed) -> Saved | None:
        """The same in C++, by itself. None: it cannot."""
        living = self._living
        if living is None:
            return None
        taken = self._noted.keys() & claimed.others
        read = living.read(index, array("q", taken))
        if read is None:
            return None
        noted = self._without_dead(living)
        found, nbytes = read
        storages = Storages(found)
        if len(claimed.gradients) or not claimed.lasting.isdisjoint(noted):
            owned = [identity for identity in storages.by_identity if identity in claimed]
            if owned:
                again = living.read(index, array("q", [*taken, *owned]))
                return again and Saved(Storages(again[0]), again[1], noted)
        return Saved(storages, nbytes, noted)

    def living(self, index: int) -> list[Alive]:
        """All recorded live storages on one device. Claims nothing."""
        return [
            Alive(noted.address, storage.nbytes(), noted.place)
            for noted in self._noted.values()
            if noted.index == index and (storage := noted()) is not None
        ]

    def newly(self, index: int) -> list[Alive]:
        """Live storages on one device recorded since the last boundary."""
        return [
            Alive(noted.address, storage.nbytes(), noted.place)
            for noted in self._newly
            if noted.index == index and (storage := noted()) is not None
        ]

    def cast_bytes(self, index: int) -> int:
        """Bytes of autocast's copies of weights that no node saved."""
        return sum(cast.nbytes for cast in self._casts.values() if cast.device == index)

    def forget_casts(self) -> None:
        """Autocast has ended, and its cache is cleared."""
        self._casts.clear()

    def stop(self) -> None:
        self._watch.stop()
