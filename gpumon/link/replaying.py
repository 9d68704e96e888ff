"""Replays a recording: the same messages in the same order, at a chosen speed."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from gpumon_agent import wire
from gpumon_agent.wire.recording import FRAME_HEAD, HEADER, MAGIC, MESSAGE_BYTES_MAX, VERSION

from .errors import BadRecording

_TURN = 512  # messages between two event loop turns


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
        try:
            with self.path.open("rb") as file:
                head = file.read(len(HEADER))
        except OSError as error:
            raise BadRecording(f"{path}: {error.strerror}", "give a file made by `gpumon record`") from error
        if not HEADER.startswith(head[: len(MAGIC)]) or not head:
            raise BadRecording(f"{path} is not a recording of gpumon", "give a file made by `gpumon record`")
        if len(head) == len(HEADER) and head[len(MAGIC)] != VERSION[0]:
            raise BadRecording(
                f"{path} has recording format {head[len(MAGIC)]}, this gpumon reads {VERSION[0]}", "upgrade gpumon"
            )

    def __iter__(self) -> Iterator[wire.Received]:
        self.cut = None
        self.messages = 0
        size = self.path.stat().st_size
        name = wire.clean(str(self.path), wire.TEXT_CHARS_MAX)
        with self.path.open("rb") as file:
            if len(file.read(len(HEADER))) < len(HEADER):
                self.cut = f"{name} ends within its header: nothing was recorded"
                return
            while True:
                begin = file.tell()
                head = file.read(FRAME_HEAD.size)
                if not head:
                    return
                received = None
                if len(head) == FRAME_HEAD.size:
                    length, checksum = FRAME_HEAD.unpack(head)
                    if length <= MESSAGE_BYTES_MAX:
                        received = _message(file.read(length), length, checksum)
                if received is None:
                    self.cut = (
                        f"{name} is damaged or cut off at byte {begin}: the {self.messages} messages before it were "
                        f"replayed, the last {size - begin} bytes were not"
                    )
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


def replay(path: Path | str, speed: float | None = None) -> Replay:
    return Replay(path, speed)


def _message(message: bytes, length: int, checksum: int) -> wire.Received | None:
    if len(message) < length or zlib.crc32(message) != checksum:
        return None
    try:
        return wire.decode_received(message)
    except wire.WireError:
        return None
