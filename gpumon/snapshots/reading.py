"""Reads a memory snapshot file, which is a pickle and may come from anyone. Nothing in it is executed.

A child process reads it, and sends back what was found as columns. Its unpickler finds no class and no function, so
that only lists, dicts, tuples, texts, bytes and numbers can come into being. Memory and processor time of the child
are limited by the file's size: a few bytes can demand any amount of either, and a deeply nested key ends the process.

Cost. 20 to 35 MB/s. 2.3 times the file's size of memory with stacks, 3.9 times without (docs/snapshots.md): 3.3 of
these are texts, tuples and emptied events, which Python's unpickler keeps until the end of the file.
"""

from __future__ import annotations

import io
import os
import pickle
import resource
import stat
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from gpumon.snapshots.event_lists import EventLists
from gpumon.snapshots.model import Device, Segment, Snapshot
from gpumon.snapshots.parsing import Malformed, Parser, text
from gpumon.snapshots.trace import Figures, Trace

MEMORY_BASE_BYTES, MEMORY_PER_BYTE = 1 << 27, 16
"""A snapshot needs 2.3 to 4 times its size, and up to 6 times if none of its lists of events is found."""
TIME_BASE_S, BYTES_PER_S = 5, 2 << 20
"""Processor time; files are read at ten times this rate on a slow core."""
READ_BYTES = 1 << 22
"""Events are taken after each. Less than the first thousand events with their stacks would leave out a device."""
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from gpumon.snapshots.reading import main; main()"
"""The child uses this process's sys.path, not the current directory."""
_NOT_ONE = "is not a memory snapshot"
_BROKEN = "its pickle is broken"
_TOO_MUCH = f"{_NOT_ONE}: reading it took more memory or time than any snapshot of its size"


class Unreadable(Exception):
    """One sentence: which file, and why it cannot be read."""


class _Columns(msgspec.Struct, frozen=True):
    """A device with its arrays as bytes."""

    index: int
    segments: tuple[Segment, ...]
    start: tuple[tuple[int, int], ...] | None  # None: no trace
    arrays: tuple[memoryview, ...]  # codes, ids, bytes, streams of the trace; lines, marks
    ends: dict[int, int]
    lost: int
    recorded: Figures | None


class _Answer(msgspec.Struct, frozen=True):
    """From the child: what was found, or why nothing was."""

    why: str | None = None
    devices: tuple[_Columns, ...] = ()
    lines: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    taken: tuple[int, str] | None = None


def read(path: Path) -> Snapshot:
    """Raises Unreadable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO would wait for its writer
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise Unreadable(f"{path} is not a regular file")
            head = os.pread(fd, 2, 0)
            if not head:
                raise Unreadable(f"{path} is empty")
            if head[0] != pickle.PROTO[0] or len(head) < 2:
                raise Unreadable(
                    f"{path} {_NOT_ONE}: torch.cuda.memory._dump_snapshot writes a pickle, and this is none"
                )
            command = [sys.executable, "-c", _CHILD, *sys.path]
            child = subprocess.run(command, stdin=file, capture_output=True, check=False)
    except OSError as error:
        raise Unreadable(f"{path}: {error.strerror}") from None
    if child.returncode > 0:
        why = child.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise Unreadable(f"{path}: the process that reads it failed ({why})")
    if child.returncode:
        raise Unreadable(f"{path} {_TOO_MUCH}")  # killed by a limit, or by what the pickle does to the interpreter
    answer = msgspec.msgpack.decode(child.stdout, type=_Answer)
    if answer.why is not None:
        raise Unreadable(f"{path} {answer.why}")
    devices = tuple(_device(each, answer.settings) for each in answer.devices)
    return Snapshot(devices, answer.lines, answer.marks, answer.settings, answer.taken)


def _device(each: _Columns, settings: dict[str, str]) -> Device:
    codes, ids, sizes, streams, lines, marks = (_array("q" if at else "B", b) for at, b in enumerate(each.arrays))
    trace = None
    if each.start is not None:
        trace = Trace(each.start, codes, ids, sizes, streams, settings, each.recorded)
    return Device(each.index, each.segments, trace, lines, marks, each.ends, each.lost)


def _array(typecode: str, content: memoryview) -> array[int]:
    made: array[int] = array(typecode)
    made.frombytes(content)
    return made


# ----------------------------------------------------------------------------------------------------------- the child


class _Executes(Exception):
    """The pickle asks for a class or a function."""


class _File(io.FileIO):
    """Takes the finished events at each read: the file's objects would need several times its size."""

    def __init__(self, fd: int, parser: Parser) -> None:
        super().__init__(fd)
        self._lists, self._parser = EventLists(), parser

    def readinto(self, buffer: Any) -> int | None:
        for events in self._lists.found():
            self._parser.take(events)
        return super().readinto(buffer)


class _Values(pickle.Unpickler):
    """Admits only what a pickle holds without a class: numbers, texts, bytes, None, and lists, tuples, dicts, sets."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise _Executes(text(" ".join(f"{module}.{name}".split())[:100]))

    def persistent_load(self, pid: Any) -> NoReturn:
        raise _Executes("an object outside of the file")


def main() -> None:
    """Reads the snapshot on stdin, and writes an _Answer to stdout."""
    size = os.fstat(0).st_size
    _limit(resource.RLIMIT_AS, MEMORY_BASE_BYTES + MEMORY_PER_BYTE * size)
    _limit(resource.RLIMIT_CPU, TIME_BASE_S + size // BYTES_PER_S)
    _limit(resource.RLIMIT_CORE, 0)
    try:
        said = msgspec.msgpack.encode(_answer(size))
    except MemoryError:
        said = msgspec.msgpack.encode(_Answer(_TOO_MUCH))
    sys.stdout.buffer.write(said)
    sys.stdout.flush()
    os._exit(0)  # without freeing millions of objects one by one


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, hard))


def _answer(size: int) -> _Answer:
    parser = Parser(size)
    try:
        found = parser.snapshot(_Values(io.BufferedReader(_File(0, parser), READ_BYTES)).load())
    except _Executes as error:
        return _Answer(
            f"asks to run {error}; a memory snapshot holds only numbers and texts, so nothing of it was read or run"
        )
    except EOFError:
        return _Answer("is cut off: its end is missing")
    except Malformed as error:
        return _Answer(f"{_NOT_ONE}: {error}")
    except pickle.UnpicklingError as error:
        return _Answer("is cut off: its end is missing" if "truncated" in str(error) else f"{_NOT_ONE}: {_BROKEN}")
    except (AttributeError, ImportError, IndexError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return _Answer(f"{_NOT_ONE}: {_BROKEN}")  # what pickle raises for opcodes in the wrong place
    return _Answer(
        None, tuple(map(_columns, found.devices)), found.lines, found.marks, dict(found.settings), found.taken
    )


def _columns(device: Device) -> _Columns:
    trace = device.trace
    events = (trace.codes, trace.ids, trace.bytes, trace.streams) if trace is not None else (array("q"),) * 4
    arrays = tuple(memoryview(each).cast("B") for each in (*events, device.lines, device.marks))
    start, recorded = (trace.start, trace.recorded) if trace is not None else (None, None)
    return _Columns(device.index, device.segments, start, arrays, dict(device.ends), device.lost, recorded)
