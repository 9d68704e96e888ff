"""Whether the screen can be drawn here, and what is printed if it cannot."""

from __future__ import annotations

import os
import sys


def usable() -> bool:
    """Whether stdin (keys), stdout and stderr (where the screen is drawn) are a terminal that can move its cursor."""
    from gpumon.tui import terminal

    return terminal.usable() and sys.stdout.isatty() and not dumb()


def dumb() -> bool:
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")
