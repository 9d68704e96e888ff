"""Values of which only the newest counts: alternating pages, and what training does now."""

from __future__ import annotations

import struct
import time
from typing import NamedTuple
from zlib import crc32

from gpumon_agent.quiet_mark import marked
from gpumon_agent.transport.memory import QUIET, STATUS_LATEST, STATUS_OFFSET, Memory, Pair
from gpumon_agent.transport.ring import one_thread_at_a_time

_HEADER = struct.Struct("=QII")  # number, length, CRC-32 begun with the number
_TRIES = 3

_STATUS = struct.Struct("=Qqq64sQQQQQQ")  # the number at both ends
_STATUS_BYTES = 256
PHASE_BYTES = 64


class Pages:
    """Two pages, written alternately: `memory.START` or `memory.ANSWER`. One process writes, the other reads.

    The writer fills a page, then sets the word `latest`. A slow or late reader gets the newest page. If its page is
    overwritten while it reads, the CRC is wrong, and a newer one follows soon.
    """

    def __init__(self, memory: Memory, which: Pair) -> None:
        self._view, self._words = memory.view, memory.words
        self._latest, self._offset, self._page_bytes = which
        self._number = memory.words[self._latest]
        self._seen = 0
        self._tries = 0

    @property
    def limit_bytes(self) -> int:
        """Longest payload."""
        return self._page_bytes - _HEADER.size

    def write(self, payload: bytes) -> None:
        """Replaces the last payload. One thread at a time. Raises ValueError beyond `limit_bytes`."""
        length = len(payload)
        if length > self.limit_bytes:
            raise ValueError(f"a payload of {length} bytes; {self.limit_bytes} are possible")
        number = self._number = (self._number + 1) & (1 << 62) - 1 or 1  # whatever the memory held at first
        begin = self._begin(number)
        _HEADER.pack_into(self._view, begin - _HEADER.size, number, length, crc32(payload, number))
        self._view[begin : begin + length] = payload
        self._words[self._latest] = number

    def read(self) -> bytes | None:
        """The newest payload. None: nothing new, or nothing complete.

        If there is nothing new, this is one comparison (`benchmarks/ring.py`).
        """
        latest: int = self._words[self._latest]
        return None if latest == self._seen else self._read(latest)

    def _read(self, latest: int) -> bytes | None:
        begin = self._begin(latest)
        number, length, check = _HEADER.unpack_from(self._view, begin - _HEADER.size)
        if number == latest != 0 and length <= self.limit_bytes:
            payload = bytes(self._view[begin : begin + length])
            if crc32(payload, number) == check:
                self._seen, self._tries = latest, 0
                return payload
        self._tries += 1
        if self._tries == _TRIES:  # do not retry an unchanged page for ever
            self._seen, self._tries = latest, 0
        return None

    def _begin(self, number: int) -> int:
        """Offset of the payload."""
        return self._offset + number % 2 * self._page_bytes + _HEADER.size


class Current(NamedTuple):
    step: int
    phase: str
    since_ns: int  # of the monotonic clock
    counters: tuple[int, int, int, int, int]


class Status:
    """What training is doing now, rewritten at each boundary. Any thread may write; a forked child must not."""

    def __init__(self, memory: Memory) -> None:
        self._view, self._words = memory.view, memory.words
        self._number = memory.words[STATUS_LATEST] & (1 << 62) - 1
        self._quiet = (0, 0)  # the newest mark of a step that is not read, and when it was first seen

    @one_thread_at_a_time
    def write(
        self, step: int, phase: str, since_ns: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0
    ) -> None:
        """The counters are u64. Of `phase` the first PHASE_BYTES bytes of UTF-8 are kept."""
        name = phase.encode("utf-8", "replace")
        number = self._number + 1  # no other code runs until `pack_into` ends, see ring.Writer
        at = STATUS_OFFSET + number % 2 * _STATUS_BYTES
        self._number = number
        _STATUS.pack_into(self._view, at, number, step, since_ns, name, a, b, c, d, e, number)
        self._words[STATUS_LATEST] = self._number

    def read(self) -> Current | None:
        """None: nothing was written, or each read was torn. In a step that is not read, its mark says where it is, and
        `since_ns` is when that was first seen here."""
        for _ in range(_TRIES):
            latest = self._words[STATUS_LATEST]
            at = STATUS_OFFSET + latest % 2 * _STATUS_BYTES
            read = bytes(self._view[at : at + _STATUS.size])
            number, step, since_ns, name, a, b, c, d, e, again = _STATUS.unpack(read)
            if latest and number == again == latest == self._words[STATUS_LATEST]:
                phase = name.rstrip(b"\0").decode("utf-8", "ignore")
                word = self._words[QUIET]
                quiet = marked(word)
                if quiet is not None:
                    step, phase = quiet
                    if word != self._quiet[0]:
                        self._quiet = word, time.monotonic_ns()
                    since_ns = self._quiet[1]
                return Current(step, phase, since_ns, (a, b, c, d, e))
        return None
