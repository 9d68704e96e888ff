"""A line on a terminal's stderr that says what takes so long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from gpumon.cli.printing import harmless

PROGRESS_AFTER_S = 0.5


class _Line:
    """The line, written by the thread that waits and by the one that works."""

    def __init__(self) -> None:
        self._text, self._shown, self._ended = "", False, False
        self._lock = threading.Lock()

    def show(self) -> None:
        with self._lock:
            if not self._ended:
                self._shown = True
                self._write()

    def say(self, text: str) -> None:
        with self._lock:
            self._text = text
            if self._shown and not self._ended:
                self._write()

    def end(self) -> None:
        with self._lock:
            if self._shown and not self._ended:
                sys.stderr.write("\r\x1b[2K")
                sys.stderr.flush()
            self._ended = True

    def _write(self) -> None:
        sys.stderr.write(f"\r\x1b[2K{harmless(self._text)} …")
        sys.stderr.flush()


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Shows `text` while the block runs, from half a second on, and clears it. Yields what changes the text.

    Nothing if stderr is no terminal or cannot clear a line (TERM=dumb).
    """
    if not shown():
        yield lambda _: None
        return
    line = _Line()
    line.say(text)
    waiting = threading.Timer(PROGRESS_AFTER_S, line.show)
    waiting.daemon = True
    waiting.start()
    try:
        yield line.say
    finally:
        waiting.cancel()
        line.end()


def shown() -> bool:
    from gpumon.cli.screen import dumb

    return sys.stderr is not None and sys.stderr.isatty() and not dumb()
