"""The variables that explain the growth on one device: a leak keeps its first name from census to census.

Model. A tensor reached by several names counts for the first one found, and a census started by growth ends once it has
seen enough. So the next census may name the same tensors differently, or see only another part. A name that explained
the growth is kept until a census refutes it: one that lists the name with too little, or a complete one that lists
neither the name nor similar tensors. A census that ended early and explains nothing refutes nothing, and what it
counted of a holder is at least there. Only a complete census follows a linked list to its end. Similar tensors under a
new name, while the old one is not listed, are the same leak and keep the old name.
Cost. That of `explaining`, for the newest census.
Known limitations. Two leaks of similar tensors are reported as the first if no census lists both.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import msgspec
from msgspec.structs import replace

from gpumon.analysis.suspects import Suspect, explaining, root, suspects
from gpumon.analysis.types import GrownByHolder, Growth
from gpumon_agent import wire
from gpumon_agent.units import BLOCK_BYTES

TAKEN = ("allocated", "unexplained", "blocks")
"""Figures whose growth is a leak on the device."""


class Leak(msgspec.Struct, frozen=True):
    main: Growth  # the first of `TAKEN` that grows, with the earliest `since` of them all
    since: int
    per_step: float  # bytes
    found: tuple[tuple[Suspect, wire.Census], ...]  # most bytes first, each with the census that counted it

    @property
    def held(self) -> GrownByHolder | None:
        """Its holders and their bytes; None if none was found."""
        parts = tuple(
            (by, each.held, census.began_step, census.step)
            for each, census in self.found
            if (by := each.by) is not None
        )
        return GrownByHolder(self.since, parts, self.per_step) if parts else None


_Key = tuple[bool, object]
"""Whether it has a graph, and the variable that leads to it (or the tensors' kinds, if none was found)."""


class LeakNames:
    """The leak of one device. `leak` calls `take` while something grows, `forget` when nothing does."""

    def __init__(self) -> None:
        self._known: dict[_Key, tuple[Suspect, wire.Census]] = {}
        self._newest: wire.Census | None = None
        self._seen: tuple[wire.Census, ...] = ()  # with `_asked`: key of the cached answer
        self._query: tuple[object, ...] = ()
        self._suspects: list[tuple[Suspect, wire.Census]] = []

    def forget(self) -> None:
        self._known.clear()
        self._newest, self._seen, self._query = None, (), ()

    def leak(self, censuses: Sequence[wire.Census], device: int, growth: Sequence[Growth]) -> Leak | None:
        """The leak behind `growth`, the device's figures; None if nothing grows."""
        grown = {each.figure: each for each in growth if each.growing and each.figure in TAKEN}
        main = next((grown[figure] for figure in TAKEN if figure in grown), None)
        if main is None or main.per_step is None:
            self.forget()
            return None
        since = min(each.since for each in grown.values() if each.since is not None)
        blocks = grown.get("blocks")
        per_step = BLOCK_BYTES * (blocks.per_step or 0.0) if blocks is not None else 0.0  # at least
        per_step = next((g.per_step for f in TAKEN[:2] if (g := grown.get(f)) and g.per_step is not None), per_step)
        found = self.take(
            censuses,
            device,
            since=since,
            blocks_per_step=blocks.per_step if blocks else None,
            bytes_per_step=per_step,
        )
        return Leak(replace(main, since=since), since, per_step, tuple(found))

    def take(
        self,
        censuses: Sequence[wire.Census],
        device: int,
        *,
        since: int,
        blocks_per_step: float | None,
        bytes_per_step: float | None,
    ) -> list[tuple[Suspect, wire.Census]]:
        """The suspects, most bytes first, each with the census that counted it."""
        query = device, since, blocks_per_step, bytes_per_step
        seen = tuple(censuses)
        if query == self._query and len(seen) == len(self._seen) and all(map(is_, seen, self._seen)):
            return self._suspects
        newest = self._newest
        for census in censuses:
            fresh = newest is None or census.step > newest.step or (census.step == newest.step and census is not newest)
            if census.step > since and (fresh or census is newest):
                found = explaining(
                    census, device, since=since, blocks_per_step=blocks_per_step, bytes_per_step=bytes_per_step
                )
                self._one(census, device, found, fresh)
        self._seen, self._query, self._suspects = (
            seen,
            query,
            sorted(self._known.values(), key=lambda each: -each[0].held),
        )
        return self._suspects

    def _one(self, census: wire.Census, device: int, found: list[Suspect], fresh: bool) -> None:
        known = self._known
        present = suspects(census, device)
        listed = {_key(each) for each in present}
        updated: set[_Key] = set()
        for each in found:
            key = _key(each)
            if key not in known:
                same = next((k for k, (old, _) in known.items() if k not in listed and _alike(old, each)), None)
                if same is not None and known[same][0].holder is not None:
                    key, old = same, known[same][0]
                    each = replace(each, holder=old.holder, names=old.names)
                elif same is not None:
                    del known[same]  # it has a name now
            if key in known and each.where is None:  # made before stacks were recorded: no line
                each = _made_as(each, known[key][0])
            if key in known and census.cut and each.held < known[key][0].held:  # it saw only a part
                known[key] = _made_as(known[key][0], each), known[key][1]
            else:
                known[key] = each, census
            updated.add(key)
        if fresh:
            self._newest = census
            if census.cut and not found:  # it ended before it came to what grows
                return
            for key in [key for key in known if key not in updated]:
                gone = not census.cut and not any(_alike(known[key][0], each) for each in present)
                if (key in listed and not (census.cut and _is_linked(known[key][0]))) or gone:
                    del known[key]


def _key(suspect: Suspect) -> _Key:
    return suspect.has_graph, root(suspect.holder) if suspect.holder is not None else tuple(suspect.kinds)


def _made_as(suspect: Suspect, other: Suspect) -> Suspect:
    return replace(suspect, where=other.where, source_line=other.source_line, phase=other.phase)


def _is_linked(suspect: Suspect) -> bool:
    return any("…" in name for name in suspect.names)


def _alike(one: Suspect, other: Suspect) -> bool:
    """Whether both may be the same tensors: of one kind, both with or without a graph, made on one line."""
    if one.has_graph != other.has_graph or (one.where and other.where and one.where != other.where):
        return False
    if one.kinds.keys() & other.kinds.keys():
        return True
    return one.count == other.count == 1 and _attribute(one) == _attribute(other)  # it gets longer


def _attribute(suspect: Suspect) -> str:
    return suspect.by.attribute if suspect.by is not None else ""
