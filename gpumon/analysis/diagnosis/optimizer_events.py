"""What stands allocated while an optimizer's step asks for one tensor after another."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.diagnosis.message_parser import LARGE_MIN, SEGMENT_STEP
from gpumon.analysis.estimate.model import Tensor
from gpumon_agent import wire


@dataclass(frozen=True, slots=True)
class Event:
    """One request: what for, of which parameter, how many bytes, and what stands allocated as it is made."""

    phase: str
    what: str
    tensor: Tensor
    bytes: int
    stands: int
    later: bool = False  # of a step after the first


@dataclass(slots=True)
class Allocated:
    """Bytes that stand, as the walk goes on."""

    bytes: int
    later: bool = False

    def asked(self, what: str, tensor: Tensor, size: int) -> Event:
        """It is made, and stands from now on."""
        event = Event(wire.OPTIMIZER, what, tensor, size, self.bytes, self.later)
        self.bytes += counted(size)
        return event

    def gone(self, *sizes: int) -> None:
        self.bytes -= sum(map(counted, sizes))


def counted(count: int) -> int:
    """What `memory_allocated` grows by for a tensor of `count` bytes in a segment of its own."""
    block = -(-count // 512) * 512
    if block < LARGE_MIN:
        return block
    segment = -(-block // SEGMENT_STEP) * SEGMENT_STEP
    return block if segment - block > 1 << 20 else segment
