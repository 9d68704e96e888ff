"""Reduces a step to the few figures that forecasts and estimates learn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from gpumon.analysis.types import HighestStep
from gpumon.session.frame import StepRecord
from gpumon_agent import wire

LOADING = (wire.LOAD,)
"""One-time phases: their peak says nothing about the next iteration."""


class PhasePeak(NamedTuple):
    """The highest peak of a phase in a step, over all its occurrences."""

    phase: str
    peak: int


_phase_peak: Callable[[tuple[str, int]], PhasePeak] = partial(tuple.__new__, PhasePeak)
"""`PhasePeak._make`, without a Python call for each phase of each step."""

OPTIMIZER, EVAL, FORWARD, BACKWARD = wire.OPTIMIZER, wire.EVAL, wire.FORWARD, wire.BACKWARD  # looked up once


class StepPeaks(NamedTuple):
    """One step on one device. `start`: allocated when the first forward began, or backward in a step without a forward;
    `end`: at the end of the optimizer. `input_bytes`: of the largest batch, if a step accumulates gradients.
    """

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
    optimizers: tuple[int, ...] = ()  # the numbers of those that stepped


class Looked(NamedTuple):
    """The result of one pass over a step's phases on a device."""

    figures: StepPeaks | None  # None: neither forward nor backward, no allocator figures, or events lost
    end: wire.Phase | None  # the last optimizer phase, or the last phase if there is none
    highest: int  # highest peak of the phases read, and of the quiet steps before; 0: none was read
    evaluated: bool  # a phase in eval mode is among them
    ran: bool  # a forward completed, the bytes before it are known, and all phases were read


_step_peaks: Callable[[tuple[object, ...]], StepPeaks] = partial(tuple.__new__, StepPeaks)
_looked: Callable[[tuple[object, ...]], Looked] = partial(tuple.__new__, Looked)
_MOST = 1 << 63  # above every figure


def look(record: StepRecord, here: Sequence[wire.Phase]) -> Looked:
    """One pass over `here`, the record's phases on a device. It runs for every step of every rank."""
    peaks: dict[str, int] = {}
    start: int | None = None
    latest: int | None = None
    backward_end: int | None = None
    reserved_peak = -1
    stranded = _MOST
    end: wire.Phase | None = None
    highest = forwards = 0
    evaluated = began_read = False
    all_read = True
    for phase in here:
        split, reserved = phase.inactive_split, phase.reserved_peak
        if split is not None and split < stranded:
            stranded = split
        if reserved is not None and reserved > reserved_peak:
            reserved_peak = reserved
        name, allocated, peak = phase.phase, phase.allocated, phase.allocated_peak
        if peak is not None and peak > highest:
            highest = peak
        if name == OPTIMIZER:
            end = phase
        elif name == EVAL:
            evaluated = True
        if allocated is None or peak is None:
            all_read = False
            continue
        if name == FORWARD:
            if start is None:
                start = latest if latest is not None else allocated
                began_read = latest is not None
            forwards += not phase.flags & wire.ABORTED
        elif name == BACKWARD:
            backward_end = allocated
            if start is None:
                start = latest
            if forwards and phase.flags & wire.ABORTED:
                forwards -= 1
        latest = allocated
        if name not in LOADING and peak > peaks.get(name, -1):
            peaks[name] = peak
    if end is None and here:
        end = here[-1]
    ran = all_read and began_read and forwards > 0
    closed = record.closed
    if closed is not None and closed.quiet_peaks and here:
        highest = max(highest, wire.quiet_peak(closed, here[0].device))
    if closed is None or not record.whole or start is None or end is None or end.allocated is None or not peaks:
        return Looked(None, end, highest, evaluated, ran)
    tallest = max(peaks, key=peaks.__getitem__)
    figures = _step_peaks(  # positional: keywords take twice as long
        (
            record.step,
            start,
            end.allocated,
            tuple(map(_phase_peak, peaks.items())),
            peaks[tallest],
            tallest,
            _largest_batch(closed, here),
            closed.input_shapes,
            closed.skipped,
            end.reserved,
            reserved_peak if reserved_peak >= 0 else None,
            stranded if stranded != _MOST else 0,
            backward_end,
            closed.optimizers,
        )
    )
    return _looked((figures, end, highest, evaluated, ran))


def _largest_batch(closed: wire.Step, here: Sequence[wire.Phase]) -> int | None:
    """Bytes of the largest micro-batch: a step's input bytes are one total, divided by the forwards' element counts."""
    shapes, total = closed.input_shapes, closed.input_bytes
    if not total or not 1 < len(shapes) < wire.SHAPES_MAX:
        return total
    forwards = sum([phase.phase == FORWARD for phase in here])
    if forwards < 2 or len(shapes) % forwards:
        return total
    each = len(shapes) // forwards
    sizes = [sum(map(prod, shapes[at : at + each])) for at in range(0, len(shapes), each)]
    return total * max(sizes) // sum(sizes) if any(sizes) else total


def higher(known: HighestStep | None, step: int, peak: int) -> HighestStep | None:
    """The highest peak so far, including this step; the first of equals. `peak`: 0 or less if none was read."""
    return HighestStep(step, peak) if peak > (known.allocated if known is not None else 0) else known


def step_peaks(record: StepRecord, device: int) -> StepPeaks | None:
    """None without forward and backward, without allocator figures, or if events were lost."""
    return look(record, record.on(device)).figures
