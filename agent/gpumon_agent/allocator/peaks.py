"""Peaks of every phase, while the user's own peak figures stay exactly what they would have been.

The allocator keeps one set of peak counters a device. A phase's peak needs them reset at each boundary; the user reads
and resets the same ones. So each boundary folds the peaks it is about to reset into a *shadow*; a read through torch
returns max(shadow, counter), and a user's reset first tells the open window its peak, then drops the shadow.

Covered: every reader through torch.cuda and torch.accelerator, which look their C functions up in `torch._C` at each
call. Not covered: C++ readers, and names bound from `torch._C` before the agent came: they see a window's peak.

After `stop()` the counters hold the peak since the last boundary, and older ones exist in the shadow alone: nothing can
put them back. So the four functions stay wrapped until no counter is below its shadow: until the user's next reset of
each device, or a read that finds the counters caught up. Until then a read costs a microsecond more, and nothing else.
"""

from __future__ import annotations

from _thread import _count as _python_threads
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import Any

from gpumon_agent.patching import Patches
from gpumon_agent.registry import REGISTRY
from gpumon_agent.wire import BOUND

Stats = dict[str, Any]

_NAMES = (
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
    "allocation",
    "segment",
    "active",
    "inactive_split",
)
_OVERSIZE = ("oversize_allocations", "oversize_segments")
_POOLS = ("all", "small_pool", "large_pool")
_PRIVATE = "reserved_bytes_by_private_pools"
_HELD_MAX = 64  # readings as torch gave them, some 12 KB each
_QUIET_CHECKS = 256  # after so many checks without a foreign allocation, check one boundary in sixteen


def figures(stats: Stats, flags: int = 0) -> tuple[Any, ...]:
    """Of what torch's allocator tells of itself, what a Reading holds, in its order."""
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return (
        allocated["current"], allocated["peak"], reserved["current"], reserved["peak"],
        stats["active_bytes"]["all"]["current"], stats["inactive_split_bytes"]["all"]["current"],
        stats["requested_bytes"]["all"]["current"], stats["allocation"]["all"]["current"],
        stats["num_alloc_retries"], stats["num_ooms"], flags, None,
    )  # fmt: skip


class _Past:
    """Peaks of before the last boundaries. Never changed once made: any thread may be reading it."""

    __slots__ = ("oversize", "peaks", "private")

    def __init__(self) -> None:
        self.peaks = [0] * (3 * len(_NAMES))
        self.oversize = [0, 0]
        self.private: dict[Any, list[int]] = {}

    def raised(self, readings: Iterable[Stats]) -> _Past:
        """One more, with the peaks of `readings`, oldest first."""
        past = _Past()
        peaks, oversize, private = self.peaks.copy(), self.oversize, self.private
        for stats in readings:
            for i, (stat, pool) in enumerate(_pools(stats)):
                peak = stat[pool]["peak"]
                if peak > peaks[i]:
                    peaks[i] = peak
            oversize = [max(p, stats[name]["peak"]) for p, name in zip(oversize, _OVERSIZE, strict=True)]
            private = {
                key: [max(p, stat[name]["peak"]) for p, name in zip(private.get(key, (0, 0, 0)), _POOLS, strict=True)]
                for key, stat in stats.get(_PRIVATE, {}).items()
            }
        past.peaks, past.oversize, past.private = peaks, oversize, private
        return past

    def lift(self, stats: Stats) -> bool:
        """Raise the peaks in `stats` to these: what the user would have read. Whether any was below."""
        lifted = False
        for peak, (stat, pool) in zip(self.peaks, _pools(stats), strict=True):
            if peak > stat[pool]["peak"]:
                stat[pool]["peak"] = peak
                lifted = True
        for name, peak in zip(_OVERSIZE, self.oversize, strict=True):
            if peak > stats[name]["peak"]:
                stats[name]["peak"] = peak
                lifted = True
        for key, stat in stats.get(_PRIVATE, {}).items():
            for pool, peak in zip(_POOLS, self.private.get(key, ()), strict=False):
                if peak > stat[pool]["peak"]:
                    stat[pool]["peak"] = peak
                    lifted = True
        return lifted


def _pools(stats: Stats) -> Iterator[tuple[Stats, str]]:
    return ((stats[name], pool) for name in _NAMES for pool in _POOLS)


class _Shadow:
    """One device's peaks from before the last boundary, and what a user's reset took from the open window."""

    __slots__ = ("_folding", "boundaries", "carried", "carried_reserved", "held", "quiet", "resets")

    def __init__(self) -> None:
        self.carried = 0
        self.carried_reserved = 0
        self.resets = 0  # how often the user reset: a boundary that a reset interrupts must not bring old peaks back
        self.boundaries = 0
        self.quiet = 0
        self._folding = Lock()  # tried, never waited for
        self.drop()

    def drop(self) -> None:
        self.held: list[Any] = [_Past()]  # and the readings since, as torch gave them. Another list at each reset:
        # who folds an older one at this moment brings nothing back

    def fold(self) -> None:
        """Make one of all that is held. Appending goes on meanwhile, and so does reading."""
        if self._folding.acquire(blocking=False):
            try:
                held = self.held
                past, *readings = known = list(held)
                if readings:
                    held[: len(known)] = [past.raised(readings)]
            finally:
                self._folding.release()

    def lift(self, stats: Stats) -> bool:
        past, *readings = list(self.held)
        return bool((past.raised(readings) if readings else past).lift(stats))


def _asked(device: int) -> int:
    return device


def _never() -> bool:
    """Also while a compiler traces: what is traced without a compiler of its own really reads."""
    return False


class Peaks:
    """Reads the CUDA (or ROCm) allocator at boundaries. Wraps torch's readers unless `bounds`: then it never resets."""

    __slots__ = ("_C", "_installed", "_leaving", "_patches", "_shadows", "bounds", "read", "reset")

    def __init__(self, *, bounds: bool = False) -> None:
        from torch import _C

        self._C = _C
        self.bounds = bounds
        self._shadows: dict[int, _Shadow] = {}
        self._patches = Patches()
        self._installed = False
        self._leaving = False
        for before in REGISTRY.lingering[:]:  # watched again after stop(): the older peaks are still the user's
            self._shadows.update(before._shadows)
            before._shadows.clear()
            before._uninstall()
        self.read: Callable[[int], Stats] = _C._cuda_memoryStats
        self.reset: Callable[[int], None] = _C._cuda_resetPeakMemoryStats
        if not bounds:
            self._install()
        elif self._shadows:
            self._install()
            self.stop()

    def _install(self) -> None:
        self._installed = True
        for name, before, after in (
            ("_cuda_memoryStats", _asked, self._read),
            ("_accelerator_getDeviceStats", _asked, self._read),
            ("_cuda_resetPeakMemoryStats", self._reset_begins, self._reset_ends),
            ("_accelerator_resetPeakStats", self._reset_begins, self._reset_ends),
        ):
            if hasattr(self._C, name):  # torch.accelerator's came with 2.9
                self._patches.observe(self._C, name, before, after, inert=_never)

    def stop(self) -> None:
        """No boundary comes any more. Torch is as it was found as soon as no peak is missing from its counters."""
        self._leaving = True
        self._fold()
        if self._installed:
            REGISTRY.lingering[:] = [self]
            self._forget(None)

    def _forget(self, device: int | None) -> None:
        """After `stop`: the counters of `device` tell what the user would have read."""
        self._shadows.pop(device, None)  # type: ignore[arg-type]
        if not self._shadows:
            self._uninstall()

    def _uninstall(self) -> None:
        self._patches.restore()
        self._installed = False
        if self in REGISTRY.lingering:
            REGISTRY.lingering.remove(self)

    def _read(self, device: int, stats: Stats, error: BaseException | None) -> None:
        shadow = self._shadows.get(device)
        if error is None and shadow is not None and not shadow.lift(stats) and self._leaving:
            self._forget(device)

    def _reset_begins(self, device: int) -> int:
        if not self._leaving:
            shadow = self._shadows.get(device)
            if shadow is None:  # the load window is open on every device
                shadow = self._shadows[device] = _Shadow()
            stats = self.read(device)
            peak = stats["allocated_bytes"]["all"]["peak"]
            if peak > shadow.carried:
                shadow.carried = peak
            peak = stats["reserved_bytes"]["all"]["peak"]
            if peak > shadow.carried_reserved:
                shadow.carried_reserved = peak
            shadow.resets += 1
        return device

    def _reset_ends(self, device: int, _: None, error: BaseException | None) -> None:
        if error is not None:
            return
        if self._leaving:
            self._forget(device)
        else:
            self._shadows[device].drop()

    def boundary(self, device: int) -> tuple[Any, ...] | Stats:
        """Close the device's window: read once, reset its peaks, and give what was read: `figures`, or what they are
        made of.

        While other Python threads run, a second read tells whether one of them allocated between the two calls: its
        peak may be lost, so the reading is marked a bound. After 256 quiet checks every sixteenth boundary is checked.

        It runs at every boundary, where training has left nothing of it in the caches: what can be done later, is.
        """
        shadow = self._shadows.get(device)
        if shadow is None:
            shadow = self._shadows[device] = _Shadow()
        resets = shadow.resets
        stats = self.read(device)
        if self.bounds:
            return figures(stats, BOUND)
        # into the shadow before the reset, or a reader in another thread would see the peak missing
        shadow.held.append(stats)
        self.reset(device)
        if resets != shadow.resets:
            shadow.drop()
        flags = 0
        if _python_threads():
            flags = self._check(shadow, stats["allocation"]["all"], device)
        if len(shadow.held) > _HELD_MAX:
            shadow.fold()
        if not flags and not shadow.carried and not shadow.carried_reserved:
            return stats
        allocated, peak, reserved, reserved_peak, *others = figures(stats, flags)
        peak, reserved_peak = max(peak, shadow.carried), max(reserved_peak, shadow.carried_reserved)
        shadow.carried = shadow.carried_reserved = 0
        return allocated, peak, reserved, reserved_peak, *others

    def _fold(self) -> None:
        for shadow in list(self._shadows.values()):
            shadow.fold()

    def _check(self, shadow: _Shadow, allocation: Stats, device: int) -> int:
        """BOUND if somebody has allocated since `allocation` was read."""
        shadow.boundaries += 1
        if shadow.quiet >= _QUIET_CHECKS and shadow.boundaries & 15:
            return 0
        if self.read(device)["allocation"]["all"]["allocated"] != allocation["allocated"]:
            shadow.quiet = 0
            return BOUND
        shadow.quiet += 1
        return 0
