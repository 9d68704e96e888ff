"""Where what is in a recording: its frames, and the moments that one may want to see."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

import msgspec

from gpumon.session.moments import CHECKPOINT, GROWTH, KINDS, LEAK, OOM, SHAPE
from gpumon.session.moments import MOMENTS_MAX as MARKS_MAX
from gpumon_agent import wire

__all__ = ["CHECKPOINT", "GROWTH", "KINDS", "LEAK", "MARKS_MAX", "OOM", "SHAPE", "Frame", "Index", "Mark", "Marks"]


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A frame of blocks. `step`: the newest that was closed before it, -1: none."""

    offset: int
    number: int
    unix_ns: int
    step: int


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Something happened: at this step at the latest."""

    kind: str
    step: int
    unix_ns: int


class Index(msgspec.Struct, frozen=True, array_like=True):
    frames: tuple[Frame, ...]
    first_ns: int  # receiver's clock; 0: nothing was recorded
    last_ns: int
    first_step: int  # the lowest that was closed while it was recorded; -1: none
    last_step: int  # the highest
    marks: tuple[Mark, ...] = ()

    def frame_of(self, step: int) -> int:
        """Position of the newest frame that begins before this step closed."""
        highest = list(accumulate((frame.step for frame in self.frames), max))
        return max(0, bisect_right(highest, step - 1) - 1)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Index)


def encode(index: Index) -> bytes:
    return _encoder.encode(index)


def decode(raw: bytes) -> Index | None:
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None


class Marks:
    """Finds the marks, the steps and the times of a stream of messages."""

    def __init__(self, known: Index | None = None) -> None:
        self.first_ns, self.last_ns = (known.first_ns, known.last_ns) if known else (0, 0)
        self.first_step, self.last_step = (known.first_step, known.last_step) if known else (-1, -1)
        self.marks = list(known.marks) if known else []
        self._shapes: dict[str, set[tuple[wire.Shape, ...]]] = {}  # by source
        self._loads: set[tuple[str, int]] = set()  # a load is repeated for each device, and whenever it is looked at
        self._censuses: set[tuple[str, int]] = set()

    def take(self, received: wire.Received) -> None:
        at = received.unix_ns
        if not self.first_ns:
            self.first_ns = at
        if at > self.last_ns:
            self.last_ns = at
        event = received.event
        if isinstance(event, wire.Step):
            self.last_step = max(self.last_step, event.step)
            self.first_step = event.step if self.first_step < 0 else min(self.first_step, event.step)
            shapes = self._shapes.setdefault(received.source, set())
            if event.input_shapes not in shapes and len(shapes) <= MARKS_MAX:
                if shapes:
                    self._mark(SHAPE, event.step, at)
                shapes.add(event.input_shapes)
        elif isinstance(event, wire.Oom):
            self.marks.append(Mark(OOM, event.step, at))
        elif isinstance(event, wire.Checkpoint) and (received.source, event.number) not in self._loads:
            self._loads.add((received.source, event.number))
            self._mark(CHECKPOINT, event.step, at)
        elif (
            isinstance(event, wire.Census)
            and event.reason == "growth"
            and (received.source, event.number) not in self._censuses
        ):
            self._censuses.add((received.source, event.number))
            self._mark(GROWTH, event.step, at)

    def mark(self, kind: str, step: int) -> None:
        """What no single message says."""
        self._mark(kind, step, self.last_ns)

    def _mark(self, kind: str, step: int, unix_ns: int) -> None:
        if sum(mark.kind == kind for mark in self.marks) < MARKS_MAX:
            self.marks.append(Mark(kind, step, unix_ns))

    def index(self, frames: Iterable[Frame]) -> Index:
        in_order = tuple(sorted(self.marks, key=lambda mark: (mark.step, mark.unix_ns)))
        return Index(tuple(frames), self.first_ns, self.last_ns, self.first_step, self.last_step, in_order)
