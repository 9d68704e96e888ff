"""Reads one device's allocator: the interface of all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gpumon_agent.allocator.peaks import figures
from gpumon_agent.wire import Device


class Reading(NamedTuple):
    """An allocator's figures at a boundary, in bytes; None if the backend or this torch does not report one."""

    allocated: int | None = None
    allocated_peak: int | None = None  # since the previous boundary
    reserved: int | None = None
    reserved_peak: int | None = None
    active: int | None = None
    inactive_split: int | None = None
    requested: int | None = None
    allocations: int | None = None  # live blocks
    retries: int | None = None
    ooms: int | None = None
    flags: int = 0  # wire.BOUND
    rss: int | None = None


Read = tuple[Any, ...] | dict[str, Any]
"""A boundary's figures: in the order of a Reading, or torch's stats dict, which is converted later."""

Reader = tuple[Callable[[int], Read], int, Any]
"""`Probe.boundary`, device index, torch.device"""


def reading(read: Read) -> Reading:
    return Reading._make(figures(read) if isinstance(read, dict) else read)


def allocated_and_peak(read: Read) -> tuple[int | None, int | None]:
    """(allocated, allocated_peak), for callers that cannot afford a whole Reading."""
    if isinstance(read, dict):
        allocated = read["allocated_bytes"]["all"]
        return allocated["current"], allocated["peak"]
    return read[0], read[1]


class Probe(Protocol):
    """A backend. Called in the training thread; no call may initialize a device, synchronize or allocate on it."""

    kind: str
    """wire.Device.kind: cuda, hip, mps, xpu, cpu"""

    def boundary(self, device: int) -> Read:
        """Read the device and reset its peaks."""
        ...

    def devices(self) -> tuple[Device, ...]:
        """The backend's devices. Empty before it is initialized."""
        ...

    def stop(self) -> None:
        """Restore torch."""
        ...
