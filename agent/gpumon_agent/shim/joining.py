"""Starts the agent in a process that trains already: `gpumon attach PID --inject` has it call `join`.

`join` and `leave` run in the main thread, between two instructions, perhaps within a step. Models and optimizers exist,
so the collector's list of objects is searched for them once: 20 ms for 700,000 objects. `tell` is called with an empty
text once it is done, or with the reason why not.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

from gpumon_agent.registry import REGISTRY

NO_TORCH = "it has not imported torch"
NOT_YET = "`import torch` is not complete"
A_WORKER = "it is a worker of a DataLoader"
AT_WORK = "its agent is at work"
AT_WORK_S = 5.0
"""How long the end of the agent's own code is waited for."""


def join(tell: Callable[[str], object]) -> None:
    torch = sys.modules.get("torch")
    if torch is None:
        tell(NO_TORCH)
    elif getattr(torch.__spec__, "_initializing", False):
        tell(NOT_YET)
    else:
        tell(_join())


def _join() -> str:
    from gpumon_agent import shim

    if shim.is_loader_worker():
        return A_WORKER
    if not REGISTRY.finders:
        shim.begin()
        for finder in REGISTRY.finders:
            finder.meet_optimizers()
    return "" if REGISTRY.agent is not None else "it has neither an optimizer nor a CUDA device"


def leave(tell: Callable[[str], object]) -> None:
    """Removes the agent: at once, or as soon as its own code, which this call may have interrupted, has returned."""
    until = time.monotonic() + AT_WORK_S

    def attempt() -> bool:
        at_work = _at_work()
        if at_work and time.monotonic() < until:
            return False
        tell(AT_WORK if at_work else _leave())
        return True

    if not attempt():
        _repeat(attempt)


def _leave() -> str:
    if REGISTRY.agent is None:
        return "it has no agent"
    from gpumon_agent.agent import stop

    stop()
    return ""


def _at_work() -> bool:
    """Whether the agent's own code was interrupted: what it uses must not go away."""
    frame = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("gpumon_agent.") and name != __name__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _repeat(attempt: Callable[[], bool]) -> None:
    """Has the interpreter call `attempt` again after a few instructions, until it returns True."""

    def again(_: object) -> int:
        if not attempt():
            queue(callback, None)
        return 0

    queue = ctypes.pythonapi.Py_AddPendingCall
    callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(again)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(callback))  # for ever: it cannot be freed while it runs
    queue(callback, None)
