"""Reports at exit how the process ends: finished, or by an uncaught exception.

The interpreter stores an uncaught exception in `sys.last_exc` (before Python 3.12 `sys.last_value`) before atexit runs,
so nothing is replaced. An exit code (`sys.exit(3)`) is not visible then: `exit_code` passes it to the helper.
After `os._exit` and signals there is no report: viewers find the process gone.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

from gpumon_agent.guard import error_line

Leave = Callable[[str, str], None]
"""reason, detail"""


class ExitReason:
    """Calls `leave` once, at exit. Signals keep their default action."""

    def __init__(self, leave: Leave) -> None:
        self._leave = leave
        self._before = _uncaught()  # left by an interactive prompt, earlier
        atexit.register(self._exit)

    def remove(self) -> None:
        atexit.unregister(self._exit)

    def _exit(self) -> None:
        error = _uncaught()
        if error is None or error is self._before or hasattr(sys, "ps1"):
            self._leave("finished", "")
        elif isinstance(error, KeyboardInterrupt):
            self._leave("signal", "SIGINT")
        else:
            self._leave("exception", error_line(error))


def _uncaught() -> BaseException | None:
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
