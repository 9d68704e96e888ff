"""One device's allocator, read: what every backend offers to the phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from gpumon_agent.allocator.peaks import figures
from gpumon_agent.wire import Device


class Reading(NamedTuple):
    """What an allocator says of itself at a boundary. Bytes; None where the backend or this torch does not tell."""

    allocated: int | None = None
    allocated_peak: int | None = None  # since the boundary before
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
"""What a boundary found: in the order of a Reading, or as torch's allocator told it, to be looked through later."""

Reader = tuple[Callable[[int], Read], int, Any]
"""reads a boundary; the device's index; the torch.device"""


def reading(read: Read) -> Reading:
    return Reading._make(figures(read) if isinstance(read, dict) else read)


def stood(read: Read) -> tuple[int | None, int | None]:
    """allocated, allocated_peak, where a boundary cannot afford the rest."""
    if isinstance(read, dict):
        allocated = read["allocated_bytes"]["all"]
        return allocated["current"], allocated["peak"]
    return read[0], read[1]


class Probe(Protocol):
    """A backend. Called in the training thread; no call may initialize a device, synchronize or allocate on it."""

    kind: str
    """As torch spells it in Device.kind: cuda, hip, mps, xpu, cpu."""

    def boundary(self, device: int) -> Read:
        """Read the device, and let its peaks begin anew."""
        ...

    def devices(self) -> tuple[Device, ...]:
        """The devices this process can already name. Empty before the backend is initialized."""
        ...

    def stop(self) -> None:
        """Leave torch as it was found."""
        ...
