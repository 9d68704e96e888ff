"""Measures the peak of every phase, and keeps the user's peak figures exactly as they would be without us.

The allocator has one set of peak counters per device. We reset them at each boundary; the user reads and resets the
same ones. So each boundary saves the peaks in a *shadow* before it resets them. A read through torch returns
max(shadow, counter). A user's reset first saves the peak for the open window, then drops the shadow.

Covered: all functions of torch.cuda and torch.accelerator, which look up their C functions in `torch._C` at each call.
Not covered: C++ readers, and names bound from `torch._C` before the agent started: they see the window's peak.

After `stop()` the counters hold the peak since the last boundary; older peaks exist only in the shadow, and counters
cannot be set. So the four functions stay wrapped until no counter is below its shadow: until the user's next reset of
each device, or a read that finds the counters caught up. Until then a read costs 1 µs more.
"""

from __future__ import annotations

from _thread import _count as _python_threads
from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from typing import Any

from gpumon_agent.allocator import native
from gpumon_agent.allocator.native import DISTURBED, READ, RESET
from gpumon_agent.guard import say
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
_HELD_MAX = 64  # stats dicts, about 12 KB each
_QUIET_CHECKS = 256  # after so many checks without a foreign allocation, check one boundary in sixteen
PROOFS = 3  # native readings that must equal torch's before one is used
RESET_AND_CHECK = RESET | native.CHECK


def figures(stats: Stats, flags: int = 0) -> tuple[Any, ...]:
    """The fields of a Reading, in order, from torch's memory stats."""
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    return (
        allocated["current"], allocated["peak"], reserved["current"], reserved["peak"],
        stats["active_bytes"]["all"]["current"], stats["inactive_split_bytes"]["all"]["current"],
        stats["requested_bytes"]["all"]["current"], stats["allocation"]["all"]["current"],
        stats["num_alloc_retries"], stats["num_ooms"], flags, None,
    )  # fmt: skip


class _Past:
    """Peaks before the last boundaries. Immutable: any thread may read it."""

    __slots__ = ("peaks", "private")

    def __init__(self) -> None:
        self.peaks = list(native.Peaks())
        self.private: dict[Any, list[int]] = {}

    def raised(self, readings: Iterable[Stats]) -> _Past:
        """A new instance, raised to the peaks of `readings` (oldest first)."""
        past = _Past()
        peaks, private = self.peaks.copy(), self.private
        for stats in readings:
            for i, counter in enumerate(_counters(stats)):
                peak = counter["peak"]
                if peak > peaks[i]:
                    peaks[i] = peak
            private = {
                key: [max(p, stat[name]["peak"]) for p, name in zip(private.get(key, (0, 0, 0)), _POOLS, strict=True)]
                for key, stat in stats.get(_PRIVATE, {}).items()
            }
        past.peaks, past.private = peaks, private
        return past

    def lift(self, stats: Stats, read: Iterable[int]) -> bool:
        """Raises the peaks in `stats` to the user's values. Whether any was below. `read`: peaks read natively."""
        lifted = False
        for peak, counter in zip(map(max, self.peaks, read), _counters(stats), strict=True):
            if peak > counter["peak"]:
                counter["peak"] = peak
                lifted = True
        for key, stat in stats.get(_PRIVATE, {}).items():
            for pool, peak in zip(_POOLS, self.private.get(key, ()), strict=False):
                if peak > stat[pool]["peak"]:
                    stat[pool]["peak"] = peak
                    lifted = True
        return lifted


def _counters(stats: Stats) -> Iterator[Stats]:
    """All 29 that have a peak, in the order of native.cpp."""
    yield from (stats[name][pool] for name in _NAMES for pool in _POOLS)
    yield from (stats[name] for name in _OVERSIZE)


class _Shadow:
    """One device's peaks before the last boundary, and the open window's peaks before a user's reset."""

    __slots__ = (
        "_folding", "boundaries", "carried", "carried_reserved", "earlier", "held", "measured", "quiet", "read",
        "resets",
    )  # fmt: skip

    def __init__(self) -> None:
        self.carried = 0
        self.carried_reserved = 0
        self.resets = 0  # user's resets: a boundary interrupted by one must not restore old peaks
        self.boundaries = 0
        self.quiet = 0
        self.measured = (0, 0)  # peaks (allocated, reserved) since `Peaks.measure`, until the user's newest reset
        self._folding = Lock()  # never waited for
        self.drop()

    def drop(self) -> None:
        self.held: list[Any] = [_Past()]  # and the stats since. A new list at each reset: a concurrent fold of the
        # old one must not restore old peaks
        self.read = native.Peaks()  # peaks of the boundaries that were read natively
        self.earlier: _Past | None = None  # before `Peaks.measure`

    def fold(self) -> None:
        """Merges the held stats into one `_Past`. Other threads may append and read meanwhile."""
        if self._folding.acquire(blocking=False):
            try:
                held = self.held
                past, *readings = known = list(held)
                if readings:
                    held[: len(known)] = [past.raised(readings)]
            finally:
                self._folding.release()

    def lift(self, stats: Stats) -> bool:
        """Raises the peaks in `stats` to the user's. Whether any was below."""
        earlier, lifted = self.earlier, self._lift(stats)
        return (earlier is not None and earlier.lift(stats, native.Peaks())) or lifted

    def _lift(self, stats: Stats) -> bool:
        past, *readings = list(self.held)
        return bool((past.raised(readings) if readings else past).lift(stats, self.read))

    def so_far(self, stats: Stats) -> tuple[int, int]:
        """(allocated, reserved): peaks since `Peaks.measure`. `stats`: of now; they are raised."""
        self._lift(stats)
        allocated, reserved = self.measured
        return (
            max(allocated, stats["allocated_bytes"]["all"]["peak"]),
            max(reserved, stats["reserved_bytes"]["all"]["peak"]),
        )


def _carried(shadow: _Shadow, read: tuple[Any, ...]) -> tuple[Any, ...]:
    """`read`, with the peaks before a user's reset in the same window."""
    allocated, peak, reserved, reserved_peak, *others = read
    peak, reserved_peak = max(peak, shadow.carried), max(reserved_peak, shadow.carried_reserved)
    shadow.carried = shadow.carried_reserved = 0
    return allocated, peak, reserved, reserved_peak, *others


def _device_argument(device: int) -> int:
    return device


def _never() -> bool:
    """Never inert, not even while a compiler traces: the wrapped functions really run then."""
    return False


class Peaks:
    """Reads the CUDA (or ROCm) allocator at boundaries. Wraps torch's readers unless `bounds`: then it never resets."""

    __slots__ = (
        "_C", "_installed", "_leaving", "_native", "_patches", "_proofs_left", "_shadows", "_tell", "_unused",
        "before_reset", "bounds", "read", "reset",
    )  # fmt: skip

    def __init__(self, *, bounds: bool = False, tell: Callable[[str], None] = say) -> None:
        """`tell`: called with a sentence if the native reader is switched off."""
        from torch import _C

        self._C = _C
        self.bounds = bounds
        self._shadows: dict[int, _Shadow] = {}
        self._patches = Patches()
        self._installed = False
        self._leaving = False
        self.before_reset: Callable[[], object] = int
        self._tell = tell
        self._native = None if bounds else native.load()
        self._proofs_left = PROOFS
        self._unused = native.Peaks()
        for before in REGISTRY.lingering[:]:  # started again after stop(): keep the user's older peaks
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
            ("_cuda_memoryStats", _device_argument, self._read),
            ("_accelerator_getDeviceStats", _device_argument, self._read),
            ("_cuda_resetPeakMemoryStats", self._reset_begins, self._reset_ends),
            ("_accelerator_resetPeakStats", self._reset_begins, self._reset_ends),
        ):
            if hasattr(self._C, name):  # torch.accelerator's exist since 2.9
                self._patches.observe(self._C, name, before, after, inert=_never)

    def stop(self) -> None:
        """No more boundaries. Unwraps torch's functions once no counter is below its shadow."""
        self._leaving = True
        self._fold()
        if self._installed:
            REGISTRY.lingering[:] = [self]
            self._forget(None)

    def _forget(self, device: int | None) -> None:
        """After `stop`: the counters of `device` are right without the shadow."""
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

    def noted(self, device: int) -> Any:
        """What a native reading of ours raises to the peaks before it: others may close the device's windows, too, if
        they stop before a user's reset (`before_reset`). None: not natively.
        """
        shadow = self._shadows.get(device)
        if self._native is None or self._proofs_left or shadow is None or shadow.carried or shadow.carried_reserved:
            return None
        return shadow.read

    def _reset_begins(self, device: int) -> int:
        if not self._leaving:
            self.before_reset()
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
            shadow.measured = shadow.so_far(stats)
            shadow.resets += 1
        return device

    def _reset_ends(self, device: int, _: None, error: BaseException | None) -> None:
        if error is not None:
            return
        if self._leaving:
            self._forget(device)
        else:
            self._shadows[device].drop()

    def measure(self, device: int) -> None:
        """Begins to measure the device's peaks for `measured`. Neither the open window nor the user loses one."""
        if self.bounds:
            return
        self._reset_begins(device)
        shadow = self._shadows[device]
        stats = self.read(device)
        shadow.lift(stats)
        self.reset(device)
        shadow.drop()
        shadow.earlier = _Past().raised([stats])
        shadow.measured = (0, 0)

    def measured(self, device: int) -> tuple[int, int] | None:
        """(allocated, reserved): the device's peaks since `measure`, or since the process began. None: not known."""
        if self.bounds:
            return None
        shadow = self._shadows.get(device) or _Shadow()
        return shadow.so_far(self.read(device))

    def boundary(self, device: int) -> tuple[Any, ...] | Stats:
        """Closes the device's window: reads once, resets the peaks, and returns `figures` or the stats they come from.

        While other Python threads run, a second read detects allocations between read and reset, whose peak may be
        lost: the reading is then marked as a bound. After 256 quiet checks only every 16th boundary is checked.

        It runs at every boundary with cold caches, so all work that can wait is deferred.
        """
        shadow = self._shadows.get(device)
        if shadow is None:
            shadow = self._shadows[device] = _Shadow()
        resets = shadow.resets
        if self._native is not None and not self._proofs_left:
            read = native.Figures()
            said = self._native(device, read, shadow.read, RESET_AND_CHECK if _python_threads() else RESET)
            if READ <= said <= DISTURBED:
                if resets != shadow.resets:
                    shadow.drop()
                found = (*read, BOUND if said else 0, None)
                return _carried(shadow, found) if shadow.carried or shadow.carried_reserved else found
        stats = self.read(device)
        if self.bounds:
            return figures(stats, BOUND)
        if self._native is not None and self._proofs_left:
            self._prove(self._native, device, stats)
        # into the shadow before the reset: a reader in another thread must not miss the peak
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
        return _carried(shadow, figures(stats, flags))

    def end(self, device: int) -> tuple[int, int]:
        """(allocated, live blocks) now. Resets nothing."""
        if self._native is not None and not self._proofs_left:
            read = native.Figures()
            if self._native(device, read, self._unused, 0) == READ:
                return read[0], read[7]
        stats = self.read(device)
        return stats["allocated_bytes"]["all"]["current"], stats["allocation"]["all"]["current"]

    def window(self, device: int) -> tuple[int, int]:
        """(highest allocated since the last boundary, reserved now). Resets nothing."""
        stats, shadow = self.read(device), self._shadows.get(device)
        peak = stats["allocated_bytes"]["all"]["peak"]
        return max(peak, shadow.carried if shadow is not None else 0), stats["reserved_bytes"]["all"]["current"]

    def _prove(self, read_natively: native.Boundary, device: int, stats: Stats) -> None:
        """Compares a native reading with `stats`, to the byte. Another thread may have allocated between the two."""
        read, peaks = native.Figures(), native.Peaks()
        if read_natively(device, read, peaks, 0) != READ:
            return
        if (*read, 0, None) == figures(stats) and list(peaks) == [counter["peak"] for counter in _counters(stats)]:
            self._proofs_left -= 1
        elif not _python_threads():
            self._native = None
            self._tell("the native reader of the allocator is not used: it differs from torch.cuda.memory_stats()")

    @property
    def native(self) -> bool:
        """Whether the native reader is used, or will be after its first readings have proved right."""
        return self._native is not None

    def _fold(self) -> None:
        for shadow in list(self._shadows.values()):
            shadow.fold()

    def _check(self, shadow: _Shadow, allocation: Stats, device: int) -> int:
        """BOUND if another thread has allocated since `allocation` was read."""
        shadow.boundaries += 1
        if shadow.quiet >= _QUIET_CHECKS and shadow.boundaries & 15:
            return 0
        if self.read(device)["allocation"]["all"]["allocated"] != allocation["allocated"]:
            shadow.quiet = 0
            return BOUND
        shadow.quiet += 1
        return 0
