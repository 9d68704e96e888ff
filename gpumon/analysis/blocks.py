"""The allocator's segments as figures and as a map: bytes in use, gaps, and the largest gap.

Model. A block is allocated, waits for a stream (freed, but a stream may still use it), or is inactive. An inactive
block beside others in its segment is *inactive split*: it can be reused for what fits, but not released. A segment
without other blocks is *unused*: empty_cache() releases it. So

    reserved = allocated + waiting + inactive split + unused

An allocated block has an owner, the line of the ledger that its storage counts for, if the agent read owners and found
one. What leaks is told from other variables by the name of its holder. Blocks are rounded up (to 512 bytes, large ones
by up to 1 MiB), so an owner has more bytes here than in the ledger.

Requests up to 1 MiB come from the small pool's segments, larger ones from the large pool's; a segment belongs to one
stream, and to a private pool (a CUDA graph's, a MemPool's) or to none. A gap is usable only within its own pool, so
each pool has its own largest free block. Fragmentation is the share of reserved that is inactive split.

Source. torch.cuda.memory_snapshot(), and torch's words for its states (inactive_split in memory_stats()).
Cost. Two passes over the blocks: 0.1 s for 100,000.
Known limitations. With expandable segments unmapped pages inside a segment are no block and are not shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from gpumon.analysis.estimate.simulator import LARGE_SEGMENT, SMALL
from gpumon.analysis.units import size as size_of
from gpumon_agent import wire

ALLOCATED, WAITING, SPLIT, UNUSED = "allocated", "waiting", "inactive split", "unused"
LEAK, UNOWNED = "leak", "unowned"
KINDS = (*(line for line in wire.BLOCK_OWNERS if line), LEAK, UNOWNED, ALLOCATED, WAITING, SPLIT, UNUSED)
"""What a byte of the allocator is: an owner's; without owner; allocated, if the agent read no owners; or free."""
OWNERLESS = (ALLOCATED, WAITING, SPLIT, UNUSED)

Block = tuple[int, str, str]
"""Bytes, kind, and the name of the variable that holds it."""

PoolKind = tuple[bool, bool, int]
"""private, small, stream"""


class Totals(msgspec.Struct, frozen=True):
    """Bytes; of one segment, one pool, or all."""

    reserved: int = 0
    allocated: int = 0
    waiting: int = 0
    inactive_split: int = 0
    unused: int = 0
    largest_free: int = 0
    segments: int = 0
    blocks: int = 0
    kinds: Mapping[str, int] = msgspec.field(default_factory=dict)
    """bytes of each kind; `allocated` above is the sum of the owners"""

    @property
    def fragmentation(self) -> float:
        return self.inactive_split / self.reserved if self.reserved else 0.0


class Whole(msgspec.Struct, frozen=True):
    """One segment with all its blocks, by address."""

    address: int
    bytes: int
    expandable: bool
    blocks: tuple[Block, ...]
    totals: Totals

    @property
    def held(self) -> Counter[tuple[str, str]]:
        """Bytes by kind and name of the variable, for blocks held by one."""
        found: Counter[tuple[str, str]] = Counter()
        for size, kind, name in self.blocks:
            if name:
                found[kind, name] += size
        return found


class Pool(msgspec.Struct, frozen=True):
    """Segments that serve the same requests."""

    private: bool
    small: bool
    stream: int
    totals: Totals
    segments: tuple[Whole, ...]

    @property
    def name(self) -> str:
        size = "small" if self.small else "large"
        return f"{'private, ' if self.private else ''}{size} pool, stream {self.stream}"


class AllocatorMap(msgspec.Struct, frozen=True):
    totals: Totals
    pools: tuple[Pool, ...]

    @property
    def owned(self) -> bool:
        """The agent read the owners of blocks."""
        return not self.totals.allocated or ALLOCATED not in self.totals.kinds


def allocator(
    segments: Iterable[wire.Segment], holders: Iterable[wire.Holder] = (), leaking: Collection[str] = ()
) -> AllocatorMap:
    """Joins segments that were cut for transport. Blocks beyond their segment's end are left out.

    `holders`: the variables that blocks are held by; `leaking`: the containers that grow.
    """
    owners = {number: (line or UNOWNED, "") for number, line in enumerate(wire.BLOCK_OWNERS)}
    for number, holder in enumerate(holders, wire.HOLDER_OWNERS):
        owners[number] = (LEAK if holder.container in leaking else "variables", holder.container)
    pools: dict[PoolKind, list[Whole]] = {}
    head: wire.Segment | None = None
    blocks: list[tuple[int, str, str]] = []
    for part in segments:
        if head is None or part.address != head.address or not part.offset:
            if head is not None:
                _add(pools, head, blocks)
            head, blocks = part, []
        blocks += _read(part, owners)
    if head is not None:
        _add(pools, head, blocks)
    made = [Pool(*kind, sum_of(each.totals for each in found), tuple(found)) for kind, found in pools.items()]
    made.sort(key=lambda pool: -pool.totals.reserved)
    return AllocatorMap(sum_of(pool.totals for pool in made), tuple(made))


def _read(part: wire.Segment, owners: Mapping[int, tuple[str, str]]) -> Iterable[Block]:
    known = len(part.owners) == len(part.blocks)
    for at, (size, state) in enumerate(part.blocks):
        if state == wire.ALLOCATED:
            # a number that a newer agent has is an owner without a name here
            kind, name = owners.get(part.owners[at], (UNOWNED, "")) if known else (ALLOCATED, "")
            yield size, kind, name
        else:
            yield size, SPLIT if state == wire.INACTIVE else WAITING, ""


def _add(pools: dict[PoolKind, list[Whole]], head: wire.Segment, blocks: list[Block]) -> None:
    inside: list[Block] = []
    left = head.bytes
    for size, kind, name in blocks:
        if left <= 0:
            break
        inside.append((min(size, left), kind, name))
        left -= size
    if inside and all(kind == SPLIT for _, kind, _ in inside):
        inside = [(size, UNUSED, "") for size, *_ in inside]
    pools.setdefault((head.private, head.small, head.stream), []).append(
        Whole(head.address, head.bytes, head.expandable, tuple(inside), _totals(head.bytes, inside))
    )


def _totals(reserved: int, blocks: list[Block]) -> Totals:
    kinds: dict[str, int] = {}
    largest = 0
    for size, kind, _ in blocks:
        kinds[kind] = kinds.get(kind, 0) + size
        if kind in (SPLIT, UNUSED):
            largest = max(largest, size)
    waiting, split, unused = (kinds.get(kind, 0) for kind in (WAITING, SPLIT, UNUSED))
    allocated = sum(kinds.values()) - waiting - split - unused
    return Totals(reserved, allocated, waiting, split, unused, largest, 1, len(blocks), kinds)


def sum_of(parts: Iterable[Totals]) -> Totals:
    """The sum of several; the largest free block is the maximum."""
    reserved = allocated = waiting = split = unused = largest = segments = blocks = 0
    kinds: Counter[str] = Counter()
    for part in parts:
        kinds.update(part.kinds)
        reserved += part.reserved
        allocated += part.allocated
        waiting += part.waiting
        split += part.inactive_split
        unused += part.unused
        largest = max(largest, part.largest_free)
        segments += part.segments
        blocks += part.blocks
    return Totals(reserved, allocated, waiting, split, unused, largest, segments, blocks, dict(kinds))


def largest_for(found: AllocatorMap, request: int) -> int:
    """The largest free block usable for such a request, on any stream."""
    small = request <= SMALL
    fitting = (pool.totals.largest_free for pool in found.pools if pool.small == small and not pool.private)
    return max(fitting, default=0)


# --------------------------------------------------------------------------------------------------------- the verdict

Harm = Literal["none", "gaps", "full", "unknown"]
"""gaps: what is free would be enough, but lies in pieces; full: it would not be enough in one piece either."""


class Verdict(msgspec.Struct, frozen=True):
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

Cell = Mapping[str, int]
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
    made: list[dict[str, int]] = [{} for _ in range(count)]
    at = 0
    for segment in pool.segments:
        end = at + segment.bytes
        for size, kind, _ in segment.blocks:
            first, rest = divmod(at, each)
            if rest + size <= each:
                _put(made[first], kind, size)
            else:
                _put(made[first], kind, each - rest)
                last, over = divmod(at + size, each)
                for cell in range(first + 1, last):
                    made[cell][kind] = each
                if over:
                    _put(made[last], kind, over)
            at += size
        at = end
    return list(made)


def _put(cell: dict[str, int], kind: str, size: int) -> None:
    cell[kind] = cell.get(kind, 0) + size


def segment_at(pool: Pool, cell: int, each: int) -> int | None:
    """The segment that has most bytes in this cell."""
    begin, end = cell * each, (cell + 1) * each
    at, found, most = 0, None, 0
    for number, segment in enumerate(pool.segments):
        inside = min(end, at + segment.bytes) - max(begin, at)
        if inside > most:
            found, most = number, inside
        at += segment.bytes
        if at >= end:
            break
    return found


def where(pool: Pool, segment: int, each: int) -> tuple[int, int]:
    """The first cell of the pool's nth segment, and the one after its last."""
    begin = sum(each_segment.bytes for each_segment in pool.segments[:segment])
    end = begin + pool.segments[segment].bytes
    return begin // each, max(begin // each + 1, -(-end // each))
