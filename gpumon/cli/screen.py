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


def import_asyncio() -> None:
    """Without OpenSSL, which it needs for TLS alone: 2 MB and 50 ms of a viewer that never speaks it."""
    if "asyncio" in sys.modules or "ssl" in sys.modules:
        return
    sys.modules["ssl"] = None  # type: ignore[assignment]
    try:
        import asyncio  # noqa: F401
    finally:
        del sys.modules["ssl"]
