"""The recent past of a run, encoded, so that a viewer who comes late is answered at once."""

from __future__ import annotations

from collections import deque

from gpumon_agent import wire

STEPS_MAX = 2_000
BYTES_MAX = 4 * 1024 * 1024
_PAGE_BYTES = 32 * 1024  # half a frame: whole pages are dropped, so the past is short by at most one of them


class History:
    """The newest `steps` steps, fewer where they fill `limit_bytes` of encoded events.

    Events are kept in pages that are finished packets: a snapshot costs a copy of bytes and nothing else. Memory is the
    encoded bytes plus a few hundred bytes a page. (As Structs the same steps take between four and
    five times as much.)
    """

    def __init__(self, steps: int = STEPS_MAX, limit_bytes: int = BYTES_MAX) -> None:
        self._steps_max = steps
        self._bytes_max = limit_bytes
        self._pages: deque[tuple[list[bytes], int, int]] = deque()  # packets, their bytes, the steps they close
        self._pages_bytes = 0
        self._pages_steps = 0
        self._open: list[tuple[int, bytes]] = []
        self._open_bytes = 0
        self.newest = -1

    def extend(self, events: list[tuple[int, bytes]]) -> None:
        """Encoded events with their numbers, in order."""
        for seq, encoded in events:
            self._open.append((seq, encoded))
            self._open_bytes += len(encoded)
            if self._open_bytes >= _PAGE_BYTES:
                self._seal()
            self.newest = seq

    def packets(self) -> list[bytes]:
        """Oldest first, as it stands now."""
        sealed = [packet for packets, _, _ in self._pages for packet in packets]
        return sealed + list(wire.pack(self._open, replayed=True))

    def newest_events(self, limit_bytes: int) -> list[tuple[int, bytes]]:
        """Encoded events with their numbers, oldest first: as many of the newest whole pages as fit."""
        pages: list[list[bytes]] = []
        left = limit_bytes - self._open_bytes
        for packets, size, _ in reversed(self._pages):
            left -= size
            if left < 0:
                break
            pages.append(packets)
        past = [event for packets in reversed(pages) for packet in packets for event in wire.unpack(packet)]
        return [*past, *self._open]

    @property
    def nbytes(self) -> int:
        return self._pages_bytes + self._open_bytes

    @property
    def steps(self) -> int:
        return self._pages_steps + _steps(self._open)

    def _seal(self) -> None:
        packets = list(wire.pack(self._open, replayed=True))
        size = sum(map(len, packets))
        steps = _steps(self._open)
        self._pages.append((packets, size, steps))
        self._pages_bytes += size
        self._pages_steps += steps
        self._open, self._open_bytes = [], 0
        while self._pages and (
            self._pages_bytes > self._bytes_max - 2 * _PAGE_BYTES
            or self._pages_steps - self._pages[0][2] >= self._steps_max
        ):
            _, size, steps = self._pages.popleft()
            self._pages_bytes -= size
            self._pages_steps -= steps


def _steps(events: list[tuple[int, bytes]]) -> int:
    return sum(wire.kind(encoded) == "step" for _, encoded in events)
