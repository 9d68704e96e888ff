"""Recordings: an append-only file of messages that stays valid wherever it is cut off.

The format is in recording_blocks. Flushed messages survive the death of the recording process at any byte; they are not
synced to the disk.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from gpumon.session import frame as session
from gpumon_agent import wire

from .errors import RecordingFailed
from .recording_blocks import BEGINS, FOOT, FOOT_MAGIC, HEADER, INDEX, LENGTH, MARKED, STATE, block, compressor
from .recording_index import KINDS, Frame, Marks, encode
from .recording_state import State
from .recording_thinning import spared

_BUFFER_BYTES = 256 * 1024

FRAME_BYTES = 4 * 1024 * 1024
"""Of messages, before compression: 2,000 to 4,000 steps. To see one step a reader reads two frames at most."""

SIZE_MIN = 16 * 1024 * 1024
"""Of `max_size`: room for the first frame, the newest, and a few between."""


class Recording:
    """A recording being written. `with Recording(path) as recording: recording.write(received)`."""

    def __init__(self, path: Path, *, force: bool = False, max_size: int | None = None) -> None:
        """Raises RecordingFailed if the file exists (without `force`) or cannot be created.

        It is created with the first message, so that a failed attach leaves and overwrites nothing. Beyond `max_size`
        bytes its frames are thinned to half of that.
        """
        self.path = path
        self.messages = 0
        self.nbytes = 0
        self.thinned = 0  # how often
        self._force = force
        self._max_size = max_size
        self._fd: int | None = None
        self._buffer = bytearray()
        self._buffered = 0
        self._stream = compressor()
        self._frames = [Frame(len(HEADER), 0, 0, -1)]
        self._begins = True  # the next block begins a frame
        self._frame_bytes = 0
        self._state = State()
        self._marks = Marks()
        self._told = 0  # marks that blocks have
        self._failed = False
        if path.exists() and not force:
            raise self._exists()
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK) or path.is_dir():
            raise RecordingFailed(f"{path} cannot be written", "choose another place")

    def _exists(self) -> RecordingFailed:
        return RecordingFailed(f"{self.path} exists", "choose another name, or overwrite it with --force")

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if self._force else os.O_EXCL)
        try:
            return os.open(self.path, flags, 0o600)
        except FileExistsError:
            raise self._exists() from None
        except OSError as error:
            raise RecordingFailed(f"{self.path}: {error.strerror}", "choose another place") from error

    def write(self, received: wire.Received) -> None:
        message = wire.encode_received(received)
        self._buffer += LENGTH.pack(len(message)) + message
        self._buffered += 1
        self._marks.take(received)
        self._state.take(received)
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()

    def known(self) -> session.Frame:
        """The session so far."""
        return self._state.frame(self._marks.last_ns)

    def mark(self, kind: str, step: int) -> None:
        """An event for the replay that no single message says (recording_index.KINDS)."""
        self._marks.mark(kind, step)

    def flush(self) -> None:
        """Writes the buffer to the file. Raises RecordingFailed; the file then ends with a complete block."""
        if not self._buffered or self._failed:
            return
        if self._fd is None:
            self._fd = self._open()
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):  # a pipe or a device: it is not replaced by a file
                self._max_size = None
            self._put(HEADER)
        raw, messages = bytes(self._buffer), self._buffered
        self._buffer.clear()
        self._buffered = 0
        new, self._told = {mark.kind for mark in self._marks.marks[self._told :]}, len(self._marks.marks)
        self._put(self._block(raw, messages, sum(MARKED << at for at, kind in enumerate(KINDS) if kind in new)))
        self.messages += messages
        self._frame_bytes += len(raw)
        if self._frame_bytes >= FRAME_BYTES:
            self._next_frame()
            if self._max_size is not None and self.nbytes > self._max_size:
                self._thin(self._max_size)

    def _block(self, raw: bytes, messages: int, flags: int) -> bytes:
        begins, self._begins = BEGINS if self._begins else 0, False
        marks = self._marks
        return block(
            self._stream, raw, messages, self._frames[-1].number, flags | begins, marks.last_step, marks.last_ns
        )

    def _next_frame(self) -> None:
        self._stream, self._begins, self._frame_bytes = compressor(), True, 0
        self._frames.append(Frame(self.nbytes, self._frames[-1].number + 1, self._marks.last_ns, self._marks.last_step))
        raw, messages = bytearray(), 0
        for received in self._state.messages(self._marks.last_ns):
            message = wire.encode_received(received)
            raw += LENGTH.pack(len(message)) + message
            messages += 1
            if len(raw) >= _BUFFER_BYTES:
                self._put(self._block(bytes(raw), messages, STATE))
                raw, messages = bytearray(), 0
        self._put(self._block(bytes(raw), messages, STATE))

    def _put(self, data: bytes) -> None:
        assert self._fd is not None
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, memoryview(data)[written:])
        except OSError as error:
            with contextlib.suppress(OSError):  # if that fails too, replay ignores the rest
                os.ftruncate(self._fd, self.nbytes)
            self._failed = True
            kept = f"{self.path} holds {self.messages} messages and can be replayed"
            if not self.messages:
                kept = f"{self.path} holds nothing: free some space there, or choose another place"
            raise RecordingFailed(f"recording stopped: {error.strerror}", kept) from error
        self.nbytes += written

    def _thin(self, max_size: int) -> None:
        """Drops frames until half of `max_size` is left. The file is replaced by a copy of what stays."""
        ends = [*(frame.offset for frame in self._frames[1:]), self.nbytes]
        sizes = [end - frame.offset for frame, end in zip(self._frames, ends, strict=True)]
        kept = spared([(f.number, size) for f, size in zip(self._frames, sizes, strict=True)], max_size // 2)
        path = self.path.resolve()  # a link stays, and the copy is on the disk that was chosen
        beside = path.with_name(f".{path.name}.thinned")
        try:
            beside.unlink(missing_ok=True)
            fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                frames = self._copied(fd, [(self._frames[at], sizes[at]) for at in kept])
                beside.replace(path)
            except OSError:
                os.close(fd)
                beside.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise RecordingFailed(
                f"recording stopped: it has reached --max-size, and no smaller copy can be made: {error.strerror}",
                f"{self.path} holds {self.messages} messages and can be replayed",
            ) from error
        assert self._fd is not None
        os.close(self._fd)
        self._fd, self._frames, self.thinned = fd, frames, self.thinned + 1
        self.nbytes = os.lseek(fd, 0, os.SEEK_CUR)

    def _copied(self, fd: int, frames: Iterable[tuple[Frame, int]]) -> list[Frame]:
        assert self._fd is not None
        at = os.write(fd, HEADER)
        moved = []
        for frame, size in frames:
            moved.append(Frame(at, frame.number, frame.unix_ns, frame.step))
            left, begin = size, frame.offset
            while left:
                data = os.pread(self._fd, min(left, 1 << 20), begin)
                if not data:
                    raise OSError(5, "the file has become shorter")
                done = os.write(fd, data)
                at, begin, left = at + done, begin + done, left - done
        return moved

    def close(self) -> None:
        """Flushes and closes. Raises RecordingFailed as `flush`, but closes the file anyway."""
        try:
            self.flush()
            if self._fd is not None and not self._failed:
                self._end()
        finally:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
                self._force = False

    def _end(self) -> None:
        """The index, without which a reader would have to look at every block."""
        begin = self.nbytes
        self._stream, self._begins = compressor(), False
        raw = encode(self._marks.index(self._frames))
        with contextlib.suppress(RecordingFailed):  # every message is there already
            self._put(self._block(raw, 0, INDEX) + FOOT.pack(begin, FOOT_MAGIC))

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
