"""Backends of torch.accelerator (mps, xpu, …): the figures that this torch reports, None for the rest.

We never reset their peak counters, so a peak is only a bound: the largest since the process began or the user's reset.
Written from PyTorch's sources (torch/mps/__init__.py, torch/accelerator/memory.py), not tried: docs/devices.md.
"""

from __future__ import annotations

from typing import Any

from gpumon_agent.allocator import Reading
from gpumon_agent.wire import BOUND, Device

WITHOUT_DRIVER = "NVML does not know it, so what other processes hold and the headroom stay unknown"
_WHAT_IS_TOLD = {
    "hip": "an AMD GPU has the allocator's figures; what other processes hold and the headroom are known if gpumon's "
    "Python has AMD's module amdsmi",
    "mps": f"on Apple's GPU PyTorch tells what is allocated and reserved now, but no peak; {WITHOUT_DRIVER}",
}


def told(kind: str) -> str:
    """What a backend's figures are, and which there are none of; one sentence."""
    largest = f"peaks of {kind} are the largest since the process began, if this PyTorch has any; {WITHOUT_DRIVER}"
    return f"{_WHAT_IS_TOLD.get(kind, largest)} (not tried on such a device)"


class AcceleratorProbe:
    def __init__(self, kind: str) -> None:
        import torch

        self.kind = kind
        self._torch = torch
        self._accelerator: Any = getattr(torch, "accelerator", None)  # since torch 2.6
        there = self._accelerator is not None and self._accelerator.is_available()
        self._stats = getattr(torch._C, "_accelerator_getDeviceStats", None) if there else None  # since torch 2.9
        self._ready = getattr(torch._C, "_accelerator_isAllocatorInitialized", None)

    def boundary(self, device: int) -> Reading:
        if self.kind == "mps":
            return self._mps()
        if self._stats is None or self._ready is None or not self._ready():
            return Reading()
        stats = self._stats(device)

        def figure(name: str, what: str = "current") -> int | None:
            stat = stats.get(name)
            return None if stat is None else int(stat["all"][what])

        return Reading(
            figure("allocated_bytes"),
            figure("allocated_bytes", "peak"),
            figure("reserved_bytes"),
            figure("reserved_bytes", "peak"),
            figure("active_bytes"),
            figure("inactive_split_bytes"),
            figure("requested_bytes"),
            figure("allocation"),
            stats.get("num_alloc_retries"),
            stats.get("num_ooms"),
            BOUND,
        )

    def _mps(self) -> Reading:
        mps: Any = self._torch.mps
        if not self._torch.backends.mps.is_available():
            return Reading()
        return Reading(allocated=mps.current_allocated_memory(), reserved=mps.driver_allocated_memory())

    def devices(self) -> tuple[Device, ...]:
        if self._accelerator is None or not self._accelerator.is_available():
            return ()
        return tuple(Device(i, None, self.kind, None, self.kind) for i in range(self._accelerator.device_count()))

    def stop(self) -> None:
        """Nothing to restore."""
