"""Readings of this machine, besides the agent's: devices by NVML and amdsmi, processes by psutil."""

from __future__ import annotations

TYPE_CHECKING = False  # of typing, which the child process below does without
if TYPE_CHECKING:
    from gpumon.host.sampler import Sampler, read_driver

__all__ = ["Sampler", "read_driver"]


def __getattr__(name: str) -> object:
    """Imported on demand: the child process of drivers.py is in this package and needs neither asyncio nor typing."""
    if name in __all__:
        from gpumon.host import sampler

        return getattr(sampler, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
