"""Allocations of an optimizer step, and a running total of the bytes allocated."""

from __future__ import annotations

import msgspec

from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.estimate.simulator import LARGE, ROUND_SEGMENT
from gpumon_agent import wire
from gpumon_agent.units import rounded


class Event(msgspec.Struct, frozen=True):
    """One request: its purpose, parameter and size in bytes, and the bytes allocated before it."""

    phase: str
    what: str
    tensor: Tensor
    bytes: int
    allocated_before: int
    later: bool = False  # of a step after the first


class Allocated(msgspec.Struct):
    """The running total of allocated bytes."""

    bytes: int
    later: bool = False

    def request(self, what: str, tensor: Tensor, size: int) -> Event:
        """Counts a request and adds its bytes."""
        event = Event(wire.OPTIMIZER, what, tensor, size, self.bytes, self.later)
        self.bytes += counted(size)
        return event

    def free(self, *sizes: int) -> None:
        self.bytes -= sum(map(counted, sizes))


def counted(count: int) -> int:
    """Growth of `memory_allocated`, in bytes, for a tensor of `count` bytes in its own segment."""
    block = rounded(count)
    if block < LARGE:
        return block
    segment = -(-block // ROUND_SEGMENT) * ROUND_SEGMENT
    return block if segment - block > 1 << 20 else segment
