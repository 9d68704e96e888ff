"""How the process ends, told without changing how it ends: atexit, the exception that nobody caught, `sys.exit(3)`.

The interpreter tells nobody that it ends by SystemExit, nor with which code: it is no exception for `sys.excepthook`,
and gone when atexit runs. So what `sys.exit`, `exit()` and `quit()` raise carries a `_Passing`, which dies with it: if
no Python code runs then, nobody caught it. Known limitation: a bare `raise SystemExit(3)` is told as "finished", and so
is one through a `sys.exit` bound before the agent came. `os._exit` lets nobody speak: viewers find the process gone.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from gpumon_agent.guard import leave_no_frame, told

Leave = Callable[[str, str], None]
"""reason, detail"""


class Farewell:
    """Calls `leave` once, at exit. Signals keep their default action: who dies of one is found gone by its viewers."""

    def __init__(self, leave: Leave) -> None:
        self._leave = leave
        self._reason, self._detail = "finished", ""
        self._previous = sys.excepthook
        self._hook = self._excepthook  # one object: `remove` compares identities
        sys.excepthook = self._hook
        self._restore: list[Callable[[], None]] = []
        self._wrap(sys, "exit")
        quitter = type(__builtins__["exit"] if isinstance(__builtins__, dict) else getattr(__builtins__, "exit", None))
        if quitter.__module__ == "_sitebuiltins":  # python -S has none
            self._wrap(quitter, "__call__")
        atexit.register(self._exit)

    def remove(self) -> None:
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        for restore in self._restore:
            restore()
        self._restore.clear()
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        uncaught = getattr(sys, "last_value", None)  # set before any hook is called, in a prompt long before the end
        if uncaught is not None and sys.excepthook is not self._hook and not hasattr(sys, "ps1"):
            self._ended_by(uncaught)  # a later hook (rich's, the user's) stands in our place and need not call us
        self._leave(self._reason, self._detail)

    def _ended_by(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._reason, self._detail = "signal", "SIGINT"
        else:
            self._reason, self._detail = "exception", told(error)

    def _excepthook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._ended_by(error)
        self._previous(kind, error, traceback)

    def _wrap(self, owner: Any, name: str) -> None:
        original = owner.__dict__[name]

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except SystemExit as error:
                error._gpumon_passing = _Passing(self._left_by, error.code)  # type: ignore[attr-defined]
                leave_no_frame(error)
                raise

        def restore() -> None:
            if owner.__dict__.get(name) is wrapper:
                setattr(owner, name, original)

        setattr(owner, name, wrapper)
        self._restore.append(restore)

    def _left_by(self, code: object) -> None:
        if code is None or code == 0:  # False, too: the interpreter takes it for an int
            self._reason, self._detail = "finished", ""
        else:
            self._reason, self._detail = "exception", told(SystemExit(code))


class _Passing:
    """Rides on a SystemExit and dies with it."""

    def __init__(self, left: Callable[[object], None], code: object) -> None:
        self._left = left
        self._code = code

    def __del__(self) -> None:
        # the main thread, and no frame below this one: the exception has left all of them
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            self._left(self._code)

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, ()  # a copy of the exception, in another process or not, carries nothing
