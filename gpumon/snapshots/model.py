"""A memory snapshot as it is kept: segments with their blocks, and events, of each device. All sizes in bytes."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec

from gpumon.snapshots.trace import Trace

ALLOCATED, AWAITING_FREE, INACTIVE = "active_allocated", "active_awaiting_free", "inactive"
STATES = (ALLOCATED, AWAITING_FREE, INACTIVE)
"""torch.cuda.memory_snapshot()'s words"""

UNKNOWN = -1
"""The place of a line or a mark that the file does not have."""


class Block(msgspec.Struct, frozen=True):
    """A part of a segment as the snapshot was taken."""

    address: int
    size: int
    requested: int
    state: str  # one of STATES
    line: int = UNKNOWN  # in Snapshot.lines


class Segment(msgspec.Struct, frozen=True):
    """Memory taken from the device at once, with its blocks by address."""

    address: int
    size: int
    stream: int
    small: bool
    private: bool  # of a MemPool or a CUDA graph
    expandable: bool
    blocks: tuple[Block, ...]


class Device(msgspec.Struct, frozen=True):
    """One device. `lines` and `marks` have one element for each block id of the trace."""

    index: int
    segments: tuple[Segment, ...]
    trace: Trace | None
    """None: the file has no events of this device"""
    lines: array[int]
    """typecode q: the line that allocated it, in Snapshot.lines"""
    marks: array[int]
    """typecode q: the user's metadata as it was allocated, else the innermost annotation; in Snapshot.marks"""
    ends: Mapping[int, int]
    """id of each block that is in use at the end, by its address"""
    lost: int
    """requested bytes that are alive by the events and in no block; 0 unless file and events disagree"""


class Snapshot(msgspec.Struct, frozen=True):
    devices: tuple[Device, ...]
    lines: tuple[str, ...]
    """ "file:line function" """
    marks: tuple[str, ...]
    settings: Mapping[str, str]
    """the allocator's; empty if the file has none"""
    taken: tuple[int, str] | None = None
    """the step and phase in which gpumon took it; None: somebody else did"""
