"""How the process ends, told without changing how it ends: atexit, and the exception that nobody caught."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from types import TracebackType

from .guard import told

Leave = Callable[[str, str], None]
"""reason, detail"""

_OURS = __name__.partition(".")[0]


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
        self._leave(self._reason, self._detail)

    def _excepthook(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            self._reason, self._detail = "signal", "SIGINT"
        else:
            self._reason, self._detail = "exception", told(error)
        seen: set[int] = set()
        chained: BaseException | None = error
        while chained is not None and id(chained) not in seen:
            seen.add(id(chained))
            chained.__traceback__ = without_ours(chained.__traceback__)
            chained = chained.__cause__ or chained.__context__
        self._previous(kind, error, error.__traceback__)


def without_ours(traceback: TracebackType | None) -> TracebackType | None:
    """The traceback as it would be without the agent's frames in it."""
    while traceback is not None and _is_ours(traceback):
        traceback = traceback.tb_next
    entry = traceback
    while entry is not None:
        following = entry.tb_next
        while following is not None and _is_ours(following):
            following = following.tb_next
        if following is not entry.tb_next:
            entry.tb_next = following
        entry = following
    return traceback


def _is_ours(traceback: TracebackType) -> bool:
    name = traceback.tb_frame.f_globals.get("__name__", "")
    return isinstance(name, str) and name.partition(".")[0] == _OURS
