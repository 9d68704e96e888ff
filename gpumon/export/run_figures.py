"""The few figures of a run that experiment trackers get, and the card at its end. docs/trackers.md explains each.

Model. `RunFigures.look` takes each frame with its reports, once a second. `take` gives what has come since the last
`take`: peaks are the highest of all steps since then, the others are as of the newest step. So a tracker that is
written every ten seconds misses no peak. Unknown figures are absent, never 0. Bytes are ints.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from gpumon.analysis import device_budget, units
from gpumon.analysis.answer import NOBODY, STATES, Answer, answer, line
from gpumon.analysis.ledger import device_name, peak
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.types import Finding
from gpumon.session.frame import Frame, RankFrame, StepRecord
from gpumon_agent import wire

PREFIX = "gpumon/"
PHASES = (wire.FORWARD, wire.BACKWARD, wire.OPTIMIZER)
FINDINGS_SHOWN = 8
"""On the card; more would be a report."""


NUMBERED = tuple(state for state in reversed(STATES) if state != "ended")
"""ok, unknown, tight, leak, will-not-fit, out-of-memory: a state's place is its number, for what has no text."""


class Value(msgspec.Struct, frozen=True):
    """One figure of one device, in bytes."""

    name: str  # peak_bytes, forward_peak_bytes, …
    bytes: int
    rank: int | None  # None: there is only one
    device: str
    suffix: str = ""  # tells ranks and devices apart, if there are several: /rank_1/cuda_0

    @property
    def path(self) -> str:
        """For trackers without labels: gpumon/peak_bytes/rank_1."""
        return f"{PREFIX}{self.name}{self.suffix}"


class Figures(msgspec.Struct, frozen=True):
    """What has come since the last time. `step`: the newest that closed, of any rank; the x axis."""

    step: int
    values: tuple[Value, ...]
    answer: Answer | None  # the last one while the training ran, or its out-of-memory; None: there was none
    opened: tuple[Finding, ...]  # findings that no earlier one had

    @property
    def state(self) -> int | None:
        """The answer's state, as its place in `NUMBERED`."""
        return None if self.answer is None else NUMBERED.index(self.answer.state)

    @property
    def numbers(self) -> dict[str, int]:
        """All of them by path, the state included."""
        numbers = {value.path: value.bytes for value in self.values}
        return numbers if self.state is None else {**numbers, f"{PREFIX}state": self.state}


class Highest(msgspec.Struct, frozen=True):
    """The highest peak of the whole run. Bytes."""

    allocated: int
    step: int
    phase: str | None  # None: the step was not read by phase
    rank: int | None  # None: there is only one
    device: str
    headroom: int | None  # what the process could have had above it


class _OnDevice(msgspec.Struct):
    """One device of one rank since the last `take`."""

    fresh: bool = False  # a step has closed
    peak: int | None = None
    phases: dict[str, int] = msgspec.field(default_factory=dict)
    reserved: int | None = None  # the newest reading
    report: DeviceReport | None = None  # the last while the process lived
    room: int | None = None  # likewise: bytes that it could have, with those it had
    highest: Highest | None = None


class RunFigures:
    """Takes the frames of one job, in order."""

    def __init__(self) -> None:
        self._answer = NOBODY
        self._told: Answer | None = None
        self._taken: tuple[int | None, str] = (None, "")
        self.name = ""
        self.steps = 0
        self.ranks = 0
        self.out_of_memory: Answer | None = None
        self._devices: dict[tuple[str, int], _OnDevice] = {}  # by the rank's source and the device
        self._seen: dict[str, int] = {}  # newest step of each rank
        self._labels: dict[tuple[str, int], tuple[int | None, str]] = {}
        self._findings: dict[tuple[object, ...], Finding] = {}
        self._opened: list[Finding] = []

    @property
    def step(self) -> int | None:
        """The newest step that closed; None: none has."""
        return max(self._seen.values(), default=None)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All of the run, each once, as they were last seen."""
        return tuple(self._findings.values())

    @property
    def highest(self) -> Highest | None:
        known = [each.highest for each in self._devices.values() if each.highest is not None]
        return max(known, key=lambda each: each.allocated, default=None)

    def look(self, frame: Frame, reports: Sequence[RankReport]) -> None:
        self._answer = answer(frame, reports, self._answer)
        if self._answer.state != "ended" and self._answer != NOBODY:
            self._told = self._answer
        if self._answer.state == "out-of-memory":
            self.out_of_memory = self._answer
        self.ranks = max(self.ranks, len({rank.hello.rank for rank in frame.ranks}))
        for rank, report in zip(frame.ranks, reports, strict=True):
            self.name = self.name or rank.hello.name
            for device in report.devices:
                self._device(rank, device)
            self._steps(rank)
            for found in report.findings:
                key = (rank.hello.rank, found.code, found.subject, found.step)
                if key not in self._findings and found.state == "open":
                    self._opened.append(found)
                if key in self._findings or found.state == "open":
                    self._findings[key] = found

    def take(self) -> Figures | None:
        """What has come since the last call; None: nothing has, or no step has closed yet."""
        step = self.step
        state = self._told.state if self._told is not None else ""
        if step is None or ((step, state) == self._taken and not self._opened):
            return None
        self._taken = step, state
        values: list[Value] = []
        for key, device in self._devices.items():
            rank, label = self._labels[key]
            values += [Value(name, value, rank, label, self._suffix(key)) for name, value in _named(device)]
            device.fresh, device.peak, device.phases = False, None, {}
        opened, self._opened = tuple(self._opened), []
        return Figures(step, tuple(values), self._told, opened)

    def summary(self) -> dict[str, int | str]:
        """The card's figures, for the run's summary in a tracker."""
        found: dict[str, int | str | None] = {"steps": self.steps, "findings": len(self._findings)}
        if self.highest is not None:
            found |= {
                "highest_peak_bytes": self.highest.allocated,
                "highest_peak_step": self.highest.step,
                "highest_peak_phase": self.highest.phase,
                "headroom_at_highest_peak_bytes": self.highest.headroom,
            }
        return {f"{PREFIX}{name}": value for name, value in found.items() if value is not None}

    def _steps(self, rank: RankFrame) -> None:
        seen = self._seen.get(rank.source, -1)
        for record in (*rank.older, *rank.steps) if seen < 0 else _after(rank.steps, seen):
            if record.closed is None:
                continue
            # the last steps of a run may have no phases, but peaks
            for device in record.devices() | {each.device for each in record.closed.quiet_peaks}:
                self._step(self._of(rank, device), record, device, *self._labels[rank.source, device])
            self._seen[rank.source] = max(self._seen.get(rank.source, -1), record.step)
        self.steps = max(self.steps, self._seen.get(rank.source, -1) + 1)

    def _of(self, rank: RankFrame, device: int) -> _OnDevice:
        key = rank.source, device
        number = rank.hello.rank if (rank.hello.world_size or 1) > 1 else None
        self._labels[key] = number, device_name(rank, device)
        return self._devices.setdefault(key, _OnDevice())

    def _step(self, into: _OnDevice, record: StepRecord, device: int, rank: int | None, name: str) -> None:
        into.fresh = True
        for phase in record.on(device):
            into.reserved = into.reserved if phase.reserved is None else phase.reserved
            if phase.allocated_peak is not None and phase.phase in PHASES:
                into.phases[phase.phase] = max(phase.allocated_peak, into.phases.get(phase.phase, 0))
        highest = record.peak(device)
        if highest is None:
            return
        into.peak = max(highest, into.peak or 0)
        if into.highest is None or highest > into.highest.allocated:
            where = peak(record, device)
            into.highest = Highest(
                highest,
                record.step,
                where.phase if where is not None and where.allocated == highest else None,
                rank,
                name,
                None if into.room is None else into.room - highest,
            )

    def _device(self, rank: RankFrame, report: DeviceReport) -> None:
        into = self._of(rank, report.device)
        if rank.goodbye is None or into.report is None:  # later its memory has been freed
            into.report, into.room = report, device_budget.available(rank, report.device)
        top = into.highest
        if top is not None and top.headroom is None and into.room is not None:  # own allocations do not change it
            into.highest = msgspec.structs.replace(top, headroom=into.room - top.allocated)

    def _suffix(self, key: tuple[str, int]) -> str:
        """Names of a job's only rank, with one device, have none."""
        rank, device = self._labels[key]
        devices = {name for of, name in self._labels.values() if of == rank}
        suffix = f"/rank_{rank}" if rank is not None else ""
        return suffix + (f"/{device.replace(':', '_')}" if len(devices) > 1 else "")


def _after(steps: Sequence[StepRecord], seen: int) -> Iterable[StepRecord]:
    fresh = []
    for record in reversed(steps):
        if record.step <= seen:
            break
        fresh.append(record)
    return reversed(fresh)


def _named(device: _OnDevice) -> Iterable[tuple[str, int]]:
    report = device.report if device.fresh else None
    forecast = report.forecast if report is not None else None
    known = {
        "peak_bytes": device.peak,
        **{f"{phase}_peak_bytes": device.phases.get(phase) for phase in PHASES},
        "reserved_bytes": device.reserved if device.fresh else None,
        "next_peak_bytes": forecast.next_peak if forecast is not None else None,
        "headroom_bytes": forecast.headroom if forecast is not None and not forecast.headroom_at_most else None,
    }
    return [(name, value) for name, value in known.items() if value is not None]


def card(run: RunFigures) -> tuple[str, ...]:
    """The lines at the end of a run. Empty if no step was seen."""
    if not run.steps:
        return ()
    ranks = f", {run.ranks} ranks" if run.ranks > 1 else ""
    lines = [f"gpumon: {run.name}, {units.steps(run.steps)}{ranks}"]
    top = run.highest
    if top is not None:
        who = f"rank {top.rank}, {top.device}" if top.rank is not None else top.device
        at = f"in {top.phase} of" if top.phase is not None else "in or shortly before"  # of the quiet steps before it
        lines.append(f"  peak      {units.size(top.allocated)} {at} step {units.count(top.step)} ({who})")
        if top.headroom is not None:
            lines.append(f"  headroom  {units.size(top.headroom)} above it")
    for found in run.findings[:FINDINGS_SHOWN]:
        gone = " (gone)" if found.state != "open" else ""
        lines.append(f"  finding   {found.code}{gone}: {found.title}")
    if len(run.findings) > FINDINGS_SHOWN:
        lines.append(f"  and       {len(run.findings) - FINDINGS_SHOWN} more findings")
    if run.out_of_memory is not None:
        lines += [f"  {line(run.out_of_memory)}", "  next      gpumon explain --last"]
    return tuple(lines)
