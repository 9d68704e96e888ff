"""A file that PyTorch's memory_viz page opens: what `torch.cuda.memory._dump_snapshot` writes, written in slices.

Where reports of an out-of-memory stand (blackbox.py: folder, permissions), at most `FILES_MAX` of all processes
together, the newest stay. Nothing here unpickles. The pickle is put together from small ones (protocol 2, which every
reader of the format knows), because one call for a large allocator would hold the interpreter's lock for its length.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import time
from collections.abc import Iterator
from typing import Any

from gpumon_agent.oom import blackbox
from gpumon_agent.viewers import endpoint

FILES_MAX = 8
BATCH = 100  # blocks pickled in one piece: below 256 memo entries no reader needs the rarer opcodes
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
            yield pickle.dumps(blocks[at : at + BATCH], 2)[5:-1]  # without its head and its empty list: they join ours
        yield b"ue"  # SETITEMS, APPENDS
    for key, value in rest.items():
        yield _value(key) + _value(value)
    yield b"u."


def _value(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


class Written:
    """One file on its way: iterate to write it, a slice a turn; then `path` and `size`, or `why` not."""

    def __init__(self, box: blackbox.BlackBox) -> None:
        self.path: str | None = None
        self.size = 0
        self.why: str | None = None
        self._box = box

    def write(self, segments: list[dict[str, Any]], rest: dict[str, Any]) -> Iterator[None]:
        name = f"snapshot-{time.time_ns() // 1_000_000:013d}-{os.getpid()}.pickle"
        draft = f".{name}"
        try:
            place, fd = self._box.directory()
        except (OSError, endpoint.Unavailable) as reason:
            self.why = f"no snapshot on disk: {reason}"
            return
        try:
            with os.fdopen(os.open(draft, blackbox.OPEN_NEW, 0o600, dir_fd=fd), "wb") as file:
                for piece in pieces(segments, rest):
                    self.size += file.write(piece)
                    yield
            os.rename(draft, name, src_dir_fd=fd, dst_dir_fd=fd)
            self.path = str(place / name)
            _tidy(fd)
        except OSError as reason:
            self.why = f"no snapshot in {place}: {reason.strerror}"
        finally:
            if self.path is None:
                with contextlib.suppress(OSError):
                    os.unlink(draft, dir_fd=fd)
            os.close(fd)


def _tidy(fd: int) -> None:
    """Only files of this module's own naming are ever removed."""
    names = sorted(name for name in os.listdir(fd) if _NAME.fullmatch(name))
    for name in names[:-FILES_MAX]:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=fd)
