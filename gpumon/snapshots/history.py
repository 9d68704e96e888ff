"""What was in use after each event of a snapshot: sums, and the blocks after any one event.

Model. As gpumon.snapshots.summary: requested bytes count until `free_completed`. Event −1: the state
before the first.

Cost. One pass over the events; 16 bytes an event, and the numbers of the blocks in use after one of every 64th part of
the events. `uses` starts from the nearest of these before, so that a cursor can be moved through a million events.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from gpumon.snapshots.model import Device
from gpumon.snapshots.trace import ALLOC, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, Trace

PARTS = 64
BEFORE_FIRST = -1
_RESERVES = {SEGMENT_ALLOC: 1, SEGMENT_MAP: 1, SEGMENT_FREE: -1, SEGMENT_UNMAP: -1}


class History:
    """Of a device with events."""

    def __init__(self, device: Device, trace: Trace) -> None:
        self._trace = trace
        self._each = max(1, -(-len(trace.codes) // PARTS))
        self._alive: list[array[int]] = []  # block ids after the events −1, each − 1, 2 each − 1, …
        self._bytes = array("q", bytes(8 * len(device.lines)))
        self._born = array("q", [BEFORE_FIRST]) * len(device.lines)
        now = 0
        alive: dict[int, None] = {}
        for number, requested in trace.start:
            alive[number], self._bytes[number] = None, requested
            now += requested
        reserved = trace.recorded.reserved_start if trace.recorded is not None else None
        self._requested = array("q", [now])
        self._reserved = array("q", [reserved]) if reserved is not None else None
        self.peak = BEFORE_FIRST
        """The first event that reaches the highest requested bytes."""
        highest = now
        for at, (code, number, size) in enumerate(zip(trace.codes, trace.ids, trace.bytes, strict=True)):
            if at % self._each == 0:
                self._alive.append(array("q", alive))
            if code == ALLOC:
                now += size
                alive[number], self._bytes[number], self._born[number] = None, size, at
                if now > highest:
                    highest, self.peak = now, at
            elif code == FREE_COMPLETED:
                now -= size
                del alive[number]
            elif self._reserved is not None:
                reserved = self._reserved[-1] + _RESERVES.get(code, 0) * size
            self._requested.append(now)
            if self._reserved is not None and reserved is not None:
                self._reserved.append(reserved)

    @property
    def last(self) -> int:
        """The newest event."""
        return len(self._trace.codes) - 1

    def requested(self, event: int) -> int:
        """Bytes after this event."""
        return self._requested[event + 1]

    def reserved(self, event: int) -> int | None:
        """Bytes after this event; None: events and segments disagree."""
        return None if self._reserved is None else self._reserved[event + 1]

    def stretches(self, most: int) -> Iterator[tuple[int, int, int, int | None]]:
        """At most about 2 × `most` stretches of events: first, last, highest requested and highest reserved in it.

        The highest of each part ends a stretch, so that a plot of them can be followed to it. The first is event 0
        alone, with what was there before it.
        """
        values, reserved = self._requested, self._reserved
        count = self.last + 1
        yield 0, 0, max(values[:2]), None if reserved is None else max(reserved[:2])
        each = max(1, -(-(count - 1) // most))
        for begin in range(1, count, each):
            end = min(begin + each, count) - 1
            part = values[begin + 1 : end + 2]
            top = begin + part.index(max(part))
            for first, last in ((begin, top), (top + 1, end)):
                if first <= last:
                    highest = max(values[first + 1 : last + 2])
                    yield first, last, highest, None if reserved is None else max(reserved[first + 1 : last + 2])

    def uses(self, event: int) -> list[tuple[int, int, int | None]]:
        """The blocks in use after this event: id, requested bytes, and the event that allocated it (None: before)."""
        part = min(max(0, event + 1) // self._each, len(self._alive) - 1)
        alive = dict.fromkeys(self._alive[part])
        begin, end = part * self._each, event + 1
        for code, number in zip(self._trace.codes[begin:end], self._trace.ids[begin:end], strict=True):
            if code == ALLOC:
                alive[number] = None
            elif code == FREE_COMPLETED:
                del alive[number]
        sizes, born = self._bytes, self._born
        return [(number, sizes[number], born[number] if born[number] >= 0 else None) for number in alive]
