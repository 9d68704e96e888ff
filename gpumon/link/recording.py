"""Recordings: an append-only file of messages that stays valid wherever its writing is cut off.

    magic (8 bytes), format version (2 × uint8), then per message: length (uint32), CRC-32 of it (uint32), the message
    as `wire.encode_received` makes it. Little endian.

What was handed to `flush` survives the death of the recording process at any byte; it is not forced to the disk itself.
"""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path
from types import TracebackType

from gpumon_agent import wire

from .errors import RecordingFailed

MAGIC = b"\x89gpumon\n"  # a byte that is no text, and a line end that a text-mode copy would change
VERSION = (1, 0)
HEADER = MAGIC + bytes(VERSION)
FRAME_HEAD = struct.Struct("<II")
MESSAGE_BYTES_MAX = 1024 * 1024
_BUFFER_BYTES = 256 * 1024


class Recording:
    """A recording being written. `with Recording(path) as recording: recording.write(received)`."""

    def __init__(self, path: Path, *, force: bool = False) -> None:
        """Raises RecordingFailed: the file exists (and not `force`), or cannot be made."""
        self.path = path
        self.messages = 0
        self.nbytes = 0
        self._buffer = bytearray(HEADER)
        self._buffered = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
        try:
            self._fd = os.open(path, flags, 0o600)
        except FileExistsError:
            raise RecordingFailed(f"{path} exists", "choose another name, or overwrite it with --force") from None
        except OSError as error:
            raise RecordingFailed(f"{path}: {error.strerror}", "choose a place that can be written to") from error
        self.flush()

    def write(self, received: wire.Received) -> None:
        message = wire.encode_received(received)
        self._buffer += FRAME_HEAD.pack(len(message), zlib.crc32(message))
        self._buffer += message
        self._buffered += 1
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hands what is buffered to the system. Raises RecordingFailed; the file then ends with a whole message."""
        data = memoryview(bytes(self._buffer))
        self._buffer.clear()
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            self._cut_back()
            kept = f"{self.path} holds the {self.messages} messages before that and can be replayed"
            raise RecordingFailed(f"recording stopped: {error.strerror}", kept) from error
        self.nbytes += written
        self.messages += self._buffered
        self._buffered = 0

    def _cut_back(self) -> None:
        """Removes the part of a batch that was still written. Where even that fails, replay does without it."""
        try:
            os.ftruncate(self._fd, self.nbytes)
        except OSError:
            return

    def close(self) -> None:
        """Flushes and closes. Raises RecordingFailed as `flush` does, the file closed all the same."""
        if self._fd >= 0:
            try:
                self.flush()
            finally:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
