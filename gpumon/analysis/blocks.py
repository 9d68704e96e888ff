"""The allocator's segments as figures and as a map: bytes in use, gaps, and the largest gap.

Model. A block is allocated, waits for a stream (freed, but a stream may still use it), or is inactive. An inactive
block beside others in its segment is *inactive split*: it can be reused for what fits, but not released. A segment
without other blocks is *unused*: empty_cache() releases it. So

    reserved = allocated + waiting + inactive split + unused

Requests up to 1 MiB come from the small pool's segments, larger ones from the large pool's; a segment belongs to one
stream, and to a private pool (a CUDA graph's, a MemPool's) or to none. A gap is usable only within its own pool, so
each pool has its own largest free block. Fragmentation is the share of reserved that is inactive split.

Source. torch.cuda.memory_snapshot(), and torch's words for its states (inactive_split in memory_stats()).
Cost. Two passes over the blocks: 0.04 s for 100,000.
Known limitations. With expandable segments unmapped pages inside a segment are no block and are not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gpumon.analysis.estimate.simulator import LARGE_SEGMENT, SMALL
from gpumon.analysis.units import size as size_of
from gpumon_agent import wire

Kind = tuple[bool, bool, int]
"""private, small, stream"""


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes; of one segment, one pool, or all."""

    reserved: int = 0
    allocated: int = 0
    waiting: int = 0
    inactive_split: int = 0
    unused: int = 0
    largest_free: int = 0
    segments: int = 0
    blocks: int = 0

    @property
    def fragmentation(self) -> float:
        return self.inactive_split / self.reserved if self.reserved else 0.0


@dataclass(frozen=True, slots=True)
class Whole:
    """One segment with all its blocks as (bytes, state), by address."""

    address: int
    bytes: int
    expandable: bool
    blocks: tuple[tuple[int, int], ...]
    totals: Totals


@dataclass(frozen=True, slots=True)
class Pool:
    """Segments that serve the same requests."""

    private: bool
    small: bool
    stream: int
    totals: Totals
    segments: tuple[Whole, ...] = field(repr=False)

    @property
    def name(self) -> str:
        size = "small" if self.small else "large"
        return f"{'private, ' if self.private else ''}{size} pool, stream {self.stream}"


@dataclass(frozen=True, slots=True)
class AllocatorMap:
    totals: Totals
    pools: tuple[Pool, ...]


def allocator(segments: Iterable[wire.Segment]) -> AllocatorMap:
    """Joins segments that were cut for transport. Blocks beyond their segment's end are left out."""
    pools: dict[Kind, list[Whole]] = {}
    head: wire.Segment | None = None
    blocks: list[tuple[int, int]] = []
    for part in segments:
        if head is not None and part.address == head.address and part.offset:
            blocks += part.blocks
            continue
        if head is not None:
            _add(pools, head, blocks)
        head, blocks = part, list(part.blocks)
    if head is not None:
        _add(pools, head, blocks)
    made = [Pool(*kind, sum_of(each.totals for each in found), tuple(found)) for kind, found in pools.items()]
    made.sort(key=lambda pool: -pool.totals.reserved)
    return AllocatorMap(sum_of(pool.totals for pool in made), tuple(made))


def _add(pools: dict[Kind, list[Whole]], head: wire.Segment, blocks: list[tuple[int, int]]) -> None:
    inside: list[tuple[int, int]] = []
    left = head.bytes
    for size, state in blocks:
        if left <= 0:
            break
        inside.append((min(size, left), state))
        left -= size
    pools.setdefault((head.private, head.small, head.stream), []).append(
        Whole(head.address, head.bytes, head.expandable, tuple(inside), _totals(head.bytes, inside))
    )


def _totals(reserved: int, blocks: Sequence[tuple[int, int]]) -> Totals:
    allocated = waiting = free = largest = 0
    for size, state in blocks:
        if state == wire.ALLOCATED:
            allocated += size
        elif state == wire.INACTIVE:
            free += size
            largest = max(largest, size)
        else:
            waiting += size
    unused = free if not allocated and not waiting else 0
    return Totals(reserved, allocated, waiting, free - unused, unused, largest, 1, len(blocks))


def sum_of(parts: Iterable[Totals]) -> Totals:
    """The sum of several; the largest free block is the maximum."""
    reserved = allocated = waiting = split = unused = largest = segments = blocks = 0
    for part in parts:
        reserved += part.reserved
        allocated += part.allocated
        waiting += part.waiting
        split += part.inactive_split
        unused += part.unused
        largest = max(largest, part.largest_free)
        segments += part.segments
        blocks += part.blocks
    return Totals(reserved, allocated, waiting, split, unused, largest, segments, blocks)


def largest_for(found: AllocatorMap, request: int) -> int:
    """The largest free block usable for such a request, on any stream."""
    small = request <= SMALL
    fitting = (pool.totals.largest_free for pool in found.pools if pool.small == small and not pool.private)
    return max(fitting, default=0)


# --------------------------------------------------------------------------------------------------------- the verdict

Harm = Literal["none", "gaps", "full", "unknown"]
"""gaps: what is free would be enough, but lies in pieces; full: it would not be enough in one piece either."""


@dataclass(frozen=True, slots=True)
class Verdict:
    harm: Harm
    text: str


def largest_request(found: AllocatorMap) -> int | None:
    """The largest request so far, to 2 MiB. None: no segment tells.

    Above 20 MiB the allocator takes each segment for one request, rounded to 2 MiB, and keeps it. An expandable segment
    grows with many. Requests since an empty_cache() only.
    """
    own = (
        segment.bytes
        for pool in found.pools
        if not pool.small and not pool.private
        for segment in pool.segments
        if not segment.expandable and segment.bytes > LARGE_SEGMENT
    )
    return max(own, default=None)


def verdict(found: AllocatorMap, free: int | None, *, at_most: bool = False, failed: int | None = None) -> Verdict:
    """Whether fragmentation is harmful: would a request as large as the largest so far fit?

    `free`: of the device; `at_most`: that is a bound. `failed`: the request that failed as this was read.
    """
    t = found.totals
    cached = t.inactive_split + t.unused
    request = failed if failed is not None else largest_request(found)
    if failed is None and not t.inactive_split:
        return Verdict("none", f"no harm: {size_of(cached)} cached, and nothing of it between blocks in use")
    if request is None:
        return Verdict("unknown", f"{size_of(cached)} cached; no segment tells how large a request was: no verdict")
    block = largest_for(found, request)
    start = f"{size_of(request)} were requested" if failed is not None else f"largest request so far {size_of(request)}"
    said = f"{size_of(cached)} cached, {start}, largest free block {size_of(block)}"
    if failed is None and request <= block:
        return Verdict("none", f"no harm: {said}")
    if free is None:
        return Verdict("unknown", f"{said}; what the device has free is not known: no verdict")
    room = free + t.unused  # the allocator gives unused segments back before it fails
    there = f"the device has {'at most ' if at_most else ''}{size_of(room)} for a new segment"
    if request <= room:
        if failed is not None:  # set_per_process_memory_fraction, for example
            return Verdict("unknown", f"{said}; {there}: neither gaps nor a full device explain it")
        return Verdict("none", f"no harm: {said}; {there}")
    if request <= room + t.inactive_split:
        return Verdict(
            "gaps", f"harm: {said}; {there}, and {size_of(t.inactive_split)} lie in gaps between blocks in use"
        )
    return Verdict("full", f"full, not fragmented: {said}; {there}, and all gaps together would not make up for it")


def outdated(found: AllocatorMap, reserved: int | None) -> bool:
    """The allocator took or returned segments since this was read."""
    return reserved is not None and reserved != found.totals.reserved


# ------------------------------------------------------------------------------------------------------------- the map

ALLOCATED, WAITING, SPLIT, UNUSED = range(4)

Cell = tuple[int, int, int, int]
"""Bytes of each kind in one cell of a map."""


def cell_bytes(found: AllocatorMap, width: int, height: int) -> int:
    """Bytes per cell such that every pool's rows fit into the height: 1, 1.25, 1.5, 1.75, 2 KiB…"""
    power = 512
    while sum(_rows(pool, 2 * power, width) for pool in found.pools) > height and power < 1 << 60:
        power *= 2
    steps = (power * quarters // 4 for quarters in range(4, 8))
    fitting = (each for each in steps if sum(_rows(pool, each, width) for pool in found.pools) <= height)
    return next(fitting, 2 * power)


def _rows(pool: Pool, each: int, width: int) -> int:
    return -(-pool.totals.reserved // (each * max(1, width))) or 1


def cells(pool: Pool, each: int) -> list[Cell]:
    """The pool's bytes by address, in cells of `each` bytes; segments follow each other without gaps."""
    count = -(-pool.totals.reserved // each)
    made = [[0, 0, 0, 0] for _ in range(count)]
    at = 0
    for segment in pool.segments:
        end = at + segment.bytes
        unused = segment.totals.unused > 0
        for size, state in segment.blocks:
            kind = _KIND.get(state, WAITING)
            if kind == SPLIT and unused:
                kind = UNUSED
            first, rest = divmod(at, each)
            if rest + size <= each:
                made[first][kind] += size
            else:
                made[first][kind] += each - rest
                last, over = divmod(at + size, each)
                for cell in range(first + 1, last):
                    made[cell][kind] += each
                if over:
                    made[last][kind] += over
            at += size
        at = end
    return [(a, w, s, u) for a, w, s, u in made]


_KIND = {wire.ALLOCATED: ALLOCATED, wire.INACTIVE: SPLIT, wire.PENDING: WAITING}


def where(pool: Pool, segment: int, each: int) -> tuple[int, int]:
    """The first cell of the pool's nth segment, and the one after its last."""
    begin = sum(each_segment.bytes for each_segment in pool.segments[:segment])
    end = begin + pool.segments[segment].bytes
    return begin // each, max(begin // each + 1, -(-end // each))
