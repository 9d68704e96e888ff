"""The text of a line of the user's source, read where the training runs: only there is it the right file.

Called for a census, a checkpoint's report and an out-of-memory, which are rare; never in a step that only measures.

Model. A file is read at most once in a process's life, and only if it is a regular file with an absolute path that was
not changed since the process began: the text might be another than the code that runs. A notebook's cells are no files;
IPython keeps their text in `linecache`, which is looked at and not changed. `linecache` itself would read a file of any
size, and keep it in a cache that the user's tracebacks use.
Cost. For the first line of a file: to open, read and decode it, 1 to 2 ms for 33 KB on a busy machine, and on a network
file system what that takes to answer: the training waits. For another line 30 µs; for a line asked for before, 3 µs.
All files together keep up to `BYTES_MAX` characters in memory; a file that does not fit into what is left is not read.
Known limitations. None (unknown) instead of the text: code that was written after the process began, as by a program
that makes a module, or in an editor while a notebook runs; a relative path; a package in a zip file. The other way
round, a forked process began when it was forked, and a file server's clock may be late: then a line of a changed file
can be taken for the one that runs.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import stat
import time
from collections.abc import Sequence
from typing import Any

from gpumon_agent import endpoint, wire
from gpumon_agent.frames import Place
from gpumon_agent.guard import pass_on
from gpumon_agent.registry import REGISTRY
from gpumon_agent.wire.masking import masked_code

BYTES_MAX = 1 << 20
"""Some 25,000 lines: a script and its modules. A larger file is data or made by a program."""


def text(place: Place | None) -> str | None:
    """The line without its indentation, with secrets hidden; None if it is unknown."""
    if place is None:
        return None
    known = REGISTRY.source_texts
    if place not in known:
        known[place] = _shown(_line(place))
    found: str | None = known[place]
    return found


def _shown(line: str) -> str | None:
    return wire.clean(masked_code(line.strip().expandtabs(1)), wire.CODE_CHARS_MAX) or None


def _line(place: Place) -> str:
    lines = _cell(place.path) or _of_file(place.path)
    return lines[place.line - 1] if 0 < place.line <= len(lines) else ""


def _cell(path: str) -> Sequence[str]:
    """Of code that was typed in: its entry has no time of a file."""
    entry: Any = linecache.cache.get(path)
    typed = entry is not None and len(entry) == 4 and entry[1] is None
    lines: Sequence[str] = entry[2] if typed else ()
    return lines


def _of_file(path: str) -> Sequence[str]:
    known = REGISTRY.source_files
    if path not in known:
        known[path] = _read(path, BYTES_MAX - sum(len(line) + 1 for lines in known.values() for line in lines))
    lines: Sequence[str] = known[path]
    return lines


def _read(path: str, most: int) -> Sequence[str]:
    """Its lines, numbered as Python does; none if it may not be read, or is no source."""
    if not path.startswith("/"):
        return ()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size > most or status.st_mtime > _began():
                return ()
            data = file.read(most + 1)
        if len(data) > most or b"\0" in data:
            return ()
        return importlib.util.decode_source(data).split("\n")
    except (OSError, ValueError, SyntaxError) as error:  # ValueError: no path, or not its encoding
        pass_on(error)
        return ()


def _began() -> float:
    """Unix time by which this process had begun: its clock has ticks, and rounds down."""
    ticks, tick_s = endpoint.start_time(os.getpid()) or 0, 1 / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + (ticks + 1) * tick_s
