"""Brings the agent into a process that `gpumon run` launched: `launch` starts it, `on_path` is what it finds there."""

from __future__ import annotations


def begin() -> None:
    """Called once in a launched process, when `import torch` is complete. The agent itself wakes later, if at all."""
    from gpumon_agent import find

    find.install(lambda model, optimizer: print("ADOPT", type(model).__name__, type(optimizer).__name__, flush=True))
