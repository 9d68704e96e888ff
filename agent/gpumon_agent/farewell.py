"""How the process ends, told without changing how it ends: atexit, and the exception that nobody caught."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

from .guard import told

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
        atexit.register(self._exit)

    def remove(self) -> None:
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
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
