"""One cell's measurement: figures of each device before, at the peak and after, phases, and tensors that are new.

The peaks are the agent's (`Peaks.measure`), so what the user reads or resets in the cell stays as without it. The agent
is started as in a process that trains already (shim.joining).
"""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple

from gpumon_agent import wire
from gpumon_agent.allocator.cpu import resident_bytes
from gpumon_agent.allocator.peaks import Peaks
from gpumon_agent.guard import protect
from gpumon_agent.notebook.view import DeviceFigures, PhasePeak, View
from gpumon_agent.registry import REGISTRY
from gpumon_agent.shim import joining

PHASES_MAX = 32
"""Rows: names of phases are the user's if they use `gpumon_agent.phase`."""
OOMS_MAX = 3  # looked at: a cell may catch many


class _Now(NamedTuple):
    allocated: int
    reserved: int


class Measurement:
    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._phases: dict[tuple[int, str], PhasePeak] = {}
        self._alive: Any = None
        self._at_oom: Any = None  # alive.Told of the newest out-of-memory
        self._ooms = 0
        self._spent_ns = 0  # by us, as the cell ran
        self._before: dict[int, _Now] = {}
        self._resident = resident_bytes()
        self._had_torch = _torch() is not None
        if self._had_torch:
            from gpumon_agent.notebook.alive import Alive

            if REGISTRY.agent is None and not REGISTRY.finders:
                joining.join(lambda _: None)  # without an optimizer and a device, the agent starts with the first
            _flush()
            self._alive = Alive()
            self._before = _now()
            peaks = _peaks()
            for device in self._before if peaks is not None else ():
                assert peaks is not None
                peaks.measure(device)
        self.drained = protect("notebook", self._follow)
        REGISTRY.followers.add(self)
        self._first_step = _step()
        self._began_ns = time.monotonic_ns()

    def end(self, error: BaseException | None) -> View:
        seconds = (time.monotonic_ns() - self._began_ns - self._spent_ns) / 1e9
        try:
            _flush()
        finally:
            REGISTRY.followers.discard(self)
        torch = _torch()
        if torch is None:
            return View(seconds, note="torch is not imported: there is nothing to measure.")
        from gpumon_agent.notebook.alive import Alive

        after, peaks = _now(), _peaks()
        out_of_memory = isinstance(error, torch.cuda.OutOfMemoryError)
        alive = self._at_oom if out_of_memory else None
        if alive is None:
            alive = (self._alive or Alive(empty=True)).since(self._shell)
        figures = []
        for device, now in after.items():
            had = self._before.get(device, _Now(0, 0))
            peak = self._peak(peaks, device)
            allocated, reserved = peak or (None, None)
            if had != now or now.allocated or allocated or device == torch.cuda.current_device():
                figures.append(
                    DeviceFigures(
                        f"cuda:{device}", had.allocated, had.reserved, allocated, reserved, now.allocated, now.reserved
                    )
                )
        return View(
            seconds,
            devices=tuple(figures),
            phases=tuple(each for each in self._phases.values() if each.peak is not None),
            steps=_step() - self._first_step,
            alive=alive,
            resident=(self._resident, resident_bytes()),
            out_of_memory=str(error) if out_of_memory else None,
            note=self._note(bool(after), peaks),
        )

    def _peak(self, peaks: Peaks | None, device: int) -> tuple[int, int] | None:
        """(allocated, reserved); None: not known."""
        if peaks is not None:
            return peaks.measured(device)
        if self._had_torch:
            return None
        cuda = sys.modules["torch"].cuda  # all of its allocations were made in this cell
        return cuda.max_memory_allocated(device), cuda.max_memory_reserved(device)

    def _note(self, cuda: bool, peaks: Peaks | None) -> str:
        if not self._had_torch:
            return "torch was imported in this cell: phases of a training are seen from the next cell on."
        if not cuda:
            return (
                "CUDA is not in use: torch has no statistics of CPU memory, so its peak is not known. "
                "Listed are tensors on the CPU."
            )
        if peaks is None or peaks.bounds:
            return "The peaks are not known: this allocator or GPUMON_PEAKS=bounds does not tell them."
        return ""

    def _follow(self, events: list[tuple[int, wire.NumberedEvent]]) -> None:
        """Counts the windows that began within the cell. At an out-of-memory, lists what is alive."""
        for _, each in events:
            if isinstance(each, wire.Oom) and self._alive is not None and self._ooms < OOMS_MAX:
                self._ooms += 1
                began_ns = time.monotonic_ns()
                self._at_oom = self._alive.since(self._shell, everything=True)
                self._spent_ns += time.monotonic_ns() - began_ns
            elif isinstance(each, wire.Phase) and each.t_ns - each.duration_ns >= self._began_ns:
                key = each.device, each.phase
                known = self._phases.get(key)
                if known is not None or len(self._phases) < PHASES_MAX:
                    self._phases[key] = _with(known, each)


def _with(known: PhasePeak | None, ended: wire.Phase) -> PhasePeak:
    peaks = [each for each in (known and known.peak, ended.allocated_peak) if each is not None]
    return PhasePeak(ended.phase, ended.device, max(peaks, default=None), (known.windows if known else 0) + 1)


def _step() -> int:
    return REGISTRY.agent.phases.where()[0] if REGISTRY.agent is not None else 0


def _flush() -> None:
    if REGISTRY.agent is not None:
        REGISTRY.agent.flush()


def _torch() -> Any:
    """None: not imported, or not completely."""
    torch = sys.modules.get("torch")
    return None if torch is None or getattr(torch.__spec__, "_initializing", False) else torch


def _peaks() -> Peaks | None:
    return REGISTRY.agent.devices.peaks if REGISTRY.agent is not None else None


def _now() -> dict[int, _Now]:
    """By CUDA device; empty if CUDA is not initialized, or its allocator has no statistics."""
    cuda = sys.modules["torch"].cuda
    if not cuda.is_initialized() or cuda.get_allocator_backend() == "pluggable":
        return {}
    return {d: _Now(cuda.memory_allocated(d), cuda.memory_reserved(d)) for d in range(cuda.device_count())}
