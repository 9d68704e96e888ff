"""A command that does not outlive whoever started it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"Error: {sys.argv[2]} could not be started: {error.strerror}.")
"""
_KEEPER = str(Path(__file__).with_name("keeper.py"))


def tied(argv: Sequence[str]) -> list[str]:
    """`argv` such that the kernel kills it when the thread that starts it ends, `kill -9` included.

    Also where it is stopped, when nothing that it would have to do itself helps. It reaches this one process, not its
    children. On Linux; elsewhere `argv` as it is. PR_SET_PDEATHSIG (1, prctl(2)) outlives exec.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *argv]


def kept(argv: Sequence[str]) -> list[str]:
    """`argv` under a keeper, which ends with its status and leaves nothing of what it started: see keeper.py.

    On Linux; elsewhere `argv` as it is.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", _KEEPER, str(os.getpid()), *argv]
