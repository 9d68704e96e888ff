"""PyTorch's CUDA caching allocator without a device. Long: all of its rules change the same blocks and pools.

Model. Sizes are rounded to 512 B. Requests up to 1 MiB use 2 MiB segments, below 10 MiB 20 MiB segments, larger ones a
segment of their own, rounded to 2 MiB. The smallest fitting free block of the stream is taken, of equals the one at the
lowest address. It is split if the rest is worth keeping (512 B in the small pool and in expandable segments, more than
1 MiB elsewhere); a rest that is not split off counts as allocated. A freed block merges with free neighbours. If the
device is full, cached segments without an allocated block are released and the request is tried once more. Segments get
ascending addresses that are not reused.

Source. c10/cuda/CUDACachingAllocator.cpp; compared with PyTorch's own allocator after every operation, to the byte
(tests/analysis/test_simulator.py).
Cost. O(log blocks) per request, some µs; memory for live blocks.

Known limitations. Blocks lent to other streams (record_stream) are free as soon as they are freed, so active equals
allocated. Private pools (CUDA graphs, MemPool), garbage_collection_threshold and the cudaMallocAsync backend are not
modelled. A real driver may place segments in another order, which only decides between equal blocks.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import msgspec

from gpumon_agent.units import BLOCK_BYTES

MIB = 1 << 20
SMALL = MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE = 10 * MIB  # from here on, one segment per request
LARGE_SEGMENT = 20 * MIB
ROUND_SEGMENT = 2 * MIB
_FIRST_ADDRESS = 1 << 44
_UNLIMITED = 1 << 62


class OutOfMemory(Exception):
    """The device is full, even after cached segments were released. All figures in bytes."""

    def __init__(self, requested: int, capacity: int, allocated: int, reserved: int) -> None:
        super().__init__(f"{requested} B do not fit: {allocated} of {reserved} B reserved are allocated, of {capacity}")
        self.requested = requested
        self.capacity = capacity
        self.allocated = allocated
        self.reserved = reserved


class AllocatorFigures(msgspec.Struct, frozen=True):
    """The allocator's figures in bytes, named as in `torch.cuda.memory_stats`."""

    allocated: int
    requested: int
    reserved: int
    active: int
    inactive_split: int


class SimulatedSegment(msgspec.Struct, frozen=True):
    """One range from the device, with its blocks in order: (address, bytes, bytes requested, allocated)."""

    address: int
    size: int
    stream: int
    large: bool
    expandable: bool
    blocks: tuple[tuple[int, int, int, bool], ...]


class _Pool:
    """Free blocks of one kind, ordered by stream, size and address."""

    __slots__ = ("free", "segment", "small", "unmapped")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.segment = SMALL_SEGMENT if small else LARGE_SEGMENT  # step by which an expandable segment grows
        self.free: list[tuple[int, int, int, SimulatedBlock]] = []
        self.unmapped: list[tuple[int, int, SimulatedBlock]] = []

    def add(self, block: SimulatedBlock) -> None:
        if block.mapped:
            insort(self.free, (block.stream, block.size, block.address, block))
        else:
            insort(self.unmapped, (block.stream, block.address, block))

    def remove(self, block: SimulatedBlock) -> None:
        if block.mapped:
            del self.free[bisect_left(self.free, (block.stream, block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.stream, block.address))]

    def first(self, stream: int, size: int) -> int:
        """Index of the stream's smallest block of at least `size`, or of a later stream's block."""
        return bisect_left(self.free, (stream, size, 0))


class SimulatedBlock(msgspec.Struct, eq=False):
    """A piece of a segment, in bytes; free it with the allocator that made it."""

    address: int
    size: int
    stream: int
    pool: _Pool
    requested: int = 0
    allocated: bool = False
    mapped: bool = True
    base: int | None = None  # start of its expandable segment; None in an ordinary one
    previous: SimulatedBlock | None = None
    next: SimulatedBlock | None = None

    @property
    def is_split(self) -> bool:
        return self.previous is not None or self.next is not None

    def insert_after(self, before: SimulatedBlock | None) -> None:
        """Inserts it into its segment's chain after `before`, or first."""
        self.previous = before
        if before is not None:
            self.next, before.next = before.next, self
        if self.next is not None:
            self.next.previous = self


class _Stat(msgspec.Struct):
    current: int = 0
    peak: int = 0

    def add(self, amount: int) -> None:
        self.current += amount
        if self.current > self.peak:
            self.peak = self.current


class SimulatedAllocator:
    """One device's allocator. `capacity`: bytes it may reserve, i.e. the device's without contexts and other processes;
    None: no limit. `total`: the device's bytes; an expandable segment reserves addresses for 9/8 of them. The other
    settings are those of PYTORCH_CUDA_ALLOC_CONF, in bytes."""

    def __init__(
        self,
        capacity: int | None = None,
        expandable_segments: bool = False,
        max_split_size: int | None = None,
        roundup_power2_divisions: int = 0,
        total: int | None = None,
    ) -> None:
        self.capacity = capacity
        self.expandable_segments = expandable_segments
        self.max_split_size = max_split_size
        self.roundup_power2_divisions = roundup_power2_divisions
        self.total = total
        self.retries = 0
        """How often cached segments were released because the device was full: `num_alloc_retries`."""
        self._limit = _UNLIMITED if self.capacity is None else self.capacity
        self._largest_split = _UNLIMITED if self.max_split_size is None else self.max_split_size
        self._small, self._large = _Pool(small=True), _Pool(small=False)
        self._live: set[SimulatedBlock] = set()
        self._next_address = _FIRST_ADDRESS
        self._allocated, self._requested, self._reserved, self._inactive_split = _Stat(), _Stat(), _Stat(), _Stat()
        self._stats = (self._allocated, self._requested, self._reserved, self._inactive_split)

    @property
    def allocated(self) -> int:
        return self._allocated.current

    @property
    def requested(self) -> int:
        return self._requested.current

    @property
    def reserved(self) -> int:
        return self._reserved.current

    @property
    def active(self) -> int:
        return self._allocated.current

    @property
    def inactive_split(self) -> int:
        return self._inactive_split.current

    @property
    def figures(self) -> AllocatorFigures:
        allocated, requested, reserved, inactive_split = (stat.current for stat in self._stats)
        return AllocatorFigures(allocated, requested, reserved, allocated, inactive_split)

    @property
    def peaks(self) -> AllocatorFigures:
        """The peak of each since the start or the last `reset_peaks`; not of one moment."""
        allocated, requested, reserved, inactive_split = (stat.peak for stat in self._stats)
        return AllocatorFigures(allocated, requested, reserved, allocated, inactive_split)

    def reset_peaks(self) -> None:
        for stat in self._stats:
            stat.peak = stat.current

    def malloc(self, size: int, stream: int = 0) -> SimulatedBlock:
        """A block for `size` > 0 bytes. Raises OutOfMemory."""
        rounded = self.round(size)
        pool = self._small if rounded <= SMALL else self._large
        block = self._cached(pool, stream, rounded) or self._fresh(pool, stream, rounded)
        return self._hand_out(block, rounded, size)

    def free(self, block: SimulatedBlock) -> None:
        """Frees a block. Raises ValueError if it was freed before."""
        if not block.allocated:
            raise ValueError(f"the block at {block.address:#x} is not allocated")
        size, requested, pool = block.size, block.requested, block.pool
        block.allocated = False
        block.requested = 0
        self._live.remove(block)
        subsumed = self._merge(block, block.previous) + self._merge(block, block.next)
        pool.add(block)
        if block.base is None:
            self._inactive_split.add((block.size if block.is_split else 0) - subsumed)
        self._allocated.add(-size)
        self._requested.add(-requested)

    def empty_cache(self) -> None:
        """Releases segments without an allocated block, of expandable ones whole pages."""
        for pool in (self._large, self._small):
            growing: list[SimulatedBlock] = []
            for *_, block in tuple(pool.free):
                if block.base is not None:
                    growing.append(block)
                elif not block.is_split:
                    self._release(block)
            for block in growing:
                self._unmap(block)
                if not block.mapped and not block.is_split:
                    pool.remove(block)

    def segments(self) -> tuple[SimulatedSegment, ...]:
        """The map, by address; an expandable segment has one entry for each mapped range."""
        cached = [entry[-1] for pool in (self._small, self._large) for entry in pool.free]
        heads = [b for b in (*cached, *self._live) if b.previous is None or not b.previous.mapped]
        return tuple(_segment(head) for head in sorted(heads, key=lambda block: block.address))

    def round(self, size: int) -> int:
        """Minimum size in bytes of a block for a request of `size`."""
        if size < BLOCK_BYTES:
            return BLOCK_BYTES
        divisions = self.roundup_power2_divisions
        if divisions > 1 and size > BLOCK_BYTES * divisions:
            floor = 1 << (size.bit_length() - 1)
            step = floor >> (divisions.bit_length() - 1)
            return _up(size, step) if step else 2 * floor
        return _up(size, BLOCK_BYTES)

    def _cached(self, pool: _Pool, stream: int, size: int) -> SimulatedBlock | None:
        """Takes the best free block out of its pool."""
        index = pool.first(stream, size)
        if index == len(pool.free) or pool.free[index][0] != stream:
            return None
        block = pool.free[index][-1]
        if block.base is not None:  # its size includes what it may grow by
            for *_, other in pool.free[index + 1 :]:
                if other.stream != stream or _growable(other) >= _growable(block):
                    break
                block = other
        if size < self._largest_split <= block.size:
            return None
        if size >= self._largest_split and block.size >= size + LARGE_SEGMENT:
            return None
        pool.remove(block)
        return block

    def _fresh(self, pool: _Pool, stream: int, size: int) -> SimulatedBlock:
        """A block from the device, which may need cached ones released first."""
        block = self._from_device(pool, stream, size)
        if block is None and self._release_oversize(pool, stream, size):
            block = self._from_device(pool, stream, size)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._from_device(pool, stream, size)
        if block is None:
            raise OutOfMemory(_segment_size(size), self._limit, self.allocated, self.reserved)
        return block

    def _from_device(self, pool: _Pool, stream: int, size: int) -> SimulatedBlock | None:
        if self.expandable_segments:
            return self._grow(pool, stream, size)
        wanted = _segment_size(size)
        if self.reserved + wanted > self._limit:
            return None
        self._reserved.add(wanted)
        return SimulatedBlock(self._place(wanted), wanted, stream, pool)

    def _hand_out(self, block: SimulatedBlock, size: int, requested: int) -> SimulatedBlock:
        rest = block.size - size
        was_split = block.is_split
        if block.pool.small or self.expandable_segments:
            split = rest >= BLOCK_BYTES
        else:
            split = size < self._largest_split and rest > SMALL
        if split:
            remaining = block
            block = SimulatedBlock(remaining.address, size, remaining.stream, remaining.pool, base=remaining.base)
            block.next = remaining
            block.insert_after(remaining.previous)
            remaining.address += size
            remaining.size = rest
            remaining.pool.add(remaining)
        if block.base is None:
            if was_split:
                self._inactive_split.add(-block.size)
            elif split:
                self._inactive_split.add(rest)
        block.allocated = True
        block.requested = requested
        self._live.add(block)
        self._allocated.add(block.size)
        self._requested.add(requested)
        return block

    def _merge(self, block: SimulatedBlock, other: SimulatedBlock | None) -> int:
        """Merges a free neighbour into the block. Returns its bytes."""
        if other is None or other.allocated or other.mapped != block.mapped:
            return 0
        other.pool.remove(other)
        if block.previous is other:
            block.address = other.address
            block.previous = other.previous
            if block.previous is not None:
                block.previous.next = block
        else:
            block.next = other.next
            if block.next is not None:
                block.next.previous = block
        block.size += other.size
        return other.size

    def _release(self, block: SimulatedBlock) -> None:
        block.pool.remove(block)
        self._reserved.add(-block.size)

    def _release_oversize(self, pool: _Pool, stream: int, size: int) -> bool:
        """With max_split_size, larger blocks are released one by one before the whole cache is."""
        if self.max_split_size is None:
            return False
        wanted = max(size, self.max_split_size)
        index = pool.first(stream, wanted)
        if index < len(pool.free) and pool.free[index][0] == stream:
            self._release(pool.free[index][-1])
            return True
        released = 0
        while released < wanted and index:
            index -= 1
            block = pool.free[index][-1]
            if block.size < self.max_split_size or block.stream != stream:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    def _place(self, size: int) -> int:
        address = self._next_address
        self._next_address += _up(size, ROUND_SEGMENT)
        return address

    # -- expandable segments: a long range of addresses, mapped page by page as it is needed

    def _grow(self, pool: _Pool, stream: int, size: int) -> SimulatedBlock | None:
        block = self._expandable(pool, stream, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.next
            if following is None:
                raise AssertionError("a range that was found long enough ends early")
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following
        pool.remove(block)
        return block

    def _expandable(self, pool: _Pool, stream: int, size: int) -> SimulatedBlock:
        """The lowest free or unmapped block followed by enough addresses; a new segment if there is none."""
        start = bisect_left(pool.unmapped, (stream, 0))
        for owner, _, unmapped in pool.unmapped[start:]:
            if owner != stream:
                break
            first = unmapped
            if first.previous is not None and not first.previous.allocated:
                first = first.previous
            freed, here = 0, first
            while freed < size and here is not None and not here.allocated:
                freed += here.size
                here = here.next  # type: ignore[assignment]
            if freed >= size:
                return first
        device = self._limit if self.total is None else self.total
        total = _up(min(device + device // 8, 1 << 60), pool.segment)
        address = self._place(total)
        block = SimulatedBlock(address, total, stream, pool, mapped=False, base=address)
        pool.add(block)
        return block

    def _map(self, block: SimulatedBlock, size: int) -> bool:
        wanted = _up(size, block.pool.segment)
        if self.reserved + wanted > self._limit:
            return False
        pool = block.pool
        pool.remove(block)
        block.mapped = True
        if wanted < block.size:
            rest = SimulatedBlock(
                block.address + wanted, block.size - wanted, block.stream, pool, mapped=False, base=block.base
            )
            rest.insert_after(block)
            pool.add(rest)
            block.size = wanted
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.add(block)
        self._reserved.add(wanted)
        return True

    def _unmap(self, block: SimulatedBlock) -> None:
        base, pool = block.base or 0, block.pool
        start = base + _up(block.address - base, pool.segment)
        end = block.address + block.size - (block.address + block.size - base) % pool.segment
        if start >= end:
            return
        pool.remove(block)
        if before := start - block.address:
            free = SimulatedBlock(block.address, before, block.stream, pool, base=base)
            free.next = block
            free.insert_after(block.previous)
            pool.add(free)
        if after := block.address + block.size - end:
            free = SimulatedBlock(end, after, block.stream, pool, base=base)
            free.insert_after(block)
            pool.add(free)
        block.address, block.size, block.mapped = start, end - start, False
        self._merge(block, block.previous)
        self._merge(block, block.next)
        pool.add(block)
        self._reserved.add(start - end)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _segment_size(size: int) -> int:
    if size <= SMALL:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < LARGE else _up(size, ROUND_SEGMENT)


def _growable(block: SimulatedBlock) -> int:
    return block.size + (block.next.size if block.next is not None and not block.next.mapped else 0)


def _segment(head: SimulatedBlock) -> SimulatedSegment:
    blocks: list[tuple[int, int, int, bool]] = []
    block: SimulatedBlock | None = head
    while block is not None and block.mapped:
        blocks.append((block.address, block.size, block.requested, block.allocated))
        block = block.next
    size = sum(size for _, size, *_ in blocks)
    return SimulatedSegment(head.address, size, head.stream, not head.pool.small, head.base is not None, tuple(blocks))
