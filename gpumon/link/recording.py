"""Recordings: an append-only file of messages that stays valid wherever it is cut off.

The format is in gpumon_agent.wire.recording. Flushed messages survive the death of the recording process at
any byte; they are not synced to the disk.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from types import TracebackType

from gpumon_agent import wire
from gpumon_agent.wire.recording import FRAME_HEAD, HEADER, framed

from .errors import RecordingFailed

_BUFFER_BYTES = 256 * 1024


class Recording:
    """A recording being written. `with Recording(path) as recording: recording.write(received)`."""

    def __init__(self, path: Path, *, force: bool = False) -> None:
        """Raises RecordingFailed if the file exists (without `force`) or cannot be created.

        It is created with the first message, so that a failed attach leaves and overwrites nothing.
        """
        self.path = path
        self.messages = 0
        self.nbytes = 0
        self._force = force
        self._fd: int | None = None
        self._buffer = bytearray()
        self._buffered = 0
        if path.exists() and not force:
            raise self._exists()
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK) or path.is_dir():
            raise RecordingFailed(f"{path} cannot be written", "choose another place")

    def _exists(self) -> RecordingFailed:
        return RecordingFailed(f"{self.path} exists", "choose another name, or overwrite it with --force")

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if self._force else os.O_EXCL)
        try:
            return os.open(self.path, flags, 0o600)
        except FileExistsError:
            raise self._exists() from None
        except OSError as error:
            raise RecordingFailed(f"{self.path}: {error.strerror}", "choose another place") from error

    def write(self, received: wire.Received) -> None:
        message = wire.encode_received(received)
        self._buffer += framed(message)
        self._buffered += 1
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the buffer to the file. Raises RecordingFailed; the file then ends with a complete message."""
        if not self._buffered:
            return
        if self._fd is None:
            self._fd = self._open()
            self._buffer[:0] = HEADER
        data = bytes(self._buffer)
        self._buffer.clear()
        messages, self._buffered = self._buffered, 0
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError as error:
            self._keep(self._fd, *_whole(data, written, 0 if self.nbytes else len(HEADER)))
            kept = f"{self.path} holds {self.messages} messages and can be replayed"
            if not self.messages:
                kept = f"{self.path} holds nothing: free some space there, or choose another place"
            raise RecordingFailed(f"recording stopped: {error.strerror}", kept) from error
        self.nbytes += written
        self.messages += messages

    def _keep(self, fd: int, whole: int, messages: int) -> None:
        """Truncates the file to its last complete message. If that fails too, replay ignores the rest."""
        self.nbytes += whole
        self.messages += messages
        with contextlib.suppress(OSError):
            os.ftruncate(fd, self.nbytes)

    def close(self) -> None:
        """Flushes and closes. Raises RecordingFailed as `flush`, but closes the file anyway."""
        try:
            self.flush()
        finally:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                self._force = False

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _whole(data: bytes, written: int, begin: int) -> tuple[int, int]:
    """(bytes, messages) of `data` complete in its first `written` bytes; messages start at `begin`."""
    end, messages = min(begin, written), 0
    while end + FRAME_HEAD.size <= written:
        length, _ = FRAME_HEAD.unpack_from(data, end)
        if end + FRAME_HEAD.size + length > written:
            break
        end += FRAME_HEAD.size + length
        messages += 1
    return end, messages
