"""Peaks of every phase, while the user's own peak figures stay exactly what they would have been.

The allocator keeps one set of peak counters a device. A phase's peak needs them reset at each boundary; the user reads
and resets the same ones. So each boundary folds the peaks it is about to reset into a *shadow*; a read through torch
returns max(shadow, counter), and a user's reset first tells the open window its peak, then drops the shadow.

Covered: every reader through torch.cuda and torch.accelerator, which look their C functions up in `torch._C` at each
call. Not covered: C++ readers, and names bound from `torch._C` before the agent came: they see a window's peak.
After `stop()` the counters hold the peak since the last boundary, for the older peaks exist nowhere else.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from .guard import leave_no_frame
from .probe import Reading
from .wire import BOUND

Stats = dict[str, Any]

_NAMES = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
_OVERSIZE = ("oversize_allocations", "oversize_segments")
_POOLS = ("all", "small_pool", "large_pool")
_PRIVATE = "reserved_bytes_by_private_pools"
_folded: Callable[[Stats], tuple[dict[str, Stats], ...]] = itemgetter(*_NAMES)
_reading: Callable[[type[Reading], tuple[Any, ...]], Reading] = tuple.__new__  # without the detour through __new__
_QUIET_CHECKS = 256  # after so many checks without a foreign allocation, check one boundary in sixteen


class _Shadow:
    """One device's peaks from before the last boundary, and what a user's reset took from the open window."""

    __slots__ = ("boundaries", "carried", "carried_reserved", "oversize", "peaks", "private", "quiet", "resets")

    def __init__(self) -> None:
        self.carried = 0
        self.carried_reserved = 0
        self.resets = 0  # how often the user reset: a boundary that a reset interrupts must not bring old peaks back
        self.boundaries = 0
        self.quiet = 0
        self.drop()

    def drop(self) -> None:
        self.peaks = [0] * (3 * len(_NAMES))
        self.oversize = [0, 0]
        self.private: dict[Any, list[int]] = {}

    def fold(self, stats: Stats) -> None:
        """Raise the shadow to the peaks in `stats`. Written flat: it runs at every boundary."""
        peaks = self.peaks
        i = 0
        for stat in _folded(stats):
            both, small, large = stat.values()  # torch fills them in the order of _POOLS
            peak = both["peak"]
            if peak > peaks[i]:
                peaks[i] = peak
            peak = small["peak"]
            if peak > peaks[i + 1]:
                peaks[i + 1] = peak
            peak = large["peak"]
            if peak > peaks[i + 2]:
                peaks[i + 2] = peak
            i += 3
        oversize = self.oversize
        peak = stats["oversize_allocations"]["peak"]
        if peak > oversize[0]:
            oversize[0] = peak
        peak = stats["oversize_segments"]["peak"]
        if peak > oversize[1]:
            oversize[1] = peak
        private = stats.get(_PRIVATE)
        if private or self.private:
            self._fold_private(private or {})

    def _fold_private(self, private: dict[Any, Stats]) -> None:
        known = self.private
        self.private = {
            pool: [max(p, stat[name]["peak"]) for p, name in zip(known.get(pool, (0, 0, 0)), _POOLS, strict=True)]
            for pool, stat in private.items()
        }

    def lift(self, stats: Stats) -> None:
        """Raise the peaks in `stats` to the shadow's: what the user would have read."""
        peaks = iter(self.peaks)
        for stat in _folded(stats):
            for pool in _POOLS:
                peak = next(peaks)
                if peak > stat[pool]["peak"]:
                    stat[pool]["peak"] = peak
        for name, peak in zip(_OVERSIZE, self.oversize, strict=True):
            if peak > stats[name]["peak"]:
                stats[name]["peak"] = peak
        for key, stat in stats.get(_PRIVATE, {}).items():
            for pool, peak in zip(_POOLS, self.private.get(key, ()), strict=False):
                if peak > stat[pool]["peak"]:
                    stat[pool]["peak"] = peak


class Peaks:
    """Reads the CUDA (or ROCm) allocator at boundaries. Wraps torch's readers unless `bounds`: then it never resets."""

    def __init__(self, *, bounds: bool = False, own_threads: int = 0) -> None:
        from torch import _C

        self._C = _C
        self.bounds = bounds
        self.read: Callable[[int], Stats] = _C._cuda_memoryStats
        self.reset: Callable[[int], None] = _C._cuda_resetPeakMemoryStats
        self.own_threads = own_threads  # of those that Python counts
        self._shadows: dict[int, _Shadow] = {}
        self._replaced: dict[str, Callable[..., Any]] = {}
        if not bounds:
            self._install()

    def _install(self) -> None:
        for name, make in (
            ("_cuda_memoryStats", self._reader),
            ("_accelerator_getDeviceStats", self._reader),
            ("_cuda_resetPeakMemoryStats", self._resetter),
            ("_accelerator_resetPeakStats", self._resetter),
        ):
            original = getattr(self._C, name, None)  # torch.accelerator's came with 2.9
            if original is not None:
                self._replaced[name] = original
                setattr(self._C, name, make(original))

    def stop(self) -> None:
        for name, original in self._replaced.items():
            setattr(self._C, name, original)
        self._replaced.clear()

    def _reader(self, original: Callable[[int], Stats]) -> Callable[[int], Stats]:
        shadows = self._shadows

        def read(device: int) -> Stats:
            try:
                stats = original(device)
            except BaseException as error:
                leave_no_frame(error)
                raise
            shadow = shadows.get(device)
            if shadow is not None:
                shadow.lift(stats)
            return stats

        return read

    def _resetter(self, original: Callable[[int], None]) -> Callable[[int], None]:
        shadows = self._shadows

        def reset(device: int) -> None:
            shadow = shadows.get(device)
            if shadow is None:  # the load window is open on every device
                shadow = shadows[device] = _Shadow()
            stats = self.read(device)
            peak = stats["allocated_bytes"]["all"]["peak"]
            if peak > shadow.carried:
                shadow.carried = peak
            peak = stats["reserved_bytes"]["all"]["peak"]
            if peak > shadow.carried_reserved:
                shadow.carried_reserved = peak
            shadow.resets += 1
            original(device)
            shadow.drop()

        return reset

    def boundary(self, device: int) -> Reading:
        """Close the device's window: read once, reset its peaks, and give what was read.

        While other Python threads run, a second read tells whether one of them allocated between the two calls: its
        peak may be lost, so the reading is marked a bound. After 256 quiet checks every sixteenth boundary is checked.
        """
        shadow = self._shadows.get(device)
        if shadow is None:
            shadow = self._shadows[device] = _Shadow()
        resets = shadow.resets
        stats = self.read(device)
        allocated = stats["allocated_bytes"]["all"]
        reserved = stats["reserved_bytes"]["all"]
        peak, reserved_peak = allocated["peak"], reserved["peak"]
        flags = 0
        if self.bounds:
            flags = BOUND
        else:
            shadow.fold(stats)  # before the reset, or a reader in another thread would see the peak missing
            self.reset(device)
            if resets != shadow.resets:
                shadow.drop()
            if shadow.carried or shadow.carried_reserved:
                peak, reserved_peak = max(peak, shadow.carried), max(reserved_peak, shadow.carried_reserved)
                shadow.carried = shadow.carried_reserved = 0
            if _thread._count() > self.own_threads:
                shadow.boundaries += 1
                if shadow.quiet < _QUIET_CHECKS or not shadow.boundaries & 15:
                    after = self.read(device)
                    if after["allocation"]["all"]["allocated"] != stats["allocation"]["all"]["allocated"]:
                        flags, shadow.quiet = BOUND, 0
                    else:
                        shadow.quiet += 1
        return _reading(
            Reading,
            (
                allocated["current"],
                peak,
                reserved["current"],
                reserved_peak,
                stats["active_bytes"]["all"]["current"],
                stats["inactive_split_bytes"]["all"]["current"],
                stats["requested_bytes"]["all"]["current"],
                stats["allocation"]["all"]["current"],
                stats["num_alloc_retries"],
                stats["num_ooms"],
                flags,
                None,
            ),
        )
