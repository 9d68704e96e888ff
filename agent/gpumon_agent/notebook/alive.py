"""The tensors that a cell made and that are alive after it, and the names that hold them.

Model. Python's collector lists all tensors that Python sees, before and after the cell; a storage that was not there
before is new. The census' heap walker then names what holds the new ones: first the user's variables, then IPython's
own (`Out[7]`, `_`) and the frames of the last exception, then everything else. A storage that two of them hold is told
with both, for it is freed only when both let go.
Cost: some 20 ms for 700,000 objects, twice, and the walk, at most `WALK_NS`.
What autograd saved for backward is told as the graph of the tensor that keeps it.
Known limitations: those of heap_walker. Of the C++ library's own memory (workspaces) nothing is seen. If `Out[7]`
holds a container that holds a variable's container, only the variable is told.
"""

from __future__ import annotations

import gc
import re
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from gpumon_agent.leaks import gc_roots
from gpumon_agent.leaks.graph_retention import saved
from gpumon_agent.leaks.heap_walker import DEPTH_MAX, HeapWalker, Root
from gpumon_agent.leaks.object_children import Files, Name
from gpumon_agent.notebook.holders import GRAPH_OF, Held, Holders
from gpumon_agent.notebook.view import Alive as Told
from gpumon_agent.notebook.view import Row
from gpumon_agent.storages import plain, shape_of
from gpumon_agent.thread_clock import ThreadClock

WALK_NS = 2_000_000_000
"""CPU time of the search for names: a cell's end may take that long, as a person waits for it."""
ROWS_MAX = 12
NAMES_MAX = 16  # holders remembered of one storage
GRAPHS_MAX = 64  # tensors whose graph is read
GRAPHS_NS = 200_000_000  # CPU time for them
_UNREAL = frozenset({"FakeTensor", "FunctionalTensor"})
_NUMBER = re.compile(r"\.\d+(?=\.|\[|$)")


class _Storage:
    """A storage that is alive now. Strong references, so only while a view is made."""

    def __init__(self, storage: Any, tensor: Tensor) -> None:
        self.nbytes: int = storage.nbytes()
        self.tensor = tensor
        self.names: dict[Name, None] = {}


class Alive:
    """The storages that exist as this is made: weak references, by identity."""

    def __init__(self, *, empty: bool = False) -> None:
        self._device = _device()
        found = {} if empty else _storages(self._device)
        self._known = {identity: weakref.ref(storage) for identity, (storage, _) in found.items()}

    def since(self, shell: Any, *, everything: bool = False) -> Told:
        """What is alive now and was not then (or, `everything`, all that is alive), by holder, the largest first."""
        enabled = gc.isenabled()
        gc.disable()  # a collection in between would free some of what was just listed
        try:
            with torch._C.DisableTorchFunction():
                return self._since(shell, everything)
        finally:
            if enabled:
                gc.enable()

    def _since(self, shell: Any, everything: bool) -> Told:
        device = _device()
        if device != self._device:
            self._known.clear()  # CUDA was initialized meanwhile: all of its tensors are new
        found = {
            identity: _Storage(storage, tensor)
            for identity, (storage, tensor) in _storages(device).items()
            if everything or not self._was_there(identity, storage)
        }
        holders = Holders(shell, running=everything)
        search = _Search(found, holders)
        complete = search.run()
        rows = self._graph_rows(found, search.with_graph, holders, everything) + _rows(found.values(), holders)
        rows.sort(key=lambda row: -row.nbytes)
        return Told(
            device,
            sum(row.nbytes for row in rows),
            sum(row.tensors for row in rows),
            tuple(rows[:ROWS_MAX]),
            len(rows[ROWS_MAX:]),
            sum(row.nbytes for row in rows[ROWS_MAX:]),
            everything,
            complete,
        )

    def _graph_rows(
        self,
        found: dict[int, _Storage],
        with_graph: dict[int, tuple[Tensor, Name]],
        holders: Holders,
        everything: bool,
    ) -> list[Row]:
        """What autograd saved for backward, by the variable that keeps the graph. Takes it out of `found`."""
        clock = ThreadClock(GRAPHS_NS)
        kept: dict[tuple[Held, ...], dict[int, int]] = {}
        named = {identity for identity, each in found.items() if each.names}
        seen = named.copy()
        if not everything:
            seen |= {identity for identity, known in self._known.items() if known() is not None}
        for tensor, name in with_graph.values():
            new = {identity: nbytes for identity, nbytes in saved(tensor, GRAPHS_NS).items() if identity not in seen}
            seen.update(new)
            if new:
                kept.setdefault(holders.of((name,)), {}).update(new)
            if clock.over():
                break
        for identities in kept.values():
            for identity in identities:
                found.pop(identity, None)
        rows = []
        for held, identities in kept.items():
            names = tuple(GRAPH_OF + each.text for each in held)
            rows.append(Row(names, holders.hint(held), len(identities), sum(identities.values()), None, ""))
        return rows

    def _was_there(self, identity: int, storage: Any) -> bool:
        known = self._known.get(identity)
        return known is not None and known() is storage


def _device() -> str:
    return "cuda" if torch.cuda.is_initialized() else "cpu"


def _storages(device: str) -> dict[int, tuple[Any, Tensor]]:
    """By identity: the storage and a tensor that uses it. Gradients count, though Python may not have seen them."""
    found: dict[int, tuple[Any, Tensor]] = {}
    with torch._C.DisableTorchFunction():
        for each in gc.get_objects():
            if issubclass(type(each), Tensor) and type(each).__name__ not in _UNREAL:
                for tensor in _with_gradient(each):
                    for identity, storage, part in _parts(tensor, device):
                        if part.grad_fn is not None or identity not in found:
                            found[identity] = storage, part  # rather the one with a graph
    return found


def _with_gradient(tensor: Any) -> Iterator[Any]:
    yield tensor
    gradient = tensor.grad if tensor.is_leaf else None
    if gradient is not None:
        yield gradient


def _parts(tensor: Any, device: str) -> Iterator[tuple[int, Any, Tensor]]:
    """(identity, storage, tensor) of what it consists of on `device`."""
    if tensor.device.type != device:
        return
    for part in plain(tensor):
        storage = part.untyped_storage()
        if storage.nbytes() and part.device.type == device:
            yield storage._cdata, storage, part


class _Search:
    """One walk of the heap that names the holders of given storages."""

    def __init__(self, wanted: dict[int, _Storage], holders: Holders) -> None:
        self._wanted = wanted
        self._holders = holders
        self._files = Files()
        self._device = _device()
        self._unnamed = len(wanted)
        self._thorough = True  # every holder is looked for, not only the first
        self.with_graph: dict[int, tuple[Tensor, Name]] = {}  # by storage: wanted tensors that keep a graph

    def run(self) -> bool:
        """False: the time ran out, and some holders may not be known."""
        if not self._wanted:
            return True
        walk = HeapWalker(self._found, self._files, gc_roots.of_module)
        clock = ThreadClock(WALK_NS)
        names = list(sys.modules)
        users = [name for name in names if self._files.users_module(name)]
        running = [each for each in gc_roots.of_the_user(self._files, users) if each.module != "__main__"]
        shown, kept = self._holders.roots()
        mine: list[Root | str] = [*shown, *running, *kept]
        for limit in (6, 24):  # to the end: a second holder matters as much as the first
            walk.begin(mine, limit=limit)
            if not walk.run(clock, lambda: False):
                return self._done()
        self._thorough = False
        if not self._done():
            walk.begin([*mine, *gc_roots.beside(self._files, ())], limit=DEPTH_MAX)
            if not walk.run(clock, self._done):
                return self._done()
        if not self._done():
            walk.begin([name for name in names if name not in users], limit=DEPTH_MAX, installed=True, again=False)
            return walk.run(clock, self._done) or self._done()
        return True

    def _done(self) -> bool:
        return not self._unnamed

    def _found(self, tensor: Any, walk: HeapWalker) -> bool:
        if type(tensor).__name__ in _UNREAL:
            return False
        found = False
        for suffix, each in zip(("", ".grad"), _with_gradient(tensor), strict=False):
            for identity, _, _ in _parts(each, self._device):
                wanted = self._wanted.get(identity)
                if wanted is None:
                    continue
                found = True
                if wanted.names and (not self._thorough or len(wanted.names) == NAMES_MAX):
                    continue
                name = walk.name()
                if suffix:
                    name = name._replace(text=name.text + suffix)
                self._unnamed -= not wanted.names
                wanted.names[name] = None
                if each.grad_fn is not None and len(self.with_graph) < GRAPHS_MAX:
                    self.with_graph.setdefault(identity, (each, name))
        return found


def _rows(storages: Iterable[_Storage], holders: Holders) -> list[Row]:
    """Storages held alike, by the same places of numbered modules, share a row."""
    grouped: dict[Any, list[tuple[_Storage, tuple[Held, ...]]]] = {}
    for each in storages:
        held = holders.of(each.names)
        folded = tuple(_NUMBER.sub(".*", one.text) for one in held)
        grouped.setdefault((folded, each.tensor.dtype), []).append((each, held))
    rows = []
    for (folded, dtype), members in grouped.items():
        held = members[0][1]
        names = folded if len(members) > 1 else tuple(one.text for one in held)
        nbytes = sum(each.nbytes for each, _ in members)
        shapes = {shape_of(each.tensor) for each, _ in members}
        shape = shapes.pop() if len(shapes) == 1 else None
        rows.append(Row(names, holders.hint(held), len(members), nbytes, shape, str(dtype).removeprefix("torch.")))
    return rows
