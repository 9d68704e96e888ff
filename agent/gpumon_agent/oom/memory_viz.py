"""Writes a snapshot file for PyTorch's memory_viz page, as `torch.cuda.memory._dump_snapshot` does, in slices.

The files are beside the out-of-memory reports (folder and permissions: see report_file); the newest `FILES_MAX` of all
processes are kept. Nothing is unpickled. The pickle is joined from small ones (protocol 2, which every reader of the
format knows), because pickling a large allocator at once would hold the GIL all that time.
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


def _value(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


class SnapshotWriter:
    """Writes one file: `add` its pieces, then `end` it. Sets `path` and `size`, or `why` not."""

    def __init__(self, box: report_file.ReportFile) -> None:
        self.path: str | None = None
        self.size = 0
        self.why: str | None = None
        self._name = f"snapshot-{time.time_ns() // 1_000_000:013d}-{os.getpid()}.pickle"
        self._file: IO[bytes] | None = None
        try:
            self._place, self._fd = box.directory()
        except (OSError, endpoint.Unavailable) as reason:
            pass_on(reason)
            self.why = f"no snapshot on disk: {reason}"
            return
        try:
            self._file = os.fdopen(os.open(f".{self._name}", report_file.OPEN_NEW, 0o600, dir_fd=self._fd), "wb")
        except OSError as reason:
            os.close(self._fd)
            pass_on(reason)
            self._failed(reason)

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
    """Removes only files that match `_NAME`."""
    names = sorted(name for name in os.listdir(fd) if _NAME.fullmatch(name))
    for name in names[:-FILES_MAX]:
        with tolerate(OSError):
            os.unlink(name, dir_fd=fd)
