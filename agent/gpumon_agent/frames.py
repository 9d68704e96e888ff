"""Reads the variables of running functions without changing anything. No other module reads a frame's `f_locals`.

Before Python 3.13 a frame has one dict for `f_locals`, and `locals()`, `vars()` and a callee's `f_back.f_locals` return
that same dict. Reading it rewrites it: a key that the program popped comes back, a value that it set is lost. With a
debugger's trace function it is even written back into the variables. So the dict is never read here:

- Python 3.13 and newer: `f_locals` is a view, and is read.
- Python 3.12: `PyFrame_GetVar` of the C API reads one variable.
- Python 3.10 and 3.11 have no such function. The variables are read where the interpreter stores them, in an array of
references. Both layouts are final: these versions get only security fixes. They are checked once, on a frame
with known variables; if the check fails, nothing is read.

The alternative "read the dict if it has no other references, then clear it" loses what `exec("x = 1")` put there for a
later `eval("x")`, keeps variables alive if the clearing is missed, and skips each frame that called `locals()`.

On 3.10 and 3.11 each variable is read, and its reference counted, in one C call that holds the GIL. On 3.10 the array
is part of the frame object, which the caller holds. On 3.11 the array moves when a function ends, perhaps in another
thread, so that call also reads the array's address again.

This module needs neither torch nor another package.
"""

from __future__ import annotations

import ctypes
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CellType, CodeType, FrameType
from typing import Any, NamedTuple

from gpumon_agent.guard import pass_on

_SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_WORD_BYTES = ctypes.sizeof(ctypes.c_size_t)
_FIRST = (
    44 if sys.version_info < (3, 11) else 9
)  # the array: words into 3.10's PyFrameObject, 3.11's _PyInterpreterFrame
_INNER = 3  # words into 3.11's PyFrameObject: a pointer to the _PyInterpreterFrame
_INNER_BYTES = _INNER * _WORD_BYTES
_References = ctypes.POINTER(ctypes.py_object)

CALL = ("self", "args", "kwargs")  # variables of `Module._call_impl`
FRAMES_MAX = 200  # read, outwards

_OURS = str(Path(__file__).parent)  # of the whole package
_INSTALLED = tuple(
    {path for name in ("stdlib", "platstdlib", "purelib", "platlib") if (path := sysconfig.get_paths().get(name))}
)


class Place(NamedTuple):
    """A line of code. Written as file.py:LINE; the path does not leave the process."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line}"


def variables(frame: FrameType) -> dict[str, Any]:
    """A function's variables that have a value, and its closure's. Empty for a module or a class body."""
    is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # others have a dict as namespace
    return _read(frame) if is_function else {}


def call_reader(code: CodeType) -> Callable[[FrameType], tuple[Any, Any, Any]] | None:
    """Reads `CALL` of a method's running frames, in 1 µs. None: in this Python it cannot.

    Raises if one of them has no value.
    """
    if sys.version_info >= (3, 13):

        def from_view(frame: FrameType) -> tuple[Any, Any, Any]:
            variables = frame.f_locals
            return variables["self"], variables["args"], variables["kwargs"]

        return from_view
    if sys.version_info >= (3, 12):
        get = _get_variable
        return lambda frame: (get(frame, "self"), get(frame, "args"), get(frame, "kwargs"))
    layout = call_layout(code)
    if layout is None:
        return None
    (first, second, third), _, start = layout
    first, second, third = first + start, second + start, third + start

    def from_cells(frame: FrameType) -> tuple[Any, Any, Any]:
        slots = _slots(frame)
        return slots[first].cell_contents, slots[second].cell_contents, slots[third].cell_contents

    return from_cells


def call_layout(code: CodeType) -> tuple[tuple[int, int, int], int, int] | None:
    """Where the frames of a method store the cells of `CALL`, for C: (their places in the array, words into the frame
    where the address of the array's owner is, or -1: the frame is the owner, words into that owner).

    (0, 0, 0), -1, -1: PyFrame_GetVar reads them (Python 3.12 and newer). None: they cannot be read.
    """
    if sys.version_info >= (3, 12):
        return (0, 0, 0), -1, -1
    if _read is _nothing or not set(CALL) <= set(code.co_cellvars):
        return None
    order = _names(code)[::-1]  # on 3.10 an argument used by a closure is listed again, where its cell is
    first, second, third = (len(order) - 1 - order.index(name) for name in CALL)
    return (first, second, third), -1 if sys.version_info < (3, 11) else _INNER, _FIRST


def users_line() -> Place | None:
    """Of the innermost frame of the user's code in this thread."""
    user = next((frame for frame in outwards(sys._getframe(1)) if not is_installed(frame.f_code.co_filename)), None)
    return None if user is None else place(user)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """This frame and its callers, without ours."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            return
        if not frame.f_code.co_filename.startswith(_OURS):
            yield frame
        frame = frame.f_back


def is_installed(path: str) -> bool:
    """Whether this file belongs to Python or to an installed package."""
    return path.startswith(("<frozen", *_INSTALLED)) or "site-packages" in path or "dist-packages" in path


def place(frame: FrameType) -> Place:
    return Place(frame.f_code.co_filename, frame.f_lineno or 0)  # None in code without line numbers


# ------------------------------------------------------------------------------------------------- one way a version


def _names(code: CodeType) -> tuple[str, ...]:
    """In the order of the interpreter's array. Since 3.11 an argument used by a closure keeps its place."""
    cells = code.co_cellvars
    if cells and sys.version_info >= (3, 11):
        cells = tuple(name for name in cells if name not in code.co_varnames)
    return (*code.co_varnames, *cells, *code.co_freevars)


def _from_view(frame: FrameType) -> dict[str, Any]:
    if _CLOSED_ARE_FREED and frame.f_code.co_flags & _SUSPENDED and not _runs_here(frame):
        return {}
    return dict(frame.f_locals)  # in one call: nothing can end meanwhile


_CLOSED_ARE_FREED = (3, 13) <= sys.version_info < (3, 13, 6)
"""These free a generator's variables with the generator, even if a traceback still holds the frame. Reading such a
frame crashes (python/cpython#125723)."""


def _runs_here(frame: FrameType) -> bool:
    above: FrameType | None = sys._getframe(1)
    while above is not None and above is not frame:
        above = above.f_back
    return above is not None


def _by_api(frame: FrameType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _names(frame.f_code):
        try:
            found[name] = _get_variable(frame, name)
        except NameError as error:  # it has no value
            pass_on(error)
            continue
    return found


def _from_array(frame: FrameType) -> dict[str, Any]:
    found: dict[str, Any] = {}
    code = frame.f_code
    cells = code.co_cellvars + code.co_freevars
    slots = _slots(frame)
    for at, name in enumerate(_names(code), _FIRST):
        try:
            value = slots[at]  # this one call reads the pointer, the reference, and counts the reference
            if type(value) is CellType and name in cells:
                value = value.cell_contents
        except ValueError as error:  # it has no value
            pass_on(error)
            continue
        found[name] = value
    return found


if sys.version_info >= (3, 11):

    def _slots(frame: FrameType) -> Any:
        return _References.from_address(id(frame) + _INNER_BYTES)

else:

    def _slots(frame: FrameType) -> Any:
        address = ctypes.c_size_t(id(frame))
        return _References.from_buffer(address)


def _nothing(frame: FrameType) -> dict[str, Any]:
    return {}


def _array_is_known() -> bool:
    """Whether the array of 3.10 or 3.11 is where expected, in a frame with known variables.

    It is compared as numbers; no word is used as an address before the words in front of it are checked.
    """
    if sys.implementation.name != "cpython" or ctypes.sizeof(ctypes.c_void_p) != _WORD_BYTES:
        return False

    def known(argument: object, celled: object) -> bool:
        local = object()
        deleted = local
        del deleted
        frame = sys._getframe()
        try:
            code = frame.f_code

            def words(address: int, count: int) -> list[int]:
                return list((ctypes.c_size_t * count).from_address(address))

            cell = known_cell(lambda: celled)
            if words(id(frame), 2)[1] != id(FrameType):  # a build with reference tracing has extra words in front
                return False
            expected = {
                "argument": id(argument),
                "local": id(local),
                "deleted": 0,
                "code": id(code),
                "words": id(words),
            }
            if sys.version_info < (3, 11):
                start = id(frame)
                if words(start, 7)[4] != id(code) or words(start, 7)[6] != id(frame.f_globals):
                    return False
            else:
                start = words(id(frame), _INNER + 1)[_INNER]
                if start == 0 or words(start, 6)[4:] != [id(code), id(frame)]:
                    return False
            names = _names(code)
            slots = dict(zip(names, words(start + _FIRST * _WORD_BYTES, len(names)), strict=True))
            return {name: slots[name] for name in expected} == expected and slots["celled"] == id(cell)
        finally:
            del frame  # it refers to itself, and through its callers to the model

    def known_cell(function: Callable[[], object]) -> object:
        cell: object = function.__closure__[0]  # type: ignore[index]
        return cell

    return known(object(), object())


_read: Callable[[FrameType], dict[str, Any]]
_get_variable: Callable[[FrameType, str], Any]
if sys.version_info >= (3, 13):
    _read = _from_view
elif sys.version_info >= (3, 12):
    _get_variable = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.py_object)(
        ("PyFrame_GetVar", ctypes.pythonapi)
    )
    _read = _by_api
else:
    _read = _from_array if _array_is_known() else _nothing
