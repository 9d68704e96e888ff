"""Contains the agent's failures and lets the user's exceptions pass: the only place that catches every exception.

Two kinds of exception are raised in our code. Ours are caught, counted and reported; training is not affected. The
user's pass, with the traceback of an unwatched run: from a signal handler (Python runs it in whatever code is running),
KeyboardInterrupt, and from a time limit that uses PyThreadState_SetAsyncExc.
"""

from __future__ import annotations

import functools
import gc
import opcode
import signal
import sys
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from gpumon_agent.unseen import unseen

FAILURES_MAX = 5  # then the failing part is switched off for the rest of the run

P = ParamSpec("P")
R = TypeVar("R")

_FOLDER = (lambda: None).__code__.co_filename.removesuffix("guard.py")
_RAISE = opcode.opmap["RAISE_VARARGS"]
_WITHOUT_ARGUMENTS = (StopIteration, MemoryError, AssertionError)  # raised without arguments by the interpreter itself
_LIBRARIES = {*sys.stdlib_module_names, "gpumon_agent", "torch", "zmq", "msgspec"}  # whose exceptions our calls raise


class Off(NamedTuple):
    part: str
    error: str  # of its last failure
    where: str  # file.py:LINE in the agent
    t_ns: int


class Guard:
    """Wraps the agent's entry points. Counts a part's failures, prints the first, and after a few switches it off."""

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self.off: dict[str, Off] = {}
        self._tell: Callable[[str], None] | None = None
        self._untold: list[str] = []  # at most two for each part

    def listen(self, tell: Callable[[str], None]) -> None:
        """Calls `tell` with each notice from now on, and with earlier ones not passed on yet."""
        self._tell = tell
        while self._untold:
            tell(self._untold.pop(0))

    def forget(self, tell: Callable[[str], None]) -> None:
        """The opposite of `listen`."""
        if self._tell == tell:
            self._tell = None

    def protect(self, part: str, function: Callable[P, R], *, stays_on: bool = False) -> Callable[P, R | None]:
        """`function`, returning None when it fails. `part` names it in the message and the count.

        `stays_on`: it is never switched off; only the calls that fail are lost.
        """
        off, caught, reads_unseen = self.off, self._caught, unseen()

        def protected(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if part in off:
                return None
            try:
                try:
                    with reads_unseen():
                        return function(*args, **kwargs)
                except Exception as error:  # the only place that may
                    if is_the_users(error):
                        raise
                    caught(part, error, stays_on)
                    return None
            except BaseException as error:
                _cut(error)
                raise

        return tries_at_once(protected)

    def takes(self, part: str, error: BaseException) -> bool:
        """Whether `error` is ours: then it is counted and reported, and the caller goes on without that part."""
        if is_the_users(error):
            return False
        assert isinstance(error, Exception)
        self._caught(part, error, stays_on=False)
        return True

    def _caught(self, part: str, error: Exception, stays_on: bool) -> None:
        count = self.failures[part] = self.failures.get(part, 0) + 1
        text = f"{part}: {error_line(error)}"
        switches_off = count == FAILURES_MAX and not stays_on
        if switches_off:
            self.off[part] = Off(part, error_line(error), _where(error), time.monotonic_ns())
            text += f"; switched off after {count} failures"
        if count == 1 or switches_off:
            (self._tell or self._untold.append)(text)
        if count == 1:
            say(f"{text} (training is not affected)")


guard = Guard()
"""This process's guard, used by every part of the agent."""
protect = guard.protect


def say(text: str) -> None:
    """Prints a line in the training's terminal; nothing if stderr is closed, or its replacement raises."""
    try:
        sys.stderr.write(f"gpumon: {text}\n")
    except Exception as error:  # stderr may have been replaced by anything
        if is_the_users(error):
            raise


def error_line(error: BaseException) -> str:
    """Class and message in one line."""
    try:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    except Exception as other:  # an exception whose own __str__ raises
        if is_the_users(other):
            raise
        return type(error).__name__


def leave_no_frame(error: BaseException, *, called_nothing: bool = False) -> None:
    """Removes our frames from the traceback; a bare `raise` after it adds none.

    So the user's traceback is that of the unwatched script, printed or formatted. `called_nothing` of the user: if a
    signal handler raised, frames that our code called are removed too.
    """
    if called_nothing and (handler := _handler(error)) is not None:
        set_traceback(error, handler)
        return
    kept = [entry for entry in _entries(error.__traceback__) if not _is_ours(entry.tb_frame.f_code)]
    for entry, following in zip_longest(kept, kept[1:]):
        if entry.tb_next is not following:
            entry.tb_next = following
    set_traceback(error, kept[0] if kept else None)


def tries_at_once(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose body is one `try`, with that `try` active from its first instruction on.

    Since Python 3.11 a signal handler may run when a function begins, before its `try`: its exception would carry a
    frame of ours.
    """
    if isinstance(function, FunctionType):
        function.__code__ = _tries_at_once(function.__code__)
    return function


@functools.cache
def _tries_at_once(code: CodeType) -> CodeType:
    if sys.version_info < (3, 11) or sys.version_info >= (3, 15):  # a later version may change the table's format
        return code
    table = code.co_exceptiontable  # start, size, target, depth; and so on (InternalDocs/exception_handling.md)
    start, at = _number(table, 0)
    size, at = _number(table, at)
    first = code.co_code[::2].index(opcode.opmap["RESUME"])
    head = bytearray(_bytes_of(first) + _bytes_of(size + start - first))
    head[0] |= 0x80
    return code.replace(co_exceptiontable=bytes(head) + table[at:])


def _number(table: bytes, at: int) -> tuple[int, int]:
    """(number, next position) in the table: six bits a byte, 0x40 set in all but the last."""
    number = table[at] & 0x3F
    while table[at] & 0x40:
        at += 1
        number = number << 6 | table[at] & 0x3F
    return number, at + 1


def _bytes_of(number: int) -> bytes:
    last = bytes([number & 0x3F])
    return last if number < 0x40 else bytes([byte | 0x40 for byte in _bytes_of(number >> 6)]) + last


def is_the_users(error: BaseException) -> bool:
    """Whether `error`, raised in our code, came from outside: from a signal handler, or asynchronously."""
    return not isinstance(error, Exception) or _handler(error) is not None or _is_asynchronous(error)


def pass_on(error: Exception) -> None:
    """For narrower `except`s in the user's threads: a handler's TimeoutError is an OSError."""
    try:
        is_theirs = is_the_users(error)
    except (MemoryError, SystemError):  # no memory to look: the second is what CPython raises if it is for a frame
        if not isinstance(error, (MemoryError, OSError, SystemError)):
            raise error from None
        return
    if is_theirs:
        raise error


class tolerate:
    """`contextlib.suppress` for code in the user's threads: the user's exceptions pass."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        return isinstance(error, self._kinds) and not is_the_users(error)


def _handler(error: BaseException) -> TracebackType | None:
    """Where the traceback enters the signal handler that raised `error`.

    A handler is a function known to signal.getsignal(), or called with the frame it interrupts: a handler may have
    replaced itself.
    """
    handlers: set[CodeType] | None = None
    caller: FrameType | None = None
    for entry in _entries(error.__traceback__):
        frame = entry.tb_frame
        if caller is not None and not _is_ours(frame.f_code):
            handlers = _handlers() if handlers is None else handlers
            refers = sum(each is caller for each in gc.get_referents(frame))  # f_locals would change the user's dict
            if frame.f_code in handlers or refers > (frame.f_back is caller):
                return entry
        caller = frame
    return None


def _handlers() -> set[CodeType]:
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if not isinstance(handler, (FunctionType, MethodType)):
            handler = type(handler).__call__ if callable(handler) else None
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            codes.add(code)
    return codes


def _is_asynchronous(error: Exception) -> bool:
    """Whether PyThreadState_SetAsyncExc raised it: the last frame does not `raise`, and nothing our code calls raises
    this class, or one without arguments."""
    *_, last = _entries(error.__traceback__)
    if last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE or isinstance(error, _WITHOUT_ARGUMENTS):
        return False
    return not error.args or type(error).__module__.partition(".")[0] not in _LIBRARIES


def _cut(error: BaseException) -> None:
    """Called by `protected` when `error` leaves it: keeps only a signal handler's part of the traceback, and removes
    exceptions of ours that were being handled from its context.

    If there is an outer `protected`, that one does it, since it has to find the handler too.
    """
    protected = sys._getframe(1)
    outer = set(_callers(protected.f_back))
    if any(frame.f_code is protected.f_code for frame in outer):
        return
    set_traceback(error, _handler(error))
    each: BaseException = error
    while (context := each.__context__) is not None:
        if context.__traceback__ is not None and context.__traceback__.tb_frame not in outer:
            each.__context__ = context.__context__
        else:
            each = context


def set_traceback(error: BaseException, traceback: TracebackType | None) -> None:
    """Sets the traceback that a bare `raise` in the running handler, or in its caller, uses."""
    error.__traceback__ = traceback
    if sys.version_info < (3, 11):  # there a bare `raise` uses the handler's traceback, not the exception's
        import ctypes

        state = (type(error), error, traceback)
        for each in state:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # the call steals the references
        ctypes.pythonapi.PyErr_SetExcInfo(*map(ctypes.py_object, state))


def _entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_FOLDER)


def _where(error: Exception) -> str:
    ours = [entry for entry in _entries(error.__traceback__) if _is_ours(entry.tb_frame.f_code)]
    return f"{ours[-1].tb_frame.f_code.co_filename.removeprefix(_FOLDER)}:{ours[-1].tb_lineno}" if ours else ""
