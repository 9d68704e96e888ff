"""Conditions of a device that last beyond one step: graphs recorded in eval mode, gradients kept, fragmentation.

Cost. One pass over a step's ledgers where it was sampled, and over its samples where some were taken in eval mode.
Known limitations. A graph recorded in eval mode counts as used if a backward follows in the same step, before any
forward. Peaks before the oldest stored step are not known.
"""

from __future__ import annotations

import msgspec

from gpumon.analysis.history import Looked, StepPeaks
from gpumon.session.frame import StepRecord
from gpumon_agent import wire


class Recorded(msgspec.Struct, frozen=True):
    """A forward in eval mode that recorded a graph without a backward."""

    step: int
    bytes: int | None  # its peak − the bytes at its start
    by: str = ""  # the module and the line that called it


class Fragmented(msgspec.Struct, frozen=True):
    """The allocator reserved more; `highest` shows how much of it was ever allocated."""

    step: int
    reserved: int
    highest: int  # peak of allocated so far


class PersistentConditions:
    def __init__(self) -> None:
        self.recorded: Recorded | None = None
        self.gradients: int | None = None  # when the newest forward began; None: accumulated, or not sampled
        self.fragmented: Fragmented | None = None
        self._highest = 0
        self._reserved: int | None = None

    def observe(self, record: StepRecord, device: int, seen: Looked) -> None:
        """One closed step, and the result of `look` on its phases on the device."""
        self._highest = max(self._highest, seen.highest)
        if seen.evaluated:
            self._evaluations(record, device)
        if record.ledgers:
            self._gradients(record, device)
        if seen.figures is not None:
            self._reserve(seen.figures)

    def _evaluations(self, record: StepRecord, device: int) -> None:
        evaluated = False
        before: wire.Phase | None = None
        for at, phase in enumerate(record.phases):
            if phase.device != device:
                continue
            if phase.phase == wire.EVAL:
                if phase.flags & wire.RECORDED and not _used(record, at):
                    self.recorded = _recorded(phase, before, record)
                elif not evaluated:
                    self.recorded = None
                evaluated = True
            before = phase

    def _gradients(self, record: StepRecord, device: int) -> None:
        forwards = sum(phase.phase == wire.FORWARD and phase.device == device for phase in record.phases)
        for owners in record.ledgers:
            if owners.phase == wire.BETWEEN and owners.index == 0 and owners.device == device and not owners.peak:
                self.gradients = owners.gradients if forwards == 1 else None

    def _reserve(self, figures: StepPeaks) -> None:
        reserved = figures.reserved_peak if figures.reserved_peak is not None else figures.reserved
        if reserved is None:
            return
        known, self._reserved = self._reserved, reserved
        if known is not None and reserved > known:
            self.fragmented = Fragmented(figures.step, reserved, self._highest)
        elif known is not None and reserved < known:
            self.fragmented = None


def _used(record: StepRecord, at: int) -> bool:
    device = record.phases[at].device
    for phase in record.phases[at + 1 :]:
        if phase.device == device and phase.phase in (wire.FORWARD, wire.BACKWARD):
            return phase.phase == wire.BACKWARD
    return False


def _recorded(phase: wire.Phase, before: wire.Phase | None, record: StepRecord) -> Recorded:
    held = None
    if before is not None and before.allocated is not None and phase.allocated_peak is not None:
        held = max(0, phase.allocated_peak - before.allocated)
    return Recorded(phase.step, held, record.closed.evaluated_by if record.closed is not None else "")
