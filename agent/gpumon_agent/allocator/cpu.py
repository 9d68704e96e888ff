"""The CPU as a device: resident memory, and optionally all live storages.

torch has no statistics of CPU memory. By default only the RSS is known, from /proc (None if there is none).
`GPUMON_TRACK_CPU=1` (`gpumon run --track-cpu`) adds `StorageTracker`; see there for its cost and side effects.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import Any

from gpumon_agent.allocator import Reading
from gpumon_agent.guard import pass_on
from gpumon_agent.patching import Patches
from gpumon_agent.registry import REGISTRY
from gpumon_agent.unseen import unseen
from gpumon_agent.wire import Device

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class CpuProbe:
    """One device, index 0."""

    kind = "cpu"

    def __init__(self, tracker: StorageTracker | None = None) -> None:
        self._tracker = tracker

    def boundary(self, device: int) -> Reading:
        tracker = self._tracker
        if tracker is None or tracker.off:
            return Reading(rss=resident_bytes())
        allocated, peak, allocations = tracker.window()
        return Reading(
            allocated=allocated,
            allocated_peak=peak,
            requested=allocated,  # storages count by their requested size
            allocations=allocations,
            rss=resident_bytes(),
        )

    def devices(self) -> tuple[Device, ...]:
        name = os.uname().machine  # platform.processor() starts a process, and this is the training thread
        return (Device(0, None, name, os.sysconf("SC_PHYS_PAGES") * _PAGE_BYTES, self.kind),)

    def stop(self) -> None:
        if self._tracker is not None:
            self._tracker.stop()


def resident_bytes() -> int | None:
    """Resident memory of this process, in bytes. 3 µs; no file stays open."""
    try:
        handle = os.open("/proc/self/statm", os.O_RDONLY)
    except OSError as error:
        pass_on(error)
        return None
    try:
        _, pages, *_ = os.read(handle, 256).split()
        return int(pages) * _PAGE_BYTES
    finally:
        os.close(handle)


class _Live(weakref.ref[Any]):
    """A reference to a storage; keeps identity and bytes, which the tracker subtracts after the storage was freed."""

    __slots__ = ("identity", "nbytes")
    identity: int
    nbytes: int


class StorageTracker:
    """Exact bytes of the CPU storages returned by this thread's operators, and their peak.

    Model: a TorchDispatchMode sees every operator's results; a storage counts until it is freed. Its Python object
    lives as long as the storage, so a weak reference reports that.
    Cost: 10 to 20 µs per operator, so steps of small operators take three to four times as long;
    constant over the run.
    Side effects: results are bit-identical. torch.compile does not work under a dispatch mode (it raises with
    fullgraph=True), and no mode sees the allocations of compiled code. So the first `torch.compile` ends the tracking,
    and the bytes are None from then on.
    Known limitations: an operator's temporary memory (convolution workspaces) is not seen. Storages from before
    `start`, from other threads or from NumPy are seen only when an operator of this thread returns them. Under any
    dispatch mode a TorchFunctionMode sees the `set_` of torch.load.
    """

    def __init__(self) -> None:
        self.off = False
        self._live: dict[int, _Live] = {}
        self._gone: deque[_Live] = deque()  # appended to in the thread that drops the last reference
        self._allocated = 0
        self._peak = 0
        self._mode: Any = None
        self._patches = Patches()
        self._tensor: Any = object
        self._plain: Any = iter

    def start(self) -> None:
        """Starts to track the calling thread's operators."""
        import torch
        from torch import Tensor
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils.data import _utils

        from gpumon_agent.storages import plain

        self._tensor, self._plain = Tensor, plain
        see = self._see
        worker = _utils.worker
        tracker = self
        reads_unseen = unseen()

        class TrackStorages(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                if not tracker.off:
                    if worker._worker_info is None:
                        with reads_unseen():
                            see(result)
                    else:
                        tracker.off = True  # a DataLoader worker
                return result

        self._mode = TrackStorages()
        self._mode.__enter__()
        self._patches.observe(torch, "compile", lambda *_, **__: self.stop(), lambda *_: None)
        REGISTRY.trackers.append(self)

    def in_child(self) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops tracking. The mode itself can be removed only if no other mode is above it."""
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        self.off = True
        if self in REGISTRY.trackers:
            REGISTRY.trackers.remove(self)
        self._patches.restore()
        if self._mode is not None and _get_current_dispatch_mode() is self._mode:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def window(self) -> tuple[int, int, int]:
        """(allocated bytes, their peak since the last call, live storages)."""
        self._settle()
        peak, self._peak = self._peak, self._allocated
        return self._allocated, peak, len(self._live)

    def _see(self, value: Any) -> None:
        if isinstance(value, self._tensor):
            if value.device.type == "cpu":
                self._count(value)
        elif isinstance(value, (list, tuple)):
            for each in value:
                self._see(each)

    def _count(self, tensor: Any) -> None:
        self._settle()
        for part in self._plain(tensor):
            storage = part.untyped_storage()
            identity, nbytes = storage._cdata, storage.nbytes()
            known = self._live.get(identity)
            if known is None:
                known = self._live[identity] = _Live(storage, self._gone.append)
                known.identity, known.nbytes = identity, 0
            self._allocated += nbytes - known.nbytes  # a known one may have been resized
            known.nbytes = nbytes
        self._peak = max(self._peak, self._allocated)

    def _settle(self) -> None:
        """Subtracts freed storages. Call it before adding any: identities are reused at once."""
        gone = self._gone
        while gone:
            dead = gone.popleft()
            if self._live.get(dead.identity) is dead:
                del self._live[dead.identity]
                self._allocated -= dead.nbytes
