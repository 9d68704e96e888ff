"""cuBLAS workspaces: blocks of the allocator that torch keeps for each handle and stream, and that no tensor shows.

Model. A workspace has one size, which this torch tells or which follows from its documented rule: the product of
`CUBLAS_WORKSPACE_CONFIG` (pairs of KiB and count), else 32 MiB on compute capability 9.0, else 8,320 KiB. A block that
was asked for with exactly that size, that no owner and no saved tensor holds, and that stands at the same address at
two looks, is one. Nothing is cleared, and no handle is asked for.
Source: aten/src/ATen/cuda/CublasHandlePool.cpp. torch 2.15 gives its workspaces back after each product.
Cost: one snapshot of the segments without history (0.3 ms with 80 segments, 0.8 with 220).
Known limitations. Nothing is looked for while the user records a history: a look would be an event in it. A tensor of
exactly that size that somebody keeps, of which nothing here knows, is taken for one; cuBLASLt's own workspace (since
torch 2.7 the same block) and cuDNN's are not kept and so not counted.
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
reads_traces_alone = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) >= (2, 15)  # where it was tried
_NO_POOL = (1 << 60, 1 << 60)
_PAIR = re.compile(r":(\d+):(\d+)")


def workspace_bytes(device: int) -> int:
    """What one workspace takes on this device."""
    tell = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    if tell is not None:
        return int(tell())
    configured = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if configured is not None:
        return sum(int(kib) * int(count) for kib, count in _PAIR.findall(configured)) * 1024
    return (4096 * 8 if torch.cuda.get_device_capability(device) == (9, 0) else 4096 * 2 + 16 * 8) * 1024


@functools.cache
def tracks_blocks() -> bool:
    """Whether CUDA's allocator here is PyTorch's own: others (cudaMallocAsync, a pluggable one) have no snapshot.

    To be asked after CUDA began: until then the user can change it.
    """
    return bool(torch.cuda.get_allocator_backend() == "native")


class Workspaces:
    """What was found so far, by device."""

    def __init__(self) -> None:
        self.addresses: dict[int, dict[int, int]] = {}
        """device → address → bytes"""
        self._seen: dict[int, set[int]] = {}  # candidates of the look before

    def bytes(self, device: int) -> int | None:
        """As the last look found them; None before two looks."""
        found = self.addresses.get(device)
        return None if found is None else sum(found.values())

    def look(self, device: int, owned: Callable[[], Container[int]]) -> None:
        """Reads the segments. `owned` gives the addresses that somebody holds; asked only if there is a candidate."""
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
    """Whether the user records a history. Then no snapshot is to be read: it would be one more event in it."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    return enabled is not None and bool(enabled())


def snapshot(*, traces: bool = True, segments: bool = True) -> dict[str, Any]:
    """The allocator's segments, their blocks, and its history, by torch's own function: others may replace it.

    Without `traces` the history is left out, without `segments` those are, where this torch can: of a pool that does
    not exist there are none. (torch 2.8 crashes there.)
    """
    asked: Any = None
    if not traces and _can_leave_out:
        asked = (0, 0, False)
    elif not segments and reads_traces_alone:
        asked = _NO_POOL
    try:
        read: dict[str, Any] = _snapshot(asked)
    except TypeError as error:  # torch 2.4 takes no argument
        pass_on(error)
        read = _snapshot()
    return read
