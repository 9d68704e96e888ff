"""The terminal: is it usable, does it still exist, and how to leave when it is gone.

If a pty vanishes without SIGHUP, the app reads EOF forever and keeps one core busy.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

LEAVE_S = 2.0
"""Time limit for a shutdown that blocks on a dead terminal."""

HUNG_UP = 128 + signal.SIGHUP
"""Exit code: as if ended by SIGHUP."""


def usable() -> bool:
    """Whether stdin (keys) and stderr (where Textual draws) are terminals."""
    return all(_is_terminal(fd) for fd in (0, 2))


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return False


class TerminalWatch:
    """Polls whether the other end of stdin's terminal is still open."""

    def __init__(self, fd: int | None = None) -> None:
        self._poll = select.poll()
        self._poll.register(sys.__stdin__.fileno() if fd is None and sys.__stdin__ else fd or 0, 0)

    def gone(self) -> bool:
        return any(events & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in self._poll.poll(0))


def leave_by_force(code: int, after_s: float = LEAVE_S) -> None:
    """Ends this process after `after_s` in any case: writes to a terminal that is gone may block forever."""
    timer = threading.Timer(after_s, os._exit, (code,))
    timer.daemon = True
    timer.start()
