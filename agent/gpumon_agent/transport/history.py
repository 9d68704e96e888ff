"""The run's past, encoded: the newest steps in full, its beginning and every nth step between (wire.thinning).

It is sent to viewers that attach late or missed something, and written beside an out-of-memory report. Viewers that
were attached all along receive `Thinned` and thin their past the same way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from gpumon_agent import wire
from gpumon_agent.wire.thinning import Facts, beat_is_kept, facts, kept

STEPS_MAX = 2_048
THIN_EVERY = 512
"""Steps between two thinnings of the oldest: the newest 1,536 to 2,048 steps are complete."""

BYTES_MAX = 3 * 1024 * 1024  # of the newest steps; thinned to three quarters of it
OLD_STEPS_MAX = 512  # one of every `stride` steps
OLD_BYTES_MAX = 1024 * 1024
SAID_MAX = 64  # notices and out-of-memories of thinned steps
_PAGE_BYTES = 32 * 1024


class _Page(NamedTuple):
    """Events up to the end of a step."""

    packets: list[bytes]
    nbytes: int
    steps: int


class _Old(NamedTuple):
    facts: Facts
    raw: bytes  # a wire.PastStep


class _Closed(NamedTuple):
    """A step whose events leave the pages, encoded."""

    facts: Facts
    closed: bytes
    phases: list[bytes]
    ledgers: list[bytes]


class _Parts:
    __slots__ = ("ledgers", "peaks", "phases")

    def __init__(self) -> None:
        self.phases: list[bytes] = []
        self.ledgers: list[bytes] = []
        self.peaks: list[tuple[int, int | None]] = []


class History:
    """Bounded by bytes and by steps.

    The newest events are in pages of finished packets, so a snapshot only copies bytes. Memory: the encoded bytes plus
    a few hundred bytes a page (Structs would take four to five times as much). `thin` decodes the first fields of each
    dropped event, once: 10 µs a step.
    """

    def __init__(self, limit_bytes: int = BYTES_MAX) -> None:
        self._bytes_max = limit_bytes
        self._pages: deque[_Page] = deque()
        self._pages_bytes = 0
        self._pages_steps = 0
        self._open: list[tuple[int, bytes]] = []
        self._open_bytes = 0
        self._open_steps = 0
        self._steps_since = 0  # closed since the last thinning
        self._closed: bytes | None = None  # the newest wire.Step
        self._old: dict[int, _Old] = {}
        self._said: deque[bytes] = deque(maxlen=SAID_MAX)
        self._loose: dict[int, _Parts] = {}  # of dropped events whose step has not closed yet
        self._thinned: wire.Thinned | None = None
        self._beats: dict[int, bytes] = {}
        self.newest = -1

    def extend(self, events: list[tuple[int, bytes]]) -> None:
        """Adds encoded events with their numbers, in order."""
        for seq, encoded in events:
            self._open.append((seq, encoded))
            self._open_bytes += len(encoded)
            self.newest = seq
            closes = wire.kind_of_sound(encoded) == "step"
            if closes:
                self._open_steps += 1
                self._steps_since += 1
                self._closed = encoded
            if self._open_bytes >= _PAGE_BYTES and (closes or self._open_bytes >= 4 * _PAGE_BYTES):
                self._seal()

    def beat(self, heartbeat: wire.Heartbeat) -> None:
        """Keeps heartbeats: the process's size over time."""
        newest = heartbeat.number
        if newest is not None:
            self._beats[newest] = wire.encode_event(heartbeat)
            self._beats = {number: raw for number, raw in self._beats.items() if beat_is_kept(number, newest)}

    def thin(self) -> wire.Thinned | None:
        """Thins the past when due, and returns the event for viewers."""
        too_large = self._pages_bytes + self._open_bytes > self._bytes_max
        if self._closed is None or (self._steps_since < THIN_EVERY and not too_large):
            return None
        closed = wire.decode_event(self._closed)
        assert isinstance(closed, wire.Step)
        limit = 3 * self._bytes_max // 4 if too_large else self._bytes_max
        known = self._thinned
        until, stride = (known.until, known.stride) if known is not None else (-1, 1)
        dropped: dict[int, _Closed] = {}
        while self._pages and (
            self._pages_bytes + self._open_bytes > limit or self.steps - self._pages[0].steps >= STEPS_MAX - THIN_EVERY
        ):
            page = self._pages.popleft()
            self._pages_bytes -= page.nbytes
            self._pages_steps -= page.steps
            dropped.update(self._take_apart(page))
        if dropped:
            until = max(until, *dropped)
            stride = self._keep(dropped, stride)
            self._loose = {step: parts for step, parts in self._loose.items() if step > until}
        self._steps_since = 0
        self._thinned = wire.Thinned(until, closed.step, stride)
        return self._thinned

    def _take_apart(self, page: _Page) -> Iterator[tuple[int, _Closed]]:
        """The page's steps by number. Keeps its notices and out-of-memories."""
        loose = self._loose
        for packet in page.packets:
            for _, raw in wire.unpack(packet):
                kind = wire.kind_of_sound(raw)
                if kind == "phase":
                    step, device, peak = wire.peak_of(raw)
                    parts = loose.get(step) or loose.setdefault(step, _Parts())
                    parts.phases.append(raw)
                    parts.peaks.append((device, peak))
                elif kind == "ledger":
                    step = wire.step_of(raw)
                    parts = loose.get(step) or loose.setdefault(step, _Parts())
                    parts.ledgers.append(raw)
                elif kind == "step":
                    closed = wire.decode_event(raw)
                    assert isinstance(closed, wire.Step)
                    parts = loose.pop(closed.step) if closed.step in loose else _Parts()
                    about = facts(closed, len(parts.phases), parts.peaks, len(parts.ledgers))
                    yield closed.step, _Closed(about, raw, parts.phases, parts.ledgers[-wire.LEDGERS_PER_PAST_STEP :])
                elif kind in ("notice", "oom"):
                    self._said.append(raw)

    def _keep(self, dropped: dict[int, _Closed], stride: int) -> int:
        """Thins the old steps and `dropped` by the rule. Returns the stride used."""
        old, fresh = self._old, dict(dropped)
        by_step = {step: known.facts for step, known in old.items()} | {
            step: each.facts for step, each in fresh.items()
        }
        in_order = [by_step[step] for step in sorted(by_step)]
        while True:
            chosen = kept(in_order, stride)
            for step in chosen & fresh.keys():
                each = fresh.pop(step)
                old[step] = _Old(each.facts, wire.past_step(each.closed, each.phases, each.ledgers))
            self._old = old = {step: old[step] for step in sorted(chosen)}
            parts = len({step // stride for step in chosen})
            if parts <= OLD_STEPS_MAX and (self._old_bytes() <= OLD_BYTES_MAX or parts < 2):
                return stride
            in_order = [each for each in in_order if each.step in chosen]
            stride *= 2

    def _old_bytes(self) -> int:
        return sum(len(old.raw) for old in self._old.values())

    def past(self) -> list[bytes]:
        """Heartbeats, and the thinned part: kept steps, notices, out-of-memories, `Thinned`. Without numbers."""
        thinned = [] if self._thinned is None else [wire.encode_event(self._thinned)]
        return [*self._beats.values(), *(old.raw for old in self._old.values()), *self._said, *thinned]

    def packets(self) -> list[bytes]:
        """Everything since, oldest first."""
        sealed = [packet for page in self._pages for packet in page.packets]
        return sealed + list(wire.pack(self._open, replayed=True))

    def events(self) -> list[tuple[int, bytes]]:
        """The whole history (`past` and `packets`) with its numbers (-1: none)."""
        sealed = [event for page in self._pages for packet in page.packets for event in wire.unpack(packet)]
        return [*((-1, raw) for raw in self.past()), *sealed, *self._open]

    @property
    def nbytes(self) -> int:
        return self._pages_bytes + self._open_bytes + self._old_bytes()

    @property
    def steps(self) -> int:
        """Steps kept in full."""
        return self._pages_steps + self._open_steps

    def _seal(self) -> None:
        packets = list(wire.pack(self._open, replayed=True))
        size = sum(map(len, packets))
        self._pages.append(_Page(packets, size, self._open_steps))
        self._pages_bytes += size
        self._pages_steps += self._open_steps
        self._open, self._open_bytes, self._open_steps = [], 0, 0
