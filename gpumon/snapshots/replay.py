"""Plays a trace's requests through the installed torch's own CUDA caching allocator, on a virtual GPU.

Model. An allocator's figures follow from the requests alone: their sizes, their order and their streams. The virtual
GPU runs torch's allocator (c10/cuda/CUDACachingAllocator.cpp) with a driver of its own, so the same requests give the
figures of a physical device: docs/physical.md compares them for traces of physical GPUs.

- Before the first event the blocks alive at the trace's beginning are allocated, in the order of their addresses, on
  the default stream.
- A block is freed at its `free_completed`: until then other streams may use it, and the allocator holds it.
- A run of `segment_free` or `segment_unmap` is replayed as one `torch.cuda.empty_cache()`.
- An `oom` is replayed as a request of that size, which is freed at once if it succeeds. What the training would have
  done then is not known.

Known limitations. A trace does not tell in which order the cache that it began with was built, nor what else that cache
held: the replay begins without it. Nor does it tell whether segments were freed by the program, or by the allocator
before a second attempt. Private pools (CUDA graphs) are not told apart from the default pool.

Cost. Two to three seconds for the process, and about 1 µs an event.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import msgspec

from gpumon import virtual_gpu
from gpumon.snapshots.trace import (
    ACTIONS,
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_FREE,
    SEGMENT_UNMAP,
    Figures,
    Trace,
)
from gpumon.virtual_gpu import profiles

DEVICE = "a100-80"
"""Its name: of a device, the allocator asks for the capacity alone."""

PLENTY_BYTES = 1 << 40
"""The device without a given capacity: more than any device has, and little enough that the address space holds the
segments that `expandable_segments` reserves: 9/8 of the device for each stream and pool."""

AT_ONCE = 2
"""Processes that `advise` runs side by side: each needs a core, and 0.5 GB for torch."""

UNKNOWN_SETTING = 3
"""The child's exit status if this torch does not know a setting."""

LARGE_SEGMENT_MIB = 64
POWER2_DIVISIONS = 16
COLLECT_ABOVE = 0.8
MOST_OF_IT = 0.99
"""Below 1, because torch limits the process, and so collects garbage, only if the fraction is."""
SPLIT_MIB_MIN = 20
"""torch refuses a smaller `max_split_size_mb` (kLargeBuffer in c10/core/AllocatorConfig.h)."""

RELEASES = (SEGMENT_FREE, SEGMENT_UNMAP)

_MIB = 1 << 20
_INT64_MAX = (1 << 63) - 1
_SETTING = re.compile(r"\s*([a-z0-9_]+)\s*:\s*(\[[\w.:,>\s-]*\]|[\w.-]+)\s*(?:,|$)", re.ASCII)
_STARTS = ("PYTORCH_", "TORCH_", "CUDA_", "CUBLAS_", "NCCL_", "GPUMON_")
"""Variables of a training that must not reach the replay."""

_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from gpumon.snapshots.replay_child import main; main()"
"""The child uses this process's sys.path, not the current directory."""


class ReplayError(Exception):
    """The trace cannot be replayed; the message says why, in one sentence."""


class UnknownSetting(ReplayError):
    """The installed torch does not know a setting."""


class FailedRequest(msgspec.Struct, frozen=True):
    """The first request that the allocator refused."""

    event: int | None
    """Its place in the trace, from 0. None: a block that was alive as the trace began."""
    requested_bytes: int


class Replayed(msgspec.Struct, frozen=True):
    """What the device would have had."""

    settings: Mapping[str, str]
    """As in PYTORCH_ALLOC_CONF: those recorded, and those that replaced them."""
    capacity_bytes: int | None
    """The whole device; the context's share is gpumon.virtual_gpu.profiles.Profile.context_bytes. None: plenty."""
    torch: str
    figures: Figures
    """Up to the end, or up to the allocation that failed. `segments_end` counts no expandable segment."""
    retries: int
    """How often the allocator freed its cache and tried again: `num_alloc_retries` of torch.cuda.memory_stats."""
    oom: FailedRequest | None

    @property
    def fits(self) -> bool:
        return self.oom is None


class Request(msgspec.Struct, frozen=True):
    """The child's first line; the arrays follow: codes, ids, bytes, streams."""

    start: tuple[tuple[int, int], ...]
    settings: Mapping[str, str]
    capacity_bytes: int | None
    events: int


def replay(trace: Trace, *, settings: Mapping[str, str] = {}, capacity_bytes: int | None = None) -> Replayed:
    """Replays the trace with its own settings, replaced by `settings`, on a device of `capacity_bytes`.

    Raises ReplayError if the trace contradicts itself, or torch does not accept the settings or the capacity;
    gpumon.virtual_gpu.BuildUnavailable if there can be no virtual GPU here.
    """
    _check(trace)
    return _replay(trace, {**recorded_settings(trace), **settings}, capacity_bytes)


def advise(trace: Trace, capacity_bytes: int | None = None) -> list[Replayed]:
    """As recorded, and then once for each setting that may help; those that this torch does not know are left out.

    Raises as `replay` does.
    """
    _check(trace)
    recorded = recorded_settings(trace)
    attempts = [{**recorded, **change} for change in _changes(trace, capacity_bytes)]
    attempts = [attempt for attempt in attempts if attempt != recorded]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        first = pool.submit(_replay, trace, recorded, capacity_bytes)
        others = [pool.submit(_replay_if_known, trace, attempt, capacity_bytes) for attempt in attempts]
        return [first.result(), *(each for other in others if (each := other.result()) is not None)]


def parse_settings(text: str) -> dict[str, str]:
    """The settings in a text such as PYTORCH_ALLOC_CONF has: "expandable_segments:True,max_split_size_mb:128".

    Raises ReplayError.
    """
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _SETTING.match(text, at)
        if match is None:
            raise ReplayError(f"{text!r} is not a setting of the allocator: write expandable_segments:True")
        found[match[1]] = match[2]
        at = match.end()
    return found


def recorded_settings(trace: Trace) -> dict[str, str]:
    """Those that the program chose: the text that snapshots keep. Raises ReplayError if it is none."""
    return parse_settings(trace.settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def saved_bytes(before: Replayed, after: Replayed) -> int | None:
    """By how much the second needs less of the device: positive if it helps. None if one of them does not fit."""
    if not (before.fits and after.fits):
        return None
    return before.figures.reserved_peak - after.figures.reserved_peak


def unknown_cache_bytes(trace: Trace, replayed: Replayed) -> int | None:
    """What the device's cache held as the first request came, beyond what the replay began with. None: not known.

    With 0, a replay had the device's reserved peak to the byte in all traces of docs/physical.md.
    """
    if trace.recorded is None or (replayed.oom is not None and replayed.oom.event is None):
        return None
    reserved = trace.recorded.reserved_start
    for code, size in zip(trace.codes, trace.bytes, strict=True):
        if code not in RELEASES:
            break
        reserved -= size
    return max(0, reserved - replayed.figures.reserved_start)


# --------------------------------------------------------------------------------------------------------- the child


def _replay(trace: Trace, settings: Mapping[str, str], capacity_bytes: int | None) -> Replayed:
    conf = ",".join(f"{key}:{value}" for key, value in settings.items())
    parse_settings(conf)
    context_bytes = profiles.find(DEVICE).context_bytes
    if capacity_bytes is not None and capacity_bytes <= context_bytes:
        raise ReplayError(f"a device of {capacity_bytes} bytes is smaller than the context of a process")
    environment = virtual_gpu.environment(profile=DEVICE, memory=capacity_bytes or PLENTY_BYTES, context=context_bytes)
    kept = {name: value for name, value in environment.items() if not name.startswith(_STARTS)}
    request = Request(trace.start, settings, capacity_bytes, len(trace.codes))
    arrays = (trace.codes, trace.ids, trace.bytes, trace.streams)
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _CHILD, *sys.path],
            env={**kept, "PYTORCH_CUDA_ALLOC_CONF": conf},
            input=b"".join((msgspec.json.encode(request), b"\n", *(each.tobytes() for each in arrays))),
            capture_output=True,
            check=False,
        )
    finally:
        virtual_gpu.remove_session(environment["VGPU_SESSION"])
    if done.returncode == 0:
        return msgspec.json.decode(done.stdout, type=Replayed)
    lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
    kind = UnknownSetting if done.returncode == UNKNOWN_SETTING else ReplayError
    raise kind(f"torch could not replay the trace{f' with {conf}' if conf else ''}: {lines[-1]}")


def _replay_if_known(trace: Trace, settings: Mapping[str, str], capacity_bytes: int | None) -> Replayed | None:
    try:
        return _replay(trace, settings, capacity_bytes)
    except UnknownSetting:
        return None


def _changes(trace: Trace, capacity_bytes: int | None) -> list[dict[str, str]]:
    """The settings to try, from the notes on PYTORCH_ALLOC_CONF in torch's docs (notes/cuda.rst)."""
    made = [
        {"expandable_segments": "True"},
        {"large_segment_size_mb": str(LARGE_SEGMENT_MIB)},
        {"roundup_power2_divisions": str(POWER2_DIVISIONS)},
    ]
    allocated = (size for code, size in zip(trace.codes, trace.bytes, strict=True) if code == ALLOC)
    largest_mib = max((*allocated, *(size for _, size in trace.start)), default=0) // _MIB
    if largest_mib >= SPLIT_MIB_MIN:  # the largest power of two up to it, so that only the largest stay whole
        limit_mib = max(SPLIT_MIB_MIN, 1 << (largest_mib.bit_length() - 1))
        made.append({"max_split_size_mb": str(limit_mib)})
    if capacity_bytes is not None:  # it begins at a share of the capacity
        collect = {"garbage_collection_threshold": str(COLLECT_ABOVE), "per_process_memory_fraction": str(MOST_OF_IT)}
        made.append(collect)
    return made


# --------------------------------------------------------------------------------------------------------- the trace


def _check(trace: Trace) -> None:
    """Raises ReplayError at the first event that no allocator could have recorded."""
    arrays = (trace.codes, trace.ids, trace.bytes, trace.streams)
    if [each.typecode for each in arrays] != ["B", "q", "q", "q"]:
        raise ReplayError("the arrays of the trace have other types than B, q, q and q")
    if len({len(each) for each in arrays}) != 1:
        raise ReplayError("the arrays of the trace have different lengths")
    alive: set[int] = set()
    requested: set[int] = set()
    for block, size in trace.start:
        if block in alive or not (0 <= block <= _INT64_MAX and 0 <= size <= _INT64_MAX):
            raise ReplayError(f"the trace begins with a block {block} of {size} bytes that cannot be")
        alive.add(block)
    for at, (code, block, size) in enumerate(zip(trace.codes, trace.ids, trace.bytes, strict=True)):
        if code >= len(ACTIONS):
            raise ReplayError(f"event {at} of the trace has the unknown code {code}")
        if size < 0:
            raise ReplayError(f"event {at} of the trace ({ACTIONS[code]}) has {size} bytes")
        if code == ALLOC:
            if block in alive or block < 0:
                raise ReplayError(f"event {at} of the trace allocates block {block}, which is allocated already")
            alive.add(block)
        elif code in (FREE_REQUESTED, FREE_COMPLETED):
            if block not in alive or (code == FREE_REQUESTED and block in requested):
                raise ReplayError(f"event {at} of the trace frees block {block}, which is not allocated")
            if code == FREE_REQUESTED:
                requested.add(block)
            else:
                alive.remove(block)
                requested.discard(block)
