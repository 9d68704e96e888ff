"""The terminal itself: whether it is one, whether it is still there, and leaving when it is gone.

An app whose pty vanished without a SIGHUP reads an endless end of file; one core is then busy for nobody.
"""

from __future__ import annotations

import os
import select
import sys
import threading

LEAVE_S = 2.0
"""After this long a farewell that hangs on a dead terminal is cut short."""

HUNG_UP = 128 + 1
"""Exit code: as if ended by SIGHUP."""


def usable() -> bool:
    """Both ends of the conversation are a terminal: keys from stdin, the picture to stderr (where Textual draws)."""
    return all(_is_terminal(fd) for fd in (0, 2))


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


class TerminalWatch:
    """Asks the system whether the other end of stdin's terminal is still held."""

    def __init__(self, fd: int | None = None) -> None:
        self._poll = select.poll()
        self._poll.register(sys.__stdin__.fileno() if fd is None and sys.__stdin__ else fd or 0, 0)

    def gone(self) -> bool:
        return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in self._poll.poll(0))


def leave_by_force(code: int, after_s: float = LEAVE_S) -> None:
    """Ends this process in any case: the farewell's writes may block for ever on a terminal that is gone."""
    timer = threading.Timer(after_s, os._exit, (code,))
    timer.daemon = True
    timer.start()
