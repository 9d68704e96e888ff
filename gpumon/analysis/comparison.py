"""A step beside its estimate: line by line, phase by phase, and the difference in words.

Model. Owners are measured at the step's end and add up to `allocated`. What a step adds temporarily has lines of its
own: the rise of forward or backward above the bytes at the start of forward (activations, gradients and temporaries
together), and the rise of the optimizer above the bytes at its end. A line that was read, not derived (`measured`), has
no estimate; it is listed because the sum needs it.

Cost: O(phases of one step).

Known limitations. Owners are of the newest sampled step, phases and additions of the newest step with figures: two
different steps if training is fast. Both numbers are given.
"""

from __future__ import annotations

import msgspec

from gpumon.analysis.history import StepPeaks, step_peaks
from gpumon.analysis.reports import DeviceReport
from gpumon.analysis.types import OWNERS, Breakdown
from gpumon.analysis.units import percent, size
from gpumon.session.frame import StepRecord
from gpumon_agent import wire

OFF_FRACTION = 0.02
"""A difference above this share of the estimate (and above `OFF_BYTES`) is reported."""

OFF_BYTES = 1 << 20

ADDED = ("activations", "temporaries")
"""Lines that a step adds temporarily; the others remain at its end."""


STEP_ADDS, UPDATE_ADDS = "step_adds", "update_adds"
"""Lines for the temporary additions of forward or backward, and of the optimizer."""

OTHER = "other"
"""Line for allocated bytes beside the lines shown."""

HELD = "held"
"""Line for activations left at a step's end: something still holds them."""


class Compared(msgspec.Struct, frozen=True):
    """One figure, estimated and measured. `source`: of the estimate; "measured" if there is only the reading."""

    line: str
    estimate: int | None
    measured: int | None
    source: str

    @property
    def difference(self) -> int | None:
        return None if self.estimate is None or self.measured is None else self.measured - self.estimate

    @property
    def off(self) -> bool:
        d = self.difference
        return d is not None and abs(d) > max(OFF_BYTES, OFF_FRACTION * (self.estimate or 0))


class EstimateCheck(msgspec.Struct, frozen=True):
    """A step beside its estimate. `phases` are their peaks, in the step's order."""

    step: int | None  # of phases and of what it adds
    read_step: int | None  # of the owners; None: carried over
    owners: tuple[Compared, ...]
    allocated: Compared | None  # their sum, as the step ends
    added: tuple[Compared, ...]
    phases: tuple[Compared, ...]
    peak: Compared | None
    peak_phase: str | None
    expected_in: str | None  # the phase of the estimated peak


def compare(report: DeviceReport, record: StepRecord | None) -> EstimateCheck | None:
    """`record`: the newest step with figures. None without an estimate."""
    estimate = report.estimate
    if estimate is None:
        return None
    sources = dict(estimate.sources)
    peaks = step_peaks(record, report.device) if record is not None else None
    measured = report.read.lines if report.read is not None else report.ledger
    owners: list[Compared] = []
    for line in (*OWNERS, "unexplained", "unattributed", "rounding"):
        expected, read = getattr(estimate.lines, line, None), getattr(measured, line) if measured else None
        source = sources.get(line, "measured")
        if line == "activations" and estimate.phases:  # those left at the end: held outputs, as learnt
            expected, source = _held(estimate.lines, measured, sources), "learnt"
        elif line in ADDED:
            expected, source = None, "measured"
        elif source == "measured":
            expected = None
        if read or (expected and line not in ADDED):
            owners.append(Compared(HELD if line == "activations" else line, expected, read, source))
    allocated = None
    if estimate.lines.allocated is not None or (measured is not None and measured.allocated is not None):
        source = "exact+learnt" if estimate.phases else "exact+measured"
        allocated = Compared("allocated", estimate.lines.allocated, measured.allocated if measured else None, source)
    highest = report.peak.allocated if report.peak else None
    peak = None
    if estimate.peak is not None or highest is not None:
        peak = Compared("peak", estimate.peak, highest, sources.get("peak", "").replace(" and ", "+"))
    return EstimateCheck(
        step=record.step if record is not None else None,
        read_step=report.read.step if report.read is not None else None,
        owners=tuple(owners),
        allocated=allocated,
        added=_added(report, peaks, sources),
        phases=_phases(report, peaks, sources),
        peak=peak,
        peak_phase=report.peak.phase if report.peak else None,
        expected_in=estimate.peak_phase,
    )


def _held(expected: Breakdown, measured: Breakdown | None, sources: dict[str, str]) -> int | None:
    """Bytes that the first iterations held at a step's end, beyond every line with a figure of its own."""
    if expected.allocated is None:
        return None
    own = [(line, value) for line, value in expected.known() if line in (*OWNERS, "rounding") and line not in ADDED]
    read = sum(getattr(measured, line) or 0 for line, _ in own if sources.get(line) == "measured") if measured else 0
    return max(0, expected.allocated - read - sum(value for line, value in own if sources.get(line) != "measured"))


def _added(report: DeviceReport, peaks: StepPeaks | None, sources: dict[str, str]) -> tuple[Compared, ...]:
    lines = report.estimate.lines if report.estimate else None
    above: int | None = None
    brief: int | None = None
    if peaks is not None:
        above = max((p.peak - peaks.start for p in peaks.phases if p.phase not in (wire.OPTIMIZER, wire.BETWEEN)),
                    default=None)  # fmt: skip
        brief = next((p.peak - peaks.end for p in peaks.phases if p.phase == wire.OPTIMIZER), None)
    found = (
        Compared(STEP_ADDS, lines.activations if lines else None, above, sources.get("activations", "")),
        Compared(UPDATE_ADDS, lines.temporaries if lines else None, brief, sources.get("temporaries", "")),
    )
    return tuple(row for row in found if row.estimate or row.measured)


def _phases(report: DeviceReport, peaks: StepPeaks | None, sources: dict[str, str]) -> tuple[Compared, ...]:
    expected = dict(report.estimate.phases) if report.estimate else {}
    read = {p.phase: p.peak for p in peaks.phases} if peaks is not None else {}
    order = [*read, *(name for name in expected if name not in read)]
    return tuple(Compared(name, expected.get(name), read.get(name), _source(name, expected, sources)) for name in order)


def _source(phase: str, expected: dict[str, int], sources: dict[str, str]) -> str:
    if phase not in expected:
        return "measured"
    if phase != wire.OPTIMIZER:
        return "exact+learnt"
    brief = sources.get("temporaries", "exact")
    return brief if brief == "exact" else f"exact+{brief}"


def remarks(found: EstimateCheck, report: DeviceReport) -> tuple[str, ...]:
    """The differences in words, a sentence each."""
    said = [_on_the_peak(found), _on_the_rest(report), _beyond(report)]
    return tuple(text for text in said if text)


def _on_the_peak(found: EstimateCheck) -> str:
    peak = found.peak
    if peak is None or peak.measured is None:
        return ""
    where = f" in {found.peak_phase}" if found.peak_phase else ""
    if peak.difference is None:
        return f"The step peaks at {size(peak.measured)}{where}; what it should be is not known yet."
    if not peak.off:
        return f"The step peaks where the estimate has it: {size(peak.measured)}{where}."
    way = "above" if peak.difference > 0 else "below"
    text = f"The step peaks {size(abs(peak.difference))} {way} the estimate{',' if where else ''}{where}"
    if where and found.expected_in is not None and found.expected_in != found.peak_phase:
        text += f" and not in {found.expected_in}"
    parts = [("activations kept after the step" if row.line == HELD else row.line, row.difference or 0)
             for row in found.owners if row.off]  # fmt: skip
    parts += [(row.line.replace("_adds", " adds"), row.difference or 0) for row in found.added if row.off]
    if not parts:
        return f"{text}; every line stands as it should at the step's end, so it came and went within the phase."
    widest = sorted(parts, key=lambda part: -abs(part[1]))[:3]
    return f"{text}: " + "; ".join(f"{name} {size(value, sign=True)}" for name, value in widest) + "."


def _on_the_rest(report: DeviceReport) -> str:
    lines = report.read.lines if report.read is not None else report.ledger
    if lines is None or not lines.allocated:
        return ""
    if lines.unexplained is not None:
        held_by = report.read.held_by if report.read is not None else ()
        named = ", ".join(each.text + (f" ({each.where})" if each.where else "") for each in held_by)
        held = f" {size(lines.variables)} are in variables: {named}." if lines.variables and named else ""
        if not lines.unexplained:
            return f"Every byte that is allocated as the step ends has an owner.{held}"
        share = percent(abs(lines.unexplained) / lines.allocated)
        text = f"{size(lines.unexplained)} of what is allocated as the step ends has no owner with a name ({share})"
        hidden = report.read.hidden if report.read is not None else ()
        text += f"; {', '.join(hidden)} may keep some of it where nobody can look." if hidden else "."
        return text + held
    if lines.unattributed:
        return (
            f"{size(lines.unattributed)} stand beside the owners; on a step that was not sampled nobody says what of "
            "them is saved for backward and what is unexplained."
        )
    return ""


def _beyond(report: DeviceReport) -> str:
    lines = report.ledger
    if lines is None or not lines.slack or lines.reserved is None:
        return ""
    text = f"The allocator keeps {size(lines.slack)} more than tensors hold (cached), for the next request"
    if lines.context is not None:
        text += f"; the driver counts {size(lines.context)} for the process beside it (context)"
    return text + "."
