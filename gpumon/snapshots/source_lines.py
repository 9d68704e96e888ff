"""Which line of a program allocated a block: one frame of the stack that torch recorded.

Rule. The innermost Python frame that is neither torch's, nor an installed package's, nor the standard library's. Else,
for autograd's threads, which have no Python frames: the function whose backward allocated ("AddmmBackward0"), or the
operator ("sum_dim_IntList"). Else the innermost Python frame, and else the innermost frame that is not the unwinder's.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from gpumon.snapshots.model import UNKNOWN

TEXT_CHARS_MAX = 500

_INSTALLED = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python3[.\d]*/"
    r"|/torch/(nn|optim|autograd|utils|cuda|distributed|amp|fx|func|_\w+)[/.]"  # torch, built where it was checked out
    r"|/c[a-z2-7]{51}\.py$"  # torch.compile's output, named by its hash
    r"|^<(frozen |eval_with_key|__array_function__)"
)
_NATIVE = ((re.compile(r"::(\w+)::apply\("), "backward"), (re.compile(r"at::_ops::(\w+)::call\("), "operator"))
_UNWINDER = ("??", "torch::unwind::unwind", "torch::CapturedTraceback::gather")
_USERS, _PYTHON, _OTHER, _NONE = range(4)


class NotFrames(Exception):
    """What should be a stack is something else."""


class _Line(NamedTuple):
    """What a stack is replaced by. No file can hold one, because its unpickler finds no class."""

    text: str
    native: bool


class Lines:
    """The lines found so far, each with a number. A stack that was read keeps its line in place of its frames: a stack
    takes several times the memory that it takes in a file. An event that shares it finds the line.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._found: dict[_Line, list[_Line]] = {}
        self._ranks: dict[int, int] = {}  # by identity
        self._ranked: list[Any] = []  # these frames: kept, so that no other gets their identity
        self.native: set[int] = set()
        """the lines of stacks without a Python frame: allocated by a thread of autograd's"""

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    def of(self, frames: Any) -> int:
        """The number of the line, UNKNOWN if there is no frame. Raises NotFrames."""
        if type(frames) is not list:
            raise NotFrames
        if not frames:
            return UNKNOWN
        if type(frames[0]) is not _Line:
            line = self._line(frames)
            frames[:] = self._found.setdefault(line, [line])
        text, native = frames[0]
        number = self._numbers.setdefault(text, len(self._numbers))
        if native:
            self.native.add(number)
        return number

    def _line(self, frames: list[Any]) -> _Line:
        ranks, python, other = self._ranks, None, None
        for frame in frames:
            rank = ranks.get(id(frame))
            if rank is None:
                rank = ranks[id(frame)] = _rank(frame)
                self._ranked.append(frame)
            if rank == _USERS:
                return _Line(_text(frame), False)
            if rank == _PYTHON:
                python = python or frame
            elif rank == _OTHER:
                other = other or frame
        if python is None:
            for names, kind in _NATIVE:
                for frame in frames:
                    if found := names.search(frame["name"]):
                        return _Line(f"{found[1]} ({kind})", True)
        return _Line(_text(python or other or frames[0]), False)


def _rank(frame: Any) -> int:
    if type(frame) is not dict:
        raise NotFrames
    file, name, line = frame.get("filename"), frame.get("name"), frame.get("line")
    if type(file) is not str or type(name) is not str or type(line) is not int:
        raise NotFrames
    if not file.endswith(".py") and not file.startswith("<"):
        return _NONE if name.startswith(_UNWINDER) else _OTHER
    return _PYTHON if _INSTALLED.search(file) else _USERS


def _text(frame: dict[str, Any]) -> str:
    file, name = frame["filename"], frame["name"]
    if file.endswith(".so") or not file:  # torch writes an address as the line
        return str(name)[:TEXT_CHARS_MAX]
    return f"{file}:{frame['line']} {name}"[-TEXT_CHARS_MAX:]
