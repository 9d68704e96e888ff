"""Proves that objects are kept alive only by a reference cycle, and wait for the collector.

Model. While a name leads to it, an object that holds a tensor is recorded by weak reference. If it is still alive
`STEPS_AFTER` steps later, we count references as the collector does, but only among the objects reachable from it, at
most `OBJECTS_MAX`. If all references to it come from these objects, and none of those that lead to it is referenced
from outside, only the cycle keeps it alive. References of unknown origin (from C, or from further away) count as from
outside: nothing is reported.
Cost: 0.5 µs per reference, at most one tensor per step; nothing if no name leads to a single tensor.
Known limitations. Objects without a name when a step closes (an exception's frames, locals of a function that has
returned) are not recorded; nor are lists, dicts and tuples, which have no weak references.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Iterable
from types import FrameType, ModuleType
from typing import Any, NamedTuple

from gpumon_agent.guard import pass_on
from gpumon_agent.leaks.object_children import Name

OBJECTS_MAX = 400
NOTED_MAX = 24
WAY_MAX = 6  # innermost objects on the path to a tensor that are recorded
STEPS_AFTER = 2
TRIES = 3


class InCycle(NamedTuple):
    """A tensor kept alive only by a reference cycle. `name`: the last name that led to it."""

    name: Name
    key: Any
    bytes: int
    address: int


class _Noted:
    __slots__ = ("found", "step", "storage", "tries", "way")

    def __init__(self, way: list[weakref.ref[Any]], storage: weakref.ref[Any], found: InCycle, step: int) -> None:
        self.way = way
        self.storage = storage
        self.found = found
        self.step = step
        self.tries = 0


class Cycles:
    """The cycles of one census. Called in the training thread; between calls it holds only weak references."""

    def __init__(self) -> None:
        self.found: list[InCycle] = []
        self._noted: deque[_Noted] = deque()

    def note(self, way: Iterable[Any], name: Name, key: Any, storage: Any, step: int) -> None:
        """Records that `name` leads to a tensor through the objects of `way`, innermost first."""
        if len(self._noted) >= NOTED_MAX:
            return
        references = []
        for each in way:
            try:
                references.append(weakref.ref(each))
            except TypeError as error:
                pass_on(error)
                continue
            if len(references) == WAY_MAX:
                break
        if references:
            tensor_in_cycle = InCycle(name, key, storage.nbytes(), storage.data_ptr())
            self._noted.append(_Noted(references, weakref.ref(storage), tensor_in_cycle, step))

    def due(self, step: int) -> bool:
        return bool(self._noted) and step >= self._noted[0].step + STEPS_AFTER

    def look(self, step: int) -> bool:
        """Checks the tensor that is due. Whether it is in a cycle."""
        noted = self._noted.popleft()
        if noted.storage() is None:
            return False
        for reference in noted.way:
            if only_each_other(reference):
                self.found.append(noted.found)
                return True
        noted.tries += 1
        noted.step = step
        if noted.tries < TRIES:
            self._noted.append(noted)
        return False


def only_each_other(reference: weakref.ref[Any]) -> bool:
    """Whether the object is kept alive only by objects reachable from it."""
    objects = [reference()]
    if objects[0] is None:
        return False
    inside = [0]
    leads: list[list[int]] = [[]]
    places = {id(objects[0]): 0}
    running: set[int] | None = None
    at = 0
    while at < len(objects):
        for child in gc.get_referents(objects[at]):
            place = places.get(id(child))
            if place is None:
                if not gc.is_tracked(child) or issubclass(type(child), (type, ModuleType)) or _is_namespace(child):
                    continue
                if type(child) is FrameType:
                    running = _running() if running is None else running
                    if id(child) in running:
                        continue
                if len(objects) == OBJECTS_MAX:
                    return False
                place = places[id(child)] = len(objects)
                objects.append(child)
                inside.append(0)
                leads.append([])
            inside[place] += 1
            leads[at].append(place)
        child = None
        at += 1
    counted = _references(objects)
    waiting = [at for at, count in enumerate(counted) if count - _LISTED > inside[at]]
    held = set(waiting)
    while waiting:
        for place in leads[waiting.pop()]:
            if place not in held:
                held.add(place)
                waiting.append(place)
    return 0 not in held


def _is_namespace(child: Any) -> bool:
    """A module's globals or the builtins, which lead to everything."""
    return type(child) is dict and ("__builtins__" in child or "__import__" in child)


def _running() -> set[int]:
    """ids of the running frames of all threads: their references count as from outside."""
    found: set[int] = set()
    for frame in sys._current_frames().values():
        above: FrameType | None = frame
        while above is not None:
            found.add(id(above))
            above = above.f_back
    frame = above = None  # type: ignore[assignment]  # this very frame is among them: a cycle
    return found


def _references(objects: list[Any]) -> list[int]:
    return [sys.getrefcount(each) for each in objects]


_LISTED = _references([object()])[0]  # references from the list and the call itself
