"""The devices that training uses, their readers, and their memory limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from gpumon_agent import environment, wire
from gpumon_agent.allocator import Probe, Reader
from gpumon_agent.allocator.accelerator import told
from gpumon_agent.guard import say

if TYPE_CHECKING:
    from torch.nn import Module

    from gpumon_agent.allocator.cpu import StorageTracker
    from gpumon_agent.allocator.cuda import CudaProbe, Oom
    from gpumon_agent.allocator.peaks import Peaks


SLICE_TENSORS = 4096


class Devices:
    """One probe per backend, created when a model is first found there; CUDA's at once."""

    def __init__(
        self,
        models: Callable[[], Iterable[Module]],
        oom: Oom,
        *,
        bounds: bool,
        tracker: StorageTracker | None,
        tell: Callable[[str], None],
    ) -> None:
        self.found: tuple[wire.Device, ...] = ()
        self.limits: dict[int, int] = {}  # CUDA device → bytes: the total times the user's memory fraction
        self.fractions: dict[str, str] = {}  # memory fractions below 1 set by the user
        self._models = models
        self._tell = tell
        self._told: set[str] = set()  # backends whose limits were told
        self._seen: set[tuple[str, int]] = set()  # devices of the models' tensors, found so far by this search
        self._known: set[tuple[str, int]] = set()  # the same, from the last complete search
        self._looking: Iterator[None] | None = None
        self._tracker = tracker or _asked_for()
        self._cuda = _cuda(oom, bounds, tell)
        self._probes: dict[str, Probe] = {} if self._cuda is None else {"cuda": self._cuda}

    def readers(self) -> tuple[Reader, ...]:
        """Readers of the devices with the models' tensors; if there are none, of the current CUDA device (offloading),
        else of the CPU."""
        self._seen = set()
        self._looking = _places(self._models(), self._seen)
        self.look_on()
        return self._readers_of(self._seen | self._known)

    @property
    def looking(self) -> bool:
        return self._looking is not None

    def look_on(self) -> tuple[Reader, ...] | None:
        """Runs the next slice of the search. Returns the readers once it is complete, else None."""
        if self._looking is None or next(self._looking, self) is not self:
            return None
        self._looking = None
        self._known = self._seen
        return self._readers_of(self._known)

    def _readers_of(self, devices: set[tuple[str, int]]) -> tuple[Reader, ...]:
        import torch

        chosen = {device for device in devices if device[0] not in ("cpu", "meta")}
        if not chosen and torch.cuda.is_initialized():
            chosen = {("cuda", torch.cuda.current_device())}
        if not chosen:
            chosen = {("cpu", 0)}
        if self._cuda is not None and torch.cuda.is_initialized() and not self._cuda.silent:
            self._look_whether_silent(self._cuda)
        probes = {kind: self._probe(kind) for kind, _ in chosen}
        for name in sorted({probe.kind for probe in probes.values()} - self._told - {"cuda", "cpu"}):
            self._told.add(name)
            self._tell(told(name))
        return tuple((probes[kind].boundary, index, torch.device(kind, index)) for kind, index in sorted(chosen))

    def _look_whether_silent(self, cuda: CudaProbe) -> None:
        """A script's CUDAPluggableAllocator has no statistics: every read would raise."""
        import torch

        if torch.cuda.get_allocator_backend() == "pluggable":
            cuda.fall_silent()
            text = "this script's own allocator (CUDAPluggableAllocator) reports no figures: CUDA memory stays unknown"
            say(text)
            self._tell(text)

    def look(self, used: Iterable[Reader]) -> None:
        """Lists the devices, and reads the limits of those in use: a query could initialize another one."""
        self.found = tuple(device for probe in self._probes.values() for device in probe.devices())
        import torch

        fraction = getattr(torch._C, "_cuda_getMemoryFraction", None)  # since torch 2.6
        indices = {index for _, index, where in used if where.type == "cuda"}
        for device in self.found:
            if device.index not in indices or device.kind not in ("cuda", "hip") or device.total_bytes is None:
                continue
            share = 1.0
            if fraction is not None and self._cuda is not None and not self._cuda.silent:
                with torch.cuda.device(device.index):  # torch 2.8 leaves the queried device as the current one
                    share = fraction(device.index)
            self.limits[device.index] = int(share * device.total_bytes)
            if share < 1:
                self.fractions[f"memory_fraction:{device.index}"] = f"{share:.6f}"

    def observe_oom(self, *, began: bool = False) -> None:
        if self._cuda is not None:
            self._cuda.observe_oom(began=began)

    def now(self, device: int) -> tuple[int, int]:
        """(allocated, reserved) of a CUDA device, without closing a window."""
        assert self._cuda is not None
        return self._cuda.now(device)

    def end(self, where: Any) -> tuple[int, int] | None:
        """(allocated, live blocks) of a CUDA device, without closing a window; None for another backend."""
        return self._cuda.end(where.index) if self._cuda is not None and where.type == "cuda" else None

    def noted(self, where: Any) -> Any:
        """Peaks.noted of a CUDA device; None for another backend."""
        peaks = self.peaks
        return peaks.noted(where.index) if peaks is not None and where.type == "cuda" else None

    def window(self, where: Any) -> tuple[int, int] | None:
        """(highest allocated since the last boundary, reserved) of a CUDA device; None for another backend."""
        return self._cuda.window(where.index) if self._cuda is not None and where.type == "cuda" else None

    @property
    def peaks(self) -> Peaks | None:
        """The readers of CUDA's allocator. None: it has none, or no statistics."""
        return self._cuda.peaks if self._cuda is not None else None

    @property
    def native(self) -> bool:
        """Whether CUDA's allocator is read by the native reader."""
        return self._cuda is not None and self._cuda.native

    def stop(self) -> None:
        for probe in self._probes.values():
            probe.stop()

    def _probe(self, kind: str) -> Probe:
        probe = self._probes.get(kind)
        if probe is None:
            if kind == "cpu":
                from gpumon_agent.allocator.cpu import CpuProbe

                probe = CpuProbe(self._tracker)
            else:
                from gpumon_agent.allocator.accelerator import AcceleratorProbe

                probe = AcceleratorProbe(kind)
            self._probes[kind] = probe
        return probe


def _places(models: Iterable[Module], seen: set[tuple[str, int]]) -> Iterator[None]:
    """Adds the devices of the models' tensors to `seen`. Yields after each slice."""
    from gpumon_agent.module_tree import MODULE_AS_TENSORS, tree

    looked = 0
    modules = tree(models)
    for _, reference in modules:
        at, more = 0, True
        while more and (module := reference()) is not None:
            tensors = list(islice(chain(module._parameters.values(), module._buffers.values()), at, at + SLICE_TENSORS))
            at, more = at + SLICE_TENSORS, len(tensors) == SLICE_TENSORS
            seen.update((device.type, device.index or 0) for device in {t.device for t in tensors if t is not None})
            looked += MODULE_AS_TENSORS + len(tensors)
            del module
            tensors.clear()
            if looked >= SLICE_TENSORS:
                looked = 0
                yield


def _cuda(oom: Oom, bounds: bool, tell: Callable[[str], None]) -> CudaProbe | None:
    from torch import _C

    if not hasattr(_C, "_cuda_memoryStats"):
        return None
    from gpumon_agent.allocator.cuda import CudaProbe
    from gpumon_agent.allocator.peaks import Peaks

    return CudaProbe(Peaks(bounds=bounds, tell=tell), oom)


def _asked_for() -> StorageTracker | None:
    if environment.value("GPUMON_TRACK_CPU") != "1":
        return None
    from gpumon_agent.allocator.cpu import StorageTracker

    tracker = StorageTracker()
    tracker.start()
    return tracker
