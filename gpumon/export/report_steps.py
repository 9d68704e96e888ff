"""The steps of a report's timeline, as compact JSON: one array a step, texts in a table of their own.

Model. A page has at most some number of steps. If the history has more, each group of neighbours is represented by the
one with the highest peak, so the highest of all is always shown. The first and the last step stay.
Cost. A pass over the kept steps, and one over the phases of those shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpumon.analysis import ledger
from gpumon.analysis.phase_notes import notes
from gpumon.analysis.reports import DeviceReport
from gpumon.analysis.types import OWNERS, REST, Breakdown
from gpumon.analysis.units import count, shapes, size, steps
from gpumon.session.frame import RankFrame, StepRecord
from gpumon_agent import wire

CAPACITY_FROM = 0.25
"""The plot reaches up to the capacity if reserved has reached this share of it: else the peaks would be too flat."""


class Texts:
    """Texts by number: most occur in every step."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def all(self) -> list[str]:
        return list(self._numbers)


def records(rank: RankFrame, device: int) -> list[StepRecord]:
    """The steps in the history that ran on the device, oldest first."""
    return [record for record in (*rank.older, *rank.steps) if record.closed is not None and record.on(device)]


def thinned(known: Sequence[StepRecord], device: int, most: int) -> list[StepRecord]:
    """At most `most` (and two) of the steps: of each group the one with the highest peak, and the first and last."""
    if len(known) <= most:
        return list(known)
    chosen = {0, len(known) - 1}
    for part in range(most):
        group = range(part * len(known) // most, (part + 1) * len(known) // most)
        chosen.add(max(group, key=lambda at: (_peak(known[at], device), -at)))
    return [known[at] for at in sorted(chosen)]


def _peak(record: StepRecord, device: int) -> int:
    peak = record.peak(device)
    return -1 if peak is None else peak


def shown(known: Sequence[StepRecord], chosen: Sequence[StepRecord]) -> str:
    """How many steps there were, and what became of those that are not shown."""
    total = known[-1].step - known[0].step + 1
    if len(chosen) == total:
        return f"All {steps(total)} are shown." if total > 1 else "The only step is shown."
    text = f"{count(len(chosen))} of {steps(total)} are shown; the highest peak is among them."
    if len(known) < total:
        text += f" gpumon kept {count(len(known))}: it does not read every fast step, and thins old ones."
    if len(chosen) < len(known):
        text += " They are thinned for this page: of neighbours, the one with the highest peak is shown."
    return text


def timeline(
    rank: RankFrame, report: DeviceReport, known: Sequence[StepRecord], chosen: Sequence[StepRecord], text: Texts
) -> dict[str, Any] | None:
    """None if no peak was read. report.js names the places of a step's array."""
    if not any(_peak(record, report.device) >= 0 for record in known):
        return None
    before = {record.step: previous for previous, record in zip((None, *known), known, strict=False)}
    made = [_step(rank, record, before[record.step], report, text) for record in chosen]
    reserved = max((step[3] for step in made if step[3] is not None), default=0)
    oom = rank.oom if rank.oom is not None and rank.oom.device == report.device else None
    return {
        "capacity": report.capacity,
        "to_capacity": report.capacity is not None and reserved >= CAPACITY_FROM * report.capacity,
        "steps": made,
        "oom": None if oom is None else {"step": oom.step, "text": f"{size(oom.requested)} requested in {oom.phase}"},
        "marks": [],
    }


def _step(
    rank: RankFrame, record: StepRecord, before: StepRecord | None, report: DeviceReport, text: Texts
) -> list[Any]:
    closed, here = record.closed, record.on(report.device)
    batch = shapes(closed.input_shapes) if closed is not None else ""
    return [
        record.step,
        None if closed is None else rank.unix_ns(closed.t_ns) // 1_000_000,
        record.peak(report.device),
        max((phase.reserved_peak for phase in here if phase.reserved_peak is not None), default=None),
        closed.quiet if closed is not None else 0,
        text(batch) if batch else None,
        None if closed is None else _seconds(closed.duration_ns),
        _phases(record, before, report.device, text),
        _owners(record, report, text),
    ]


def _seconds(nanoseconds: int) -> float:
    return round(nanoseconds / 1e9, 6)


def _phases(record: StepRecord, before: StepRecord | None, device: int, text: Texts) -> list[list[Any]]:
    """One a name: its first start, highest peak and last end. A phase starts where the one before it ended."""
    quiet = record.closed is not None and record.closed.quiet
    previous = before.on(device) if before is not None and before.step == record.step - 1 and not quiet else ()
    start = previous[-1].allocated if previous else None
    found: dict[str, list[Any]] = {}
    flags: dict[str, int] = {}
    newest: dict[str, int] = {}  # phase → its last index: a merged one stands for those up to it
    for phase in record.on(device):
        row = found.setdefault(phase.phase, [text(phase.phase), 0, start, None, None, 0, None])
        row[1] += phase.index - newest.get(phase.phase, -1) if phase.flags & wire.MERGED else 1
        newest[phase.phase] = phase.index
        if phase.allocated_peak is not None:
            row[3] = max(row[3] or 0, phase.allocated_peak)
        row[4] = start = phase.allocated
        row[5] += phase.duration_ns
        flags[phase.phase] = flags.get(phase.phase, 0) | phase.flags
    for name, row in found.items():
        row[5] = _seconds(row[5])
        said = notes(flags[name])
        row[6] = text(said) if said else None
    return list(found.values())


def parts(lines: Breakdown, names: Sequence[str] = (*OWNERS, *REST)) -> list[tuple[str, int]]:
    """The lines of those names that are known and not zero, in the ledger's order."""
    return [(name, value) for name in lines.__struct_fields__ if name in names and (value := getattr(lines, name))]


def _owners(record: StepRecord, report: DeviceReport, text: Texts) -> list[Any] | None:
    """[where, [[line, bytes], …]]: at the peak, else at the step's end; None if owners were not read."""
    peak = ledger.peak_with_held(ledger.peak(record, report.device), report.held)
    if peak is not None and peak.lines is not None:
        where = "at its peak" + (f", in {peak.module}" if peak.module else "")
        return [text(where), [[text(name), value] for name, value in parts(peak.lines)]]
    read = ledger.read_with_held(ledger.read(record, report.device), report.held)
    if read is None:
        return None
    names = tuple(name for name in (*OWNERS, *REST) if name != "slack")
    return [text("as the step ended"), [[text(name), value] for name, value in parts(read.lines, names)]]
