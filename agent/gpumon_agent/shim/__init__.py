"""Brings the agent into a process launched by `gpumon run`: `launch` starts it, with `on_path` on its PYTHONPATH.

The agent starts only when the process constructs an optimizer or initializes CUDA: launchers, compilers, DataLoader
workers and package managers do neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpumon_agent import environment
from gpumon_agent.guard import protect
from gpumon_agent.registry import REGISTRY

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer

    from gpumon_agent.agent import Agent


def begin() -> None:
    """Called once in a launched process, when `import torch` is complete. The agent starts later, if at all."""
    protect("shim", _begin)()


def _begin() -> None:
    from torch import cuda

    from gpumon_agent.hooks import model_discovery
    from gpumon_agent.leaks import loads

    environment.value("GPUMON_SHIM")  # sitecustomize has read it; here an invalid value is reported
    loads.install()
    if environment.value("GPUMON_TRACK_CPU") == "1":
        from gpumon_agent.allocator.cpu import StorageTracker

        StorageTracker().start()  # now, not with the agent: earlier storages are not seen
    model_discovery.install(_ToAgent())
    if hasattr(cuda, "_lazy_call"):
        cuda._lazy_call(protect("shim", _device_taken))


def safetensors() -> None:
    """Called when `import safetensors.torch` is complete."""
    from gpumon_agent.leaks import loads

    if REGISTRY.finders:
        protect("shim", loads.install().wrap_safetensors)()


def _device_taken() -> None:
    """CUDA has just been initialized: from now on viewers find the process, long before it trains."""
    if REGISTRY.finders and not is_loader_worker():
        _agent().device_taken()


def is_loader_worker() -> bool:
    from torch.utils.data import get_worker_info

    return get_worker_info() is not None


def _agent() -> Agent:
    from gpumon_agent import agent  # zmq and msgspec are imported here, not in every process that has torch

    return agent.running(tracker=REGISTRY.trackers[0] if REGISTRY.trackers else None)


class _ToAgent:
    """Passes what the search finds to the agent, started by the first finding."""

    def adopt(self, model: Module, optimizer: Optimizer) -> None:
        if not is_loader_worker():
            _agent().adopt(model, optimizer, found=True)

    def enter(self, module: Module) -> None:
        if not is_loader_worker():
            _agent().hooks.watch(module)

    def let_go(self, module: Module) -> None:
        _agent().hooks.release(module)

    def entered(self, module: Module) -> bool:
        return _agent().hooks.entered(module)

    def evaluates(self, module: Module) -> None:
        if not is_loader_worker():
            _agent().hooks.watch(module, evaluated=True)

    def homeless(self, optimizer: Optimizer) -> None:
        if not is_loader_worker():
            _agent().notice(
                f"{type(optimizer).__name__} updates tensors that belong to no module: no model is shown for them"
            )
