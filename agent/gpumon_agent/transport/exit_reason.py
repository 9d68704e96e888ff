"""How the process ends, told at exit: finished, or by the exception that nobody caught.

The interpreter leaves an uncaught exception in `sys.last_exc` (before Python 3.12 `sys.last_value`) before atexit runs.
Nothing is replaced for it. An exit code (`sys.exit(3)`) cannot be seen then: `exit_code` leaves it for the helper.
`os._exit` and signals let nobody speak: viewers find the process gone.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

from gpumon_agent.guard import told

Leave = Callable[[str, str], None]
"""reason, detail"""


class ExitReason:
    """Calls `leave` once, at exit. Signals keep their default action: who dies of one is found gone by its viewers."""

    def __init__(self, leave: Leave) -> None:
        self._leave = leave
        self._before = _uncaught()  # of a prompt, long before the end
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
            self._leave("exception", told(error))


def _uncaught() -> BaseException | None:
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
