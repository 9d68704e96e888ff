"""Two rings of records in shared memory: events (the newest overwrite the oldest) and long messages (none is lost).

A record is [number u64, length u32, check u32, payload, zeros up to 8 bytes]. `check` is the payload's CRC-32, started
with the record's number (its upper 32 bits folded into the lower), so it covers both. Positions count the bytes since
the ring's beginning and never wrap. After a record is written, its end is stored as the ring's head. A record that does
not fit into the rest of its page (`PAGE_BYTES`) begins the next one: each page begins with a record, where a reader
that lost its place can resume.

The writer runs in the training threads and never waits. `Writer` explains why it needs no lock.

The reader copies a page, checks that the writer did not reach it meanwhile, and takes from the copy the records with a
new number and a correct check; at the first other one it goes on to the next page. So it depends neither on the order
in which another CPU's stores become visible, nor on the memory's content.
"""

from __future__ import annotations

import functools
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar
from zlib import crc32

from gpumon_agent.transport.memory import EVENTS_HEAD, LONG_HEAD, LONG_TAIL, PAGE_BYTES, Memory

_HEADER = struct.Struct("=QII")
LONGEST = PAGE_BYTES // 4 - _HEADER.size
"""The longest payload, in bytes: four such records fill a page."""

_CHUNK = struct.Struct("=III")  # in front of each chunk of a long message: its kind, which chunk, of how many
CHUNK_BYTES = LONGEST - _CHUNK.size
LONG_LIMIT_BYTES = 64 * 1024 * 1024
"""Limit of what waits in the training process, and of a message that a reader assembles."""
_CHUNKS_MAX = -(-LONG_LIMIT_BYTES // CHUNK_BYTES)

_LOCK = threading.RLock()  # if there is no GIL

Owner = TypeVar("Owner")
P = ParamSpec("P")
R = TypeVar("R")


def _shape(length: int) -> tuple[Callable[..., None], int]:
    """Function that writes such a record (buffer, offset, number, length, check, payload); the record's size."""
    if not 0 < length <= LONGEST:
        raise ValueError(f"a record of {length} bytes; between 1 and {LONGEST} are possible")
    padded = length + 7 & -8
    return struct.Struct(f"=QII{padded}s").pack_into, _HEADER.size + padded


_SHAPES = (None, *map(_shape, range(1, 513)))


def one_thread_at_a_time(method: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
    """`method` itself with a GIL. Without one it runs under a reentrant lock, for signal handlers."""
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        return method

    @functools.wraps(method)
    def locked(owner: Owner, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with _LOCK:
            return method(owner, *args, **kwargs)

    return locked


class Writer:
    """Writes events to the ring, from any thread, but not from a forked child.

    There is no lock: one costs up to half as much as the rest (`benchmarks/ring.py`), and a signal handler that waits
    for another thread's `put` would wait for ever. CPython switches threads and runs signal handlers only when a
    function begins, a call has returned or a jump was taken; finalizers also where a container is allocated. In `put`
    none of these occurs between comparing the number and the end of the write. So whenever other code runs, all records
    before `_at` are complete, and the head may be set to it: by this thread, or by the next `put` if a signal handler
    raised. (A trace function can raise in between. Then a record is missing, and readers go on with the next page.)

    Without a GIL a lock is needed.
    """

    def __init__(self, memory: Memory, *, after: Writer | None = None) -> None:
        """`memory` is new, or a copy of the one `after` wrote to; then the numbers continue."""
        self._attach(memory.events, memory.words, EVENTS_HEAD, after)

    def _attach(self, ring: memoryview, words: memoryview, head: int, after: Writer | None) -> None:
        self._ring, self._words, self._head = ring, words, head
        self._size = len(ring)
        self._number: int = 0
        position: int = 0
        if after is not None:
            self._number = after._number
            # the copy's: another thread may have written to the old memory since
            position = min(after._lap + after._at, words[head]) & -8
        self._at: int = position % self._size  # small numbers: faster arithmetic
        self._page_end = (self._at | PAGE_BYTES - 1) + 1
        self._lap: int = position - self._at

    @property
    def number(self) -> int:
        """Of the next record."""
        return self._number

    @one_thread_at_a_time
    def put(self, payload: bytes, only: int = -1) -> int:
        """Writes one record and returns its number, counted from 0. Never waits.

        `only`: write it under that number or not at all. -1: not written, for that reason or because the queue of long
        messages is full. Raises ValueError if `payload` is empty or longer than LONGEST; TypeError after `close`.
        """
        length = len(payload)
        pack_into, size = (length <= 512 and _SHAPES[length]) or _shape(length)
        while True:
            number = self._number
            if number != only >= 0:
                return -1
            check = crc32(payload, number ^ number >> 32)
            if self._number == number:
                at = self._at
                end = at + size
                if end <= self._page_end:
                    self._number = number + 1
                    self._at = end
                    pack_into(self._ring, at, number, length, check, payload)
                    self._words[self._head] = self._lap + self._at  # not `end`: others may have written more
                    return number
                if not self._turn(size):
                    return -1

    def _turn(self, size: int) -> bool:
        """Moves to the next page, if `size` bytes do not fit into this one. False: it is not free."""
        self._begin_page(self._lap + self._page_end, size)
        return True

    def _begin_page(self, begin: int, size: int) -> None:
        """Begins the page at `begin`, unless another thread already has. Atomic, as `put`."""
        end = self._page_end
        if self._lap + end == begin and self._at + size > end:
            self._lap += end & self._size  # at the ring's end only
            self._at = end & self._size - 1
            self._page_end = self._at + PAGE_BYTES


class _Message(NamedTuple):
    kind: int
    payload: bytes
    chunks: int


class _Chunks(Writer):
    """Writes chunks of long messages to the queue. A page is free once the reader has left it."""

    def __init__(self, memory: Memory, after: Writer | None) -> None:
        self._attach(memory.long, memory.words, LONG_HEAD, after)

    def _turn(self, size: int) -> bool:
        begin = self._lap + self._page_end
        # the page's present content ends one lap before the new content would
        if not begin + PAGE_BYTES - self._size <= self._words[LONG_TAIL] <= begin:
            self._words[self._head] = self._lap + self._at  # if it was overwritten, the reader waits for this
            return False
        self._begin_page(begin, size)  # this page only: it was checked
        return True


class LongWriter:
    """Sends long messages complete and in order, a few chunks at a time. The rest waits in this process.

    Any thread may use it, and a signal handler during another call: the next chunk follows from the number of the
    ring's next record alone, and is sent under that number or not at all.
    """

    def __init__(self, memory: Memory, *, after: LongWriter | None = None, limit_bytes: int = LONG_LIMIT_BYTES) -> None:
        """As Writer's. What waits in `after` waits here; a partly sent message is sent again."""
        self._ring: _Chunks = _Chunks(memory, None if after is None else after._ring)
        self._waiting: deque[_Message] = deque(() if after is None else after._waiting)
        self._first = self._ring.number  # of the first chunk of the first message that waits
        self._limit = limit_bytes
        self._put_bytes = sum(len(message.payload) for message in self._waiting)
        self._sent_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """Of all messages not completely in the ring."""
        return self._put_bytes - self._sent_bytes

    @one_thread_at_a_time
    def put(self, kind: int, payload: bytes) -> bool:
        """Queues a message. False: refused, because more than `limit_bytes` would wait.

        Raises ValueError if `kind` is no u32.
        """
        size = len(payload)
        if not 0 <= kind < 2**32:
            raise ValueError(f"kind {kind}")
        message = _Message(kind, payload, max(1, -(-size // CHUNK_BYTES)))
        if self.waiting_bytes + size > self._limit:
            return False
        self._put_bytes += size
        self._waiting.append(message)
        return True

    @one_thread_at_a_time
    def pump(self, max_chunks: int = 8) -> None:
        """Copies up to `max_chunks` chunks of CHUNK_BYTES into the ring, as far as there is room. Never waits."""
        waiting, ring = self._waiting, self._ring
        while True:
            number, first = ring._number, self._first
            message = waiting[0] if waiting else None
            if message is None:
                return
            kind, payload, chunks = message
            size = len(payload)
            index = number - first
            if index >= chunks:
                if self._first == first:  # no other code runs until `popleft` ends, see Writer
                    self._first = number
                    self._sent_bytes += size
                    waiting.popleft()
                continue
            if max_chunks <= 0:
                return
            begin = index * CHUNK_BYTES
            if ring.put(_CHUNK.pack(kind, index, chunks) + payload[begin : begin + CHUNK_BYTES], number) >= 0:
                max_chunks -= 1
            elif ring._number == number:  # there is no room
                return


class _Pages:
    """Common to readers of both rings: complete records, page by page, from memory with any content."""

    def __init__(self, ring: memoryview, words: memoryview, head: int, unsafe_pages: int) -> None:
        """`unsafe_pages`: pages, from the newest record's on, that the writer may write to at any moment."""
        self._ring, self._words, self._head = ring, words, head
        self._size = len(ring)
        self._pages = self._size // PAGE_BYTES
        self._unsafe = unsafe_pages
        self._next = 0  # no smaller number is new

    @property
    def head(self) -> int:
        return self._words[self._head]

    def _oldest(self, head: int) -> int:
        """Start of the oldest page that is complete and safe for now."""
        return max(0, (head - 1) // PAGE_BYTES + self._unsafe - self._pages) * PAGE_BYTES

    def take(self, position: int, max_pages: int = sys.maxsize) -> tuple[int, list[tuple[int, bytes]]]:
        """(end, new records) of up to `max_pages` pages from `position` on."""
        head = self._words[self._head]
        taken: list[tuple[int, bytes]] = []
        oldest = self._oldest(head)
        if not oldest <= position <= head:
            position = oldest
        for _ in range(min(max_pages, self._pages)):
            if position >= head:
                break
            end = min((position | PAGE_BYTES - 1) + 1, head)
            at = position % self._size
            copy = bytes(self._ring[at : at + end - position])
            oldest = self._oldest(self._words[self._head])
            if position < oldest:  # the writer may have been there, before or while it was copied
                position = oldest
                continue
            self._parse(copy, taken)
            position = end
        return position, taken

    def _parse(self, page: bytes, taken: list[tuple[int, bytes]]) -> None:
        at = 0
        while at + _HEADER.size < len(page):
            number, length, check = _HEADER.unpack_from(page, at)
            begin = at + _HEADER.size
            end = begin + length
            if number < self._next or not 0 < length <= LONGEST or end > len(page):
                return
            payload = page[begin:end]
            if crc32(payload, number ^ number >> 32) != check:
                return
            self._next = number + 1
            taken.append((number, payload))
            at = end + 7 & -8


class Reader:
    """Reads events from the ring in another process, while the writer goes on.

    Known limitations: a corrupted record costs those after it in its page. A reader slower than the writer loses whole
    pages, never parts of records. Of two MiB the newest 1.9 are available.
    """

    def __init__(self, memory: Memory) -> None:
        """Starts at the first record; overwritten ones count as lost."""
        self._pages = _Pages(memory.events, memory.words, EVENTS_HEAD, unsafe_pages=2)
        self._position = 0
        self._expected: int | None = 0
        self.lost = 0
        """Records missed so far, by their numbers."""

    @classmethod
    def oldest(cls, memory: Memory) -> Reader:
        """Starts at the oldest page available; earlier records do not count as lost."""
        reader = cls(memory)
        reader._expected = None
        return reader

    def has_more(self) -> bool:
        """Whether something was written since the last call of `take`."""
        return self._pages.head != self._position

    def take(self, max_pages: int = sys.maxsize) -> list[tuple[int, bytes]]:
        """Records since the last call, with increasing numbers: all, or those of `max_pages` pages."""
        self._position, taken = self._pages.take(self._position, max_pages)
        if taken:
            first, last = taken[0][0], taken[-1][0]
            self.lost += last + 1 - len(taken) - (first if self._expected is None else self._expected)
            self._expected = last + 1
        return taken


class LongReader:
    """Reads long messages from the queue in another process. A new reader resumes where the last one stopped.

    Known limitations: a message partly read by the last one is lost. A corrupted chunk costs its message.
    """

    def __init__(self, memory: Memory) -> None:
        self._words = memory.words
        self._pages = _Pages(memory.long, memory.words, LONG_HEAD, unsafe_pages=1)
        self._position = memory.words[LONG_TAIL]
        self._message = (0, 0, 0)  # kind, chunks, number of its first chunk
        self._chunks: list[bytes] = []

    def take(self) -> list[tuple[int, bytes]]:
        """(kind, payload) of each message completed since the last call."""
        self._position, taken = self._pages.take(self._position)
        messages = []
        for number, record in taken:
            if len(record) < _CHUNK.size:
                continue
            kind, index, chunks = _CHUNK.unpack_from(record)
            message = kind, chunks, number - index
            if index == 0:
                self._message, self._chunks = message, []
            if message != self._message or index != len(self._chunks) or not index < chunks <= _CHUNKS_MAX:
                continue
            self._chunks.append(record[_CHUNK.size :])
            if len(self._chunks) == chunks:
                messages.append((kind, b"".join(self._chunks)))
                self._chunks = []
        self._words[LONG_TAIL] = self._position
        return messages
