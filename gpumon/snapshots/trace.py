"""What a device's allocator was asked for, in order, and what the device had: the events of a memory snapshot."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec

ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OOM, SNAPSHOT = range(9)
ACTIONS = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
"""An event's code is its place here; the names are those of torch.cuda.memory's `TraceEntry.action`."""


class Figures(msgspec.Struct, frozen=True):
    """What the device had over the events of a trace, in bytes; `segments_end` is a number."""

    requested_peak: int
    requested_end: int
    allocated_end: int
    reserved_start: int
    reserved_peak: int
    reserved_end: int
    segments_end: int


class Trace(msgspec.Struct, frozen=True):
    """What one device's allocator was asked for, in order. The arrays have one element for each event."""

    start: tuple[tuple[int, int], ...]
    """(id, requested bytes) of the blocks alive as the trace begins, by address"""
    codes: array[int]
    """typecode B: the place in ACTIONS"""
    ids: array[int]
    """typecode q: which block, numbered in order of first appearance; -1 for segments"""
    bytes: array[int]
    """typecode q: requested bytes"""
    streams: array[int]
    """typecode q: 0 is the default stream; others are numbered in order of appearance"""
    settings: Mapping[str, str]
    """the allocator's; empty if the file has none"""
    recorded: Figures | None
    """what the device had; None if unknown"""
