"""cuBLAS workspaces: allocator blocks that torch keeps per handle and stream, and that belong to no tensor.

Model. All workspaces have the same size. Torch reports it, or it follows from the documented rule: the sum of KiB ×
count over the pairs in `CUBLAS_WORKSPACE_CONFIG`, else 32 MiB on compute capability 9.0, else 8,320 KiB. A block counts
as a workspace if its requested size is exactly that, it has no owner and no saved tensor, and it was at the same
address in two searches. Nothing is cleared, and no handle is created.
Source: aten/src/ATen/cuda/CublasHandlePool.cpp. torch 2.15 frees its workspaces after each matmul.
Cost: one snapshot of the segments without history (0.3 ms with 80 segments, 0.8 with 220).
Known limitations. No search while the user records a history: a snapshot would be an event in it. An unknown tensor of
exactly that size is taken for a workspace. Workspaces of cuBLASLt (since torch 2.7 the same block) and cuDNN are freed
at once and not counted.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable, Container
from typing import Any

import torch

from gpumon_agent.guard import pass_on

_snapshot: Any = getattr(torch._C, "_cuda_memorySnapshot", None)  # None: a build without CUDA
_can_leave_out = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
reads_traces_alone = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 15)  # the version tested
_NO_POOL = (1 << 60, 1 << 60)  # an identifier that no pool has: the allocator counts them from 0
_PAIR = re.compile(r":(\d+):(\d+)")


def workspace_bytes(device: int) -> int:
    """Size of one workspace on this device."""
    tell = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if tell is not None:
        return int(tell())
    configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if configured is not None:
        return sum(int(kib) * int(count) for kib, count in _PAIR.findall(configured)) * 1024
    return (4096 * 8 if torch.cuda.get_device_capability(device) == (9, 0) else 4096 * 2 + 16 * 8) * 1024


@functools.cache
def tracks_blocks() -> bool:
    """Whether PyTorch's own CUDA allocator is used: others (cudaMallocAsync, a pluggable one) have no snapshot.

    Call it only after CUDA is initialized: until then the user can change it, and the result is cached.
    """
    return bool(torch.cuda.get_allocator_backend() == "native")


class Workspaces:
    """The workspaces found so far, by device."""

    def __init__(self) -> None:
        self.addresses: dict[int, dict[int, int]] = {}
        """device → address → bytes"""
        self._seen: dict[int, set[int]] = {}  # candidates of the previous search

    def bytes(self, device: int) -> int | None:
        """Bytes according to the last search; None before the second one."""
        found = self.addresses.get(device)
        return None if found is None else sum(found.values())

    def look(self, device: int, owned: Callable[[], Container[int]]) -> None:
        """Searches the segments. `owned` returns the addresses with an owner; only called for new candidates."""
        if user_records():
            return
        size = workspace_bytes(device)
        candidates = {
            block["address"]
            for segment in snapshot()["segments"]
            if segment["device"] == device
            for block in segment["blocks"]
            if block["state"] == "active_allocated" and block["requested_size"] == size and size
        }
        known = self.addresses.get(device, {})
        if candidates - known.keys():
            held = owned()
            candidates = {address for address in candidates if address in known or address not in held}
        before = self._seen.get(device)
        self._seen[device] = candidates
        if before is not None:
            self.addresses[device] = dict.fromkeys(candidates & before, size)


def user_records() -> bool:
    """Whether the user records a history. Then do not read a snapshot: it would be an event in the history."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return enabled is not None and bool(enabled())


def snapshot(*, traces: bool = True, segments: bool = True) -> dict[str, Any]:
    """The allocator's segments, blocks and history, read with torch's original function, even if it was replaced.

    `traces` False omits the history, `segments` False the segments, if this torch can: we ask for those of a memory
    pool that does not exist. (torch 2.8 crashes on that.)
    """
    pool: Any = None
    if not traces and _can_leave_out:
        pool = (0, 0, False)
    elif not segments and reads_traces_alone:
        pool = _NO_POOL
    try:
        read: dict[str, Any] = _snapshot(pool)
    except TypeError as error:  # torch 2.4 takes no argument
        pass_on(error)
        read = _snapshot()
    return read
