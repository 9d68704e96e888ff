"""Starts the agent in a process that trains already: `gpumon attach PID --inject` has it call `join`.

Both functions run in the main thread, between two instructions of the user's code, perhaps within a step. Models and
optimizers exist, so the collector's list of objects is searched for them once: 20 ms for 700,000 objects.
"""

from __future__ import annotations

import sys

from gpumon_agent.registry import REGISTRY

NO_TORCH = "it has not imported torch"
NOT_YET = "`import torch` is not complete"
AGAIN = "its agent is at work"
A_WORKER = "it is a worker of a DataLoader"


def join() -> str:
    """Empty if the agent runs now, or did already; else why not."""
    torch = sys.modules.get("torch")
    if torch is None:
        return NO_TORCH
    if getattr(torch.__spec__, "_initializing", False):
        return NOT_YET
    from gpumon_agent import shim

    if shim.is_loader_worker():
        return A_WORKER
    if not REGISTRY.finders:
        shim.begin()
        for finder in REGISTRY.finders:
            finder.meet_optimizers()
    return "" if REGISTRY.agent is not None else "it has neither an optimizer nor a CUDA device"


def leave() -> str:
    """Removes the agent. Empty if it has gone; else why not."""
    if REGISTRY.agent is None:
        return "it has no agent"
    if _in_the_agent():
        return AGAIN
    from gpumon_agent import stop

    stop()
    return ""


def _in_the_agent() -> bool:
    """Whether the instruction that was interrupted is the agent's own: what it uses must not go away."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("gpumon_agent."):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
