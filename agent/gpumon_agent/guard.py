"""The agent's failures stay inside, and the user's exceptions get out: the one place that catches every exception.

Two kinds of exception are raised in our code. Ours are caught, counted and reported: training is not affected. The
user's pass: what a signal handler raises (Python runs it in whatever code is running), KeyboardInterrupt, and what a
time limit raises in a thread with PyThreadState_SetAsyncExc. They pass with the traceback of an unwatched run.
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

FAILURES_MAX = 5  # then the part that fails is switched off for the rest of the run

P = ParamSpec("P")
R = TypeVar("R")

_FOLDER = (lambda: None).__code__.co_filename.removesuffix("guard.py")
_RAISE = opcode.opmap["RAISE_VARARGS"]
_WITHOUT_ARGUMENTS = (StopIteration, MemoryError, AssertionError)  # what the interpreter itself raises so
_LIBRARIES = {*sys.stdlib_module_names, "gpumon_agent", "torch", "zmq", "msgspec"}  # whose exceptions our calls raise


class Off(NamedTuple):
    """A part of the agent that is switched off."""

    part: str
    error: str  # of its last failure
    where: str  # file.py:LINE in the agent
    t_ns: int


class Guard:
    """Wraps the agent's entry points. A failure is printed once on stderr, counted, and after a few the part is off."""

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self.off: dict[str, Off] = {}
        self._tell: Callable[[str], None] | None = None
        self._untold: list[str] = []  # at most two for each part

    def listen(self, tell: Callable[[str], None]) -> None:
        """`tell` is called with each notice from now on, and with those that nobody has heard yet."""
        self._tell = tell
        while self._untold:
            tell(self._untold.pop(0))

    def forget(self, tell: Callable[[str], None]) -> None:
        """The opposite of `listen`."""
        if self._tell == tell:
            self._tell = None

    def protect(self, part: str, function: Callable[P, R], *, stays_on: bool = False) -> Callable[P, R | None]:
        """`function` that returns None where it would have failed. `part` names it in the message and the count.

        One that `stays_on` may fail as often as it likes: what it fails at is lost, and nothing else.
        """
        off, caught, reads_unseen = self.off, self._caught, unseen()

        def protected(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if part in off:
                return None
            try:
                try:
                    with reads_unseen():
                        return function(*args, **kwargs)
                except Exception as error:  # the one place that may
                    if is_the_users(error):
                        raise
                    caught(part, error, stays_on)
                    return None
            except BaseException as error:
                _cut(error)
                raise

        return tries_at_once(protected)

    def _caught(self, part: str, error: Exception, stays_on: bool) -> None:
        count = self.failures[part] = self.failures.get(part, 0) + 1
        text = f"{part}: {told(error)}"
        switches_off = count == FAILURES_MAX and not stays_on
        if switches_off:
            self.off[part] = Off(part, told(error), _where(error), time.monotonic_ns())
            text += f"; switched off after {count} failures"
        if count == 1 or switches_off:
            (self._tell or self._untold.append)(text)
        if count == 1:
            say(f"{text} (training is not affected)")


guard = Guard()
"""This process's: every part of the agent is guarded by it."""
protect = guard.protect


def say(text: str) -> None:
    """One line in the training's terminal; nothing where stderr is closed, or its replacement raises."""
    try:
        sys.stderr.write(f"gpumon: {text}\n")
    except Exception as error:  # a training may have replaced it by anything
        if is_the_users(error):
            raise


def told(error: BaseException) -> str:
    """Its class and message in one line."""
    try:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    except Exception as other:  # an exception whose own __str__ raises
        if is_the_users(other):
            raise
        return type(error).__name__


def leave_no_frame(error: BaseException, *, called_nothing: bool = False) -> None:
    """Takes our frames out of the traceback; a bare `raise` that follows adds none.

    So the user's traceback is the one of the unwatched script, printed or formatted. `called_nothing` of the user's:
    then, where a signal handler raised, what our code called itself goes too.
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
    """`function`, whose body is one `try`, with that `try` in force from its first instruction on.

    From Python 3.11 on a signal handler may run as a function begins, before its `try`: its exception would leave with
    a frame of ours.
    """
    if isinstance(function, FunctionType):
        function.__code__ = _tries_at_once(function.__code__)
    return function


@functools.cache
def _tries_at_once(code: CodeType) -> CodeType:
    if sys.version_info < (3, 11) or sys.version_info >= (3, 15):  # a later version may write the table in another way
        return code
    table = code.co_exceptiontable  # start, size, target, depth; and so on (InternalDocs/exception_handling.md)
    start, at = _number(table, 0)
    size, at = _number(table, at)
    first = code.co_code[::2].index(opcode.opmap["RESUME"])
    head = bytearray(_bytes_of(first) + _bytes_of(size + start - first))
    head[0] |= 0x80
    return code.replace(co_exceptiontable=bytes(head) + table[at:])


def _number(table: bytes, at: int) -> tuple[int, int]:
    """A number in the table and where the next one begins: six bits a byte, 0x40 in each but the last."""
    number = table[at] & 0x3F
    while table[at] & 0x40:
        at += 1
        number = number << 6 | table[at] & 0x3F
    return number, at + 1


def _bytes_of(number: int) -> bytes:
    last = bytes([number & 0x3F])
    return last if number < 0x40 else bytes([byte | 0x40 for byte in _bytes_of(number >> 6)]) + last


def is_the_users(error: BaseException) -> bool:
    """Whether `error`, raised while our code ran, came from outside: from a signal handler, or asynchronously."""
    return not isinstance(error, Exception) or _handler(error) is not None or _is_asynchronous(error)


def pass_on(error: Exception) -> None:
    """For a narrower `except` in code that runs in the user's threads: a TimeoutError is an OSError."""
    if is_the_users(error):
        raise error


class tolerate:
    """`contextlib.suppress` for code that runs in the user's threads: what is the user's passes."""

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        return isinstance(error, self._kinds) and not is_the_users(error)


def _handler(error: BaseException) -> TracebackType | None:
    """Where the traceback enters the signal handler that raised `error`.

    That is a function that signal.getsignal() knows, or one that was called with the frame it interrupts: a handler
    may have replaced itself.
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
    """Whether PyThreadState_SetAsyncExc raised it: no frame says `raise`, and nothing that our code calls would raise
    this class, or one without arguments."""
    *_, last = _entries(error.__traceback__)
    if last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE or isinstance(error, _WITHOUT_ARGUMENTS):
        return False
    return not error.args or type(error).__module__.partition(".")[0] not in _LIBRARIES


def _cut(error: BaseException) -> None:
    """Called by `protected`, which `error` leaves: of its traceback only what a signal handler did remains, and
    exceptions of ours that were being handled meanwhile are no context of it.

    Another `protected` further out has to find the handler too: then that one does this.
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
    """What a bare `raise` in the handler that runs now, or in its caller, raises `error` with."""
    error.__traceback__ = traceback
    if sys.version_info < (3, 11):  # there a bare `raise` takes the handler's traceback, not the exception's
        import ctypes

        state = (type(error), error, traceback)
        for each in state:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # the call takes them over
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
