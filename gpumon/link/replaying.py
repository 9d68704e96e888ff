"""Replays a recording: the same messages in the same order, at a chosen speed, from its beginning or from a step on."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from gpumon_agent import wire
from gpumon_agent.wire import recording as plain

from .errors import BadRecording
from .recording_blocks import (
    BEGINS,
    FOOT,
    FOOT_MAGIC,
    HEAD,
    HEADER,
    INDEX,
    MARKED,
    STATE,
    VERSION,
    Damaged,
    Head,
    decompressor,
    head_of,
    messages_of,
    opened,
)
from .recording_index import KINDS, Frame, Index, Mark, Marks, decode

_TURN = 512  # messages between two event loop turns

_WHOLE = 4
"""Frames of a recording that is read from its beginning whatever step is asked for: that takes a second."""


class Replay:
    """Iterates over a recording: `for` at once, `async for` at `speed` times the recorded pace (None: at once).

    After the last message `cut` holds one sentence if the file's end was damaged, else None.
    Raises BadRecording at once if the file cannot be opened or is no recording.
    """

    def __init__(self, path: Path | str, speed: float | None = None) -> None:
        if speed is not None and not speed > 0:
            raise ValueError("speed must be above 0")
        self.path = Path(path)
        self.speed = speed
        self.cut: str | None = None
        self.messages = 0
        self._index: Index | None = None
        try:
            with self.path.open("rb") as file:
                head = file.read(len(HEADER))
        except OSError as error:
            raise BadRecording(f"{path}: {error.strerror}", "give a file made by `gpumon record`") from error
        magic = len(plain.MAGIC)
        if not HEADER.startswith(head[:magic]) or not head:
            raise BadRecording(f"{path} is not a recording of gpumon", "give a file made by `gpumon record`")
        if len(head) == len(HEADER) and head[magic] not in (plain.VERSION[0], VERSION[0]):
            raise BadRecording(
                f"{path} has recording format {head[magic]}, this gpumon reads {plain.VERSION[0]} and {VERSION[0]}",
                "upgrade gpumon",
            )
        self._plain = len(head) == len(HEADER) and head[magic] == plain.VERSION[0]

    @property
    def _name(self) -> str:
        return wire.clean(str(self.path), wire.TEXT_CHARS_MAX)

    def __iter__(self) -> Iterator[wire.Received]:
        self.cut = None
        self.messages = 0
        with self.path.open("rb") as file:
            if len(file.read(len(HEADER))) < len(HEADER):
                self.cut = f"{self._name} ends within its header: nothing was recorded"
            elif self._plain:
                yield from self._plain_messages(file)
            else:
                yield from self._compressed(file, jumped=False)

    def tail(self) -> Iterator[wire.Received]:
        """What must be known for the recording's end, and about its last 2,000 steps."""
        return iter(self) if self._plain else self.near(self.index().last_step + 1)

    def near(self, step: int) -> Iterator[wire.Received]:
        """All messages from about 2,000 steps before `step` on, after what must be known there."""
        frames = self.index().frames
        at = self.index().frame_of(step) - 1
        if self._plain or at < 1 or len(frames) <= _WHOLE:
            yield from self
            return
        self.cut = None
        self.messages = 0
        with self.path.open("rb") as file:
            file.seek(frames[at].offset)
            yield from self._compressed(file, jumped=True)

    def index(self) -> Index:
        """Without its index at its end, as after `kill -9`, every block's head is looked at."""
        if self._index is None:
            self._index = self._scanned() if self._plain else self._indexed() or self._walked()
        return self._index

    # ------------------------------------------------------------------------------------------------- format 2

    def _compressed(self, file: BinaryIO, *, jumped: bool) -> Iterator[wire.Received]:
        """`jumped`: the first frame's state is needed. So is that after frames that were thinned out."""
        numbers = _Numbers()
        stream = None
        frame = -1
        wanted = jumped
        while True:
            begin = file.tell()
            data = file.read(HEAD.size)
            if not data:
                return
            head = head_of(data)
            try:
                if head is None or not head.sound:
                    raise Damaged
                if head.flags & INDEX:
                    opened(decompressor(), head, data, file.read(head.length))
                    return
                if head.flags & BEGINS:
                    wanted = wanted or (frame >= 0 and head.frame != frame + 1)
                    if wanted and frame >= 0:
                        numbers.jump()
                    stream, frame = decompressor(), head.frame
                if stream is None or head.frame != frame:
                    raise Damaged
                raw = opened(stream, head, data, file.read(head.length))
                if head.flags & STATE and not wanted:
                    continue
                for received in messages_of(raw):
                    if not head.flags & STATE:
                        self.messages += 1
                    yield numbers.follow(received)
                wanted = wanted and bool(head.flags & STATE)
            except Damaged:
                self._cut_at(begin)
                return

    def _cut_at(self, begin: int) -> None:
        rest = self.path.stat().st_size - begin
        self.cut = (
            f"{self._name} is damaged or cut off at byte {begin}: the {self.messages} messages before it were "
            f"replayed, the last {rest} bytes were not"
        )

    def _indexed(self) -> Index | None:
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            if size < len(HEADER) + HEAD.size + FOOT.size:
                return None
            file.seek(size - FOOT.size)
            begin, magic = FOOT.unpack(file.read(FOOT.size))
            if magic != FOOT_MAGIC or begin > size - FOOT.size - HEAD.size:
                return None
            file.seek(begin)
            data = file.read(HEAD.size)
            head = head_of(data)
            if head is None or not head.sound or not head.flags & INDEX:
                return None
            try:
                return decode(opened(decompressor(), head, data, file.read(head.length)))
            except Damaged:
                return None

    def _walked(self) -> Index:
        """By the heads alone: the step of a mark is the newest of its block."""
        frames: list[Frame] = []
        marks: list[Mark] = []
        last: Head | None = None
        first_ns = 0
        size = self.path.stat().st_size
        at = len(HEADER)
        with self.path.open("rb", buffering=0) as file:
            while True:
                file.seek(at)
                head = head_of(file.read(HEAD.size))
                if head is None or not head.sound or head.flags & INDEX or at + HEAD.size + head.length > size:
                    break
                if head.flags & BEGINS:
                    known = (last.unix_ns, last.step) if last is not None else (0, -1)
                    frames.append(Frame(at, head.frame, *known))
                for number, kind in enumerate(KINDS):
                    if head.flags & MARKED << number:
                        marks.append(Mark(kind, head.step, head.unix_ns))
                first_ns = first_ns or head.unix_ns
                last = head
                at += HEAD.size + head.length
        if last is None:
            return Index((), 0, 0, -1, -1)
        return Index(tuple(frames), first_ns, last.unix_ns, 0 if last.step >= 0 else -1, last.step, tuple(marks))

    # ------------------------------------------------------------------------------------------------- format 1

    def _scanned(self) -> Index:
        marks = Marks()
        for received in Replay(self.path):
            marks.take(received)
        return marks.index(())

    def _plain_messages(self, file: BinaryIO) -> Iterator[wire.Received]:
        while True:
            begin = file.tell()
            head = file.read(plain.FRAME_HEAD.size)
            if not head:
                return
            received = None
            if len(head) == plain.FRAME_HEAD.size:
                length, checksum = plain.FRAME_HEAD.unpack(head)
                if length <= plain.MESSAGE_BYTES_MAX:
                    received = _message(file.read(length), length, checksum)
            if received is None:
                self._cut_at(begin)
                return
            self.messages += 1
            yield received

    async def __aiter__(self) -> AsyncIterator[wire.Received]:
        began = time.monotonic()
        first: int | None = None
        for count, received in enumerate(self, start=1):
            if self.speed is not None:
                first = received.unix_ns if first is None else first
                due = began + (received.unix_ns - first) / 1e9 / self.speed
                if (wait := due - time.monotonic()) > 0:
                    await asyncio.sleep(wait)
            if count % _TURN == 0:
                await asyncio.sleep(0)
            yield received


class _Numbers:
    """After frames that were thinned out events are numbered on: nothing was lost on the way to the recorder."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}  # as given, by source
        self._less: dict[str, int] = {}
        self._jumped: set[str] = set()

    def jump(self) -> None:
        self._jumped = set(self._newest)

    def follow(self, received: wire.Received) -> wire.Received:
        seq, source = received.seq, received.source
        if seq < 0:
            return received
        if source in self._jumped:
            self._jumped.discard(source)
            self._less[source] = seq - self._newest[source] - 1
        less = self._less.get(source, 0)
        self._newest[source] = max(seq - less, self._newest.get(source, -1))
        if not less:
            return received
        return wire.Received(source, received.unix_ns, received.event, seq - less, received.replayed)


def replay(path: Path | str, speed: float | None = None) -> Replay:
    return Replay(path, speed)


def _message(message: bytes, length: int, checksum: int) -> wire.Received | None:
    if len(message) < length or zlib.crc32(message) != checksum:
        return None
    try:
        return wire.decode_received(message)
    except wire.WireError:
        return None
