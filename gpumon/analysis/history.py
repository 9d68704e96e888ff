"""A step reduced to the few figures that forecasts and estimates learn from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from gpumon.analysis import ledger
from gpumon.session.frame import StepRecord
from gpumon_agent import wire

LOADING = (wire.LOAD,)
"""Windows that come once: what they peaked at says nothing about the next iteration."""


class PhasePeak(NamedTuple):
    """The highest moment of a phase in a step, all its occurrences together."""

    phase: str
    peak: int


_phase_peak: Callable[[tuple[str, int]], PhasePeak] = partial(tuple.__new__, PhasePeak)
"""`PhasePeak._make`, without a call of Python's for each phase of each step."""


class StepPeaks(NamedTuple):
    """One step on one device. `start`: allocated as the first forward began; `end`: at the end of the optimizer."""

    step: int
    start: int
    end: int
    phases: tuple[PhasePeak, ...]
    peak: int
    peak_phase: str
    input_bytes: int | None
    input_shapes: tuple[tuple[int, ...], ...]
    skipped: bool
    reserved: int | None  # at the end
    reserved_peak: int | None
    stranded: int  # least inactive_split over the step's samples: free bytes in segments that are in use
    backward_end: int | None  # allocated as the last backward ended


def step_peaks(record: StepRecord, device: int) -> StepPeaks | None:
    """None where the record cannot tell: no forward, no allocator figures, events lost."""
    if record.closed is None or not record.whole:
        return None
    peaks: dict[str, int] = {}
    start: int | None = None
    latest: int | None = None
    backward_end: int | None = None
    reserved_peak: int | None = None
    stranded: int | None = None
    for phase in record.phases:
        if phase.device != device:
            continue
        split, reserved = phase.inactive_split, phase.reserved_peak
        if split is not None and (stranded is None or split < stranded):
            stranded = split
        if reserved is not None and (reserved_peak is None or reserved > reserved_peak):
            reserved_peak = reserved
        name, allocated, peak = phase.phase, phase.allocated, phase.allocated_peak
        if allocated is None or peak is None:
            continue
        if name == wire.FORWARD and start is None:
            start = latest if latest is not None else allocated
        if name == wire.BACKWARD:
            backward_end = allocated
        latest = allocated
        if name not in LOADING and peak > peaks.get(name, -1):
            peaks[name] = peak
    end = ledger.boundary(record, device)
    if start is None or end is None or end.allocated is None or not peaks:
        return None
    tallest = max(peaks, key=peaks.__getitem__)
    closed = record.closed
    return StepPeaks._make(  # in order: by name it takes twice as long, and this is every step of every rank
        (
            record.step,
            start,
            end.allocated,
            tuple(map(_phase_peak, peaks.items())),
            peaks[tallest],
            tallest,
            closed.input_bytes,
            closed.input_shapes,
            closed.skipped,
            end.reserved,
            reserved_peak,
            stranded or 0,
            backward_end,
        )
    )
