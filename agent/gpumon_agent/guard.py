"""Nothing the agent does may reach the training it watches: the one place where every exception is caught."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

FAILURES_MAX = 5  # then the part that fails is switched off for the rest of the run

P = ParamSpec("P")
R = TypeVar("R")


class Guard:
    """Wraps the agent's entry points. A failure is told once on stderr, counted, and after a few the part goes quiet.

    KeyboardInterrupt and SystemExit belong to the user and pass.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.failures: dict[str, int] = {}
        self._tell = tell

    def protect(self, part: str, function: Callable[P, R]) -> Callable[P, R | None]:
        """`function` that returns None where it would have raised. `part` names it in the message and the count."""
        failures = self.failures
        failures.setdefault(part, 0)

        def protected(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if failures[part] >= FAILURES_MAX:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  the one place that may
                self._caught(part, error)
                return None

        return protected

    def _caught(self, part: str, error: Exception) -> None:
        count = self.failures[part] = self.failures[part] + 1
        text = f"{part}: {told(error)}"
        if count == 1:
            say(f"{text} (training is not affected)")
        elif count == FAILURES_MAX:
            text += f"; switched off after {count} failures"
        if count in (1, FAILURES_MAX):
            self._tell(text)


def say(text: str) -> None:
    """One line in the training's terminal; nothing where stderr is closed, or what stands in its place raises."""
    try:
        sys.stderr.write(f"gpumon: {text}\n")
    except Exception:  # noqa: BLE001  a training may have replaced it by anything
        return


def told(error: BaseException) -> str:
    """Its class and message in one line."""
    try:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    except Exception:  # noqa: BLE001  an exception whose own __str__ raises
        return type(error).__name__


def leave_no_frame(error: BaseException) -> None:
    """Takes the calling wrapper's own frame out of the traceback; a bare `raise` that follows adds none.

    So the user's traceback is the one of the unwatched script, printed or formatted.
    """
    if error.__traceback__ is None:
        return
    error.__traceback__ = rest = error.__traceback__.tb_next
    if sys.version_info < (3, 11):  # there a bare `raise` takes the handler's traceback, not the exception's
        import ctypes

        state = (type(error), error, rest)
        for each in state:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))  # the call takes them over
        ctypes.pythonapi.PyErr_SetExcInfo(*map(ctypes.py_object, state))
