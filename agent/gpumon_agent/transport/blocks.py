"""The allocator's segments and blocks: read at once in the training thread, encoded in slices at later boundaries.

Cost: torch's snapshot makes one dict a block, about 0.5 µs each with the garbage collector off, twice that on a busy
machine: `BLOCKS_MAX` stop the training for 30 to 60 ms. More are refused, except at an
out-of-memory, which delays nothing. The rest (small tuples, encoding) is done in slices of `SLICE` blocks.
Known limitations. If the script itself records the allocator's history, every block carries its stacks, and a snapshot
with them takes seconds: nothing is read then.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from gpumon_agent import wire

BLOCKS_MAX = 60_000  # of all devices: torch reads them all
BLOCKS_AT_OOM_MAX = 200_000  # about 100 MiB of host memory for a moment
SLICE = 512

_STATES = {"active_allocated": wire.ALLOCATED, "inactive": wire.INACTIVE}  # any other state waits for a stream


class Raw(NamedTuple):
    """torch's snapshot, and the training thread's time it took."""

    segments: list[dict[str, Any]]
    rest: dict[str, Any]
    devices: int
    spent_ns: int


class TooDear(Exception):
    """Reading would stop the training for too long. The text is one sentence."""


def read(limit: int = BLOCKS_MAX) -> Raw:
    """All devices' segments. Raises TooDear. Call in the training thread, after CUDA is initialized.

    The garbage collector is off: the dicts made here would trigger it repeatedly, full collections included.
    """
    import torch

    from gpumon_agent.attribution import workspaces

    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if enabled is not None and enabled():
        raise TooDear(
            "the script records the allocator's history, which makes reading its blocks slow: "
            "torch.cuda.memory._dump_snapshot, called in the script, writes them with their stacks"
        )
    devices = torch.cuda.device_count()
    count = sum(_count(device) for device in range(devices))
    if count > limit:
        raise TooDear(f"{count:,} blocks cannot be read within 100 ms (at most {limit:,})")
    collects = gc.isenabled()
    gc.disable()
    try:
        began = time.monotonic_ns()
        snapshot = workspaces.snapshot(traces=False)
        spent_ns = time.monotonic_ns() - began
    finally:
        if collects:
            gc.enable()
    return Raw(snapshot.pop("segments"), snapshot, devices, spent_ns)


def _count(device: int) -> int:
    """Live blocks, and the gaps between them."""
    import torch

    stats = torch._C._cuda_memoryStats(device)
    return int(stats["active"]["all"]["current"] + stats["inactive_split"]["all"]["current"])


def made_of(raw: Raw, device: int, owners: Mapping[int, int] | None = None) -> Iterator[list[wire.Segment] | None]:
    """Converts `raw`, freeing it on the way. Yields None after each slice, then the device's segments.

    `owners`: address of a block → its number, as in `wire.BLOCK_OWNERS`; None: not read.
    """
    segments: list[wire.Segment] = []
    slice_left = SLICE
    raw.segments.reverse()
    while raw.segments:
        segment = raw.segments.pop()
        if segment["device"] != device:
            continue
        blocks: list[tuple[int, int]] = []
        theirs = bytearray()
        address = segment["address"]
        raw_blocks = segment["blocks"]
        raw_blocks.reverse()
        while raw_blocks:
            block = raw_blocks.pop()
            size, state = block["size"], _STATES.get(block["state"], wire.PENDING)
            blocks.append((size, state))
            if owners is not None:
                theirs.append(owners.get(address, 0) if state == wire.ALLOCATED else 0)
            address += size
            slice_left -= 1
            if not slice_left:
                slice_left = SLICE
                yield None
        segments.append(
            wire.Segment(
                address=segment["address"],
                bytes=segment["total_size"],
                small=segment["segment_type"] == "small",
                stream=segment["stream"],
                expandable=bool(segment.get("is_expandable")),
                private=tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0),
                blocks=tuple(blocks),
                owners=bytes(theirs),
            )
        )
    segments.sort(key=lambda segment: segment.address)
    yield segments


def encoded(
    segments: list[wire.Segment],
    device: int,
    number: int,
    at: tuple[int, str],
    t_ns: int,
    reason: str,
    spent_ns: int,
    holders: tuple[wire.Holder, ...] = (),
    walked: bool | None = None,
) -> Iterator[bytes]:
    cut = list(wire.parts(segments))
    for part, some in enumerate(cut):
        about = device, number, *at, t_ns, reason, part, len(cut), some, spent_ns, holders, walked
        yield wire.encode_event(wire.Segments(*about))
