"""Reassembles messages sent in parts: a set is complete when all its parts are there, in any order."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Part(Protocol):
    @property
    def part(self) -> int: ...

    @property
    def parts(self) -> int: ...


P = TypeVar("P", bound=Part)


class Assembly(Generic[P]):
    """The parts of the newest set. A newer set replaces it; older ones are ignored."""

    __slots__ = ("_order", "_parts")

    def __init__(self) -> None:
        self._order: int | None = None
        self._parts: dict[int, P] = {}

    def add(self, order: int, part: P) -> tuple[P, ...] | None:
        """All parts of the set in order, once `part` completes it. `order`: larger for newer sets."""
        if self._order is not None and order < self._order:
            return None
        if order != self._order:
            self._order, self._parts = order, {}
        self._parts[part.part] = part
        if len(self._parts) < part.parts:
            return None
        return tuple(self._parts[at] for at in sorted(self._parts))
