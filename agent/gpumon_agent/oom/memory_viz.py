"""Writes a snapshot file for PyTorch's memory_viz page, as `torch.cuda.memory._dump_snapshot` does, in slices.

The file of an out-of-memory is beside its report (folder and permissions: see report_file). One that a viewer requests
is in `gpumon/snapshots` of the user's state directory, which a logout does not empty (`endpoint.open_kept`); if nothing
can be written there, it is beside the reports too, and `why` says so. In each folder the newest `FILES_MAX` of all
processes are kept, at most `BYTES_MAX`. Nothing is unpickled. The pickle is joined from small ones (protocol 2, which
every reader of the format knows), because pickling a large allocator at once would hold the GIL all that time.
"""

from __future__ import annotations

import os
import pickle
import re
import time
from collections.abc import Iterator
from typing import IO, Any

from gpumon_agent import endpoint
from gpumon_agent.guard import pass_on, tolerate
from gpumon_agent.oom import report_file

FILES_MAX = 8
BYTES_MAX = 256 * 2**20
"""Of a folder's files together; the newest is kept whatever its size."""
ABANDONED_S = 3600.0
"""Age of a half-written file whose writer was killed."""
BATCH = 100  # blocks per pickle: with fewer than 256 memo entries no rarer opcodes are needed
_NAME = re.compile(r"snapshot-\d{13}-\d+\.pickle")


def pieces(segments: list[dict[str, Any]], rest: dict[str, Any]) -> Iterator[bytes]:
    """{"segments": segments, **rest} as a pickle. Empties `segments`."""
    yield b"\x80\x02}("  # protocol 2, an empty dict, MARK
    yield _value("segments") + b"]"
    segments.reverse()
    while segments:
        segment = segments.pop()
        blocks = segment.pop("blocks")
        yield b"(}(" + b"".join(_value(each) for item in segment.items() for each in item) + _value("blocks") + b"]"
        for at in range(0, len(blocks), BATCH):
            yield pickle.dumps(blocks[at : at + BATCH], 2)[5:-1]  # strip head and empty list: they go into our list
        yield b"ue"  # SETITEMS, APPENDS
    for key, value in rest.items():
        yield _value(key) + _value(value)
    yield b"u."


def moment(step: int, phase: str) -> dict[str, Any]:
    """What a snapshot of gpumon's has besides torch's keys, which other readers ignore: when it was taken."""
    return {"gpumon": {"step": step, "phase": phase}}


def _value(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


class SnapshotWriter:
    """Writes one file: `add` its pieces, then `end` it. Sets `path` and `size`, or `why` not.

    `keep`: where a logout does not remove it. If that cannot be used, `why` is set beside `path`.
    """

    def __init__(self, box: report_file.ReportFile, *, keep: bool = False) -> None:
        self.path: str | None = None
        self.size = 0
        self.why: str | None = None
        self._name = f"snapshot-{time.time_ns() // 1_000_000:013d}-{os.getpid()}.pickle"
        self._file: IO[bytes] | None = None
        refused = ""
        for kept in (True, False) if keep else (False,):
            try:
                self._place, self._fd = box.kept("snapshots") if kept else box.directory()
            except (OSError, endpoint.Unavailable) as reason:
                pass_on(reason)
                refused = refused or str(reason)
                self.why = f"no snapshot on disk: {refused}"
                continue
            try:
                self._file = self._draft()
            except OSError as reason:
                os.close(self._fd)
                pass_on(reason)
                refused = refused or f"{self._place}: {reason.strerror}"
                self._failed(reason)
                continue
            self.why = f"it may be gone after you log out, because {refused}" if refused else None
            return

    def _draft(self) -> IO[bytes]:
        out = os.open(f".{self._name}", report_file.OPEN_NEW, 0o600, dir_fd=self._fd)
        os.fchmod(out, 0o600)  # regardless of the umask
        return os.fdopen(out, "wb")

    def add(self, piece: bytes) -> None:
        if self._file is not None:
            try:
                self.size += self._file.write(piece)
            except OSError as reason:
                self._give_up(reason)
                pass_on(reason)

    def end(self) -> None:
        if self._file is None:
            return
        try:
            self._file.close()
            os.rename(f".{self._name}", self._name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            self.path = str(self._place / self._name)
            _tidy(self._fd)
            self._file = None
            os.close(self._fd)
        except OSError as reason:
            self._give_up(reason)
            pass_on(reason)

    def abandon(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            with tolerate(OSError):
                file.close()
            with tolerate(OSError):
                os.unlink(f".{self._name}", dir_fd=self._fd)
            os.close(self._fd)

    def _give_up(self, reason: OSError) -> None:
        self.path = None
        self._failed(reason)
        self.abandon()

    def _failed(self, reason: OSError) -> None:
        self.why = f"no snapshot in {self._place}: {reason.strerror}"


def _tidy(fd: int) -> None:
    """Removes the oldest files that match `_NAME`, and abandoned drafts of them; no others."""
    left = BYTES_MAX
    listed = os.listdir(fd)
    for at, name in enumerate(sorted((name for name in listed if _NAME.fullmatch(name)), reverse=True)):
        with tolerate(OSError):
            left -= os.stat(name, dir_fd=fd, follow_symlinks=False).st_size
            if at >= FILES_MAX or (at and left < 0):
                os.unlink(name, dir_fd=fd)
    for name in listed:
        if name.startswith(".") and _NAME.fullmatch(name[1:]):
            with tolerate(OSError):
                if time.time() - os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime > ABANDONED_S:
                    os.unlink(name, dir_fd=fd)
