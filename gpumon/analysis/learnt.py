"""What is learnt of a rank step by step, so that a report costs what is new in it.

A rank is learnt from its newest `LEARNT_STEPS`; growth from every step there is, for it needs to see since when. When
older steps turn up behind newer ones (the snapshot of the past arrives after the first live events), the rank is learnt
again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpumon.analysis import ledger
from gpumon.analysis.batches import Batches
from gpumon.analysis.estimate import closed_form
from gpumon.analysis.estimate.closed_form import LEARNING_STEPS, Owned
from gpumon.analysis.findings import tables
from gpumon.analysis.followed import DeviceGrowth, HostGrowth
from gpumon.analysis.forecast import Forecaster, Others
from gpumon.analysis.foreseen import Foreseen
from gpumon.analysis.history import StepPeaks, carried, look
from gpumon.analysis.lines import Peak, RankReport, Read
from gpumon.analysis.named import Named
from gpumon.analysis.standing import Standing
from gpumon.analysis.tracker import Tracker
from gpumon.session.frame import ModelRecord, RankFrame, StepRecord
from gpumon_agent import wire

if TYPE_CHECKING:
    from gpumon.analysis.whatif import Answer

LEARNT_STEPS = 256
"""Newest steps a rank is learnt from when it is met, or met again; every model's own window is shorter."""

CENSUSES = 4
"""The newest ones that are kept: one that was cut short explains less than the one before it."""


@dataclass(slots=True)
class Device:
    """What was learnt of one device of one rank."""

    index: int
    lasting: wire.Ledger | None = None  # newest sampled ledger at the step's end
    first: list[StepPeaks] = field(default_factory=list)  # what the estimate learns from
    newest: StepPeaks | None = None
    record: StepRecord | None = None  # the newest that was learnt, and what was found in it:
    end: wire.Phase | None = None
    owners: wire.Ledger | None = None  # read there
    forecaster: Forecaster = field(default_factory=Forecaster)
    read: Read | None = None  # the newest ledger with owners
    composed: Peak | None = None  # the newest peak that was taken apart
    retries: int | None = None  # at the look before the newest
    available: int | None = None  # reserved and free together, at the newest reading that could be placed
    others: Others = field(default_factory=Others)
    whatif: tuple[Answer, ...] = ()
    asked_at: int | None = None  # the step at which what-if was answered last
    foreseen: Foreseen = field(default_factory=Foreseen)
    typical: float | None = None  # peak, at the newest look
    growth: DeviceGrowth = field(default_factory=DeviceGrowth)
    batches: Batches = field(default_factory=Batches)
    standing: Standing = field(default_factory=Standing)
    named: Named = field(default_factory=Named)

    @property
    def replays(self) -> bool:
        """The newest step ran a CUDA graph, whose peaks nobody sees."""
        return self.record is not None and wire.GRAPH_REPLAY in [phase.phase for phase in self.record.phases]

    def grow(self, record: StepRecord) -> None:
        """A step too old to be learnt from otherwise."""
        seen = look(record, record.on(self.index))
        if seen.end is not None:
            self.growth.observe(record, seen.end, ledger.ledger_of(record, seen.end), seen.highest)

    def observe(self, record: StepRecord, here: tuple[wire.Phase, ...], owners: Owned | None) -> None:
        """A closed step, and its phases on this device."""
        seen = look(record, here)
        figures, end = seen.figures, seen.end
        self.foreseen.note(record, here, seen.ran)
        read_whole = figures is not None
        if figures is None and self.newest is not None:
            figures = carried(self.newest, record, seen)
        if figures is not None:
            self.newest = figures
            if read_whole and len(self.first) < LEARNING_STEPS and not figures.skipped:
                self.first.append(figures)
            self.forecaster.observe(figures, owners.gradients if owners is not None else None)
            self.batches.observe(figures)
        self.standing.observe(record, self.index, seen)
        if record.ledgers:
            self.read = ledger.read(record, self.index) or self.read
            peak = ledger.peak(record, self.index)
            if peak is not None and peak.lines is not None:
                self.composed = peak
        self.record, self.end, self.owners = record, end, None
        if end is None:
            return
        self.owners = read = ledger.ledger_of(record, end)
        self.growth.observe(record, end, read, seen.highest)
        if read is not None and read.weights is not None:
            self.lasting = read


@dataclass(slots=True)
class Rank:
    """What was learnt of one rank, and the report that stands for it."""

    devices: dict[int, Device] = field(default_factory=dict)
    first: int | None = None  # step number of the oldest record of the frame that was learnt from
    newest: StepRecord | None = None
    key: tuple[object, ...] = ()
    report: RankReport | None = None
    models: tuple[ModelRecord, ...] | None = None  # those that `owned` was made from
    owned: dict[int, Owned | None] = field(default_factory=dict)
    tables: tuple[tuple[ModelRecord, tuple[wire.Module, ...]], ...] = ()  # large embeddings of these
    tracker: Tracker = field(default_factory=Tracker)
    looked_at: int | None = None  # newest step that findings were looked for at
    hello: wire.Hello | None = None
    pid: int = 0
    job: str | None = None
    label: str = ""
    host: str = ""
    placed: int = -1  # how many devices `uuids` was made for
    host_growth: HostGrowth = field(default_factory=HostGrowth)
    censuses: deque[wire.Census] = field(default_factory=lambda: deque(maxlen=CENSUSES))
    checkpoints: tuple[wire.Checkpoint, ...] = ()
    ended: bool = False
    peers: tuple[float, ...] = ()  # the medians of the other ranks of its job
    peers_of: int = -1  # as of which change of them
    ahead: tuple[wire.Outlook, ...] = ()  # batches that will not fit, when findings were last looked for
    uuids: frozenset[str] = frozenset()  # of the devices its phases are on; empty until the first closed

    def follow(self, rank: RankFrame) -> bool:
        """Learns what is new; whether what was known had to be learnt again."""
        if rank.models is not self.models:
            self.models, self.tables = rank.models, tables(rank.models)
            self.owned = {index: closed_form.owned(rank.models, index) for index in devices(rank)}
        steps = rank.steps
        if not steps or steps[-1] is self.newest:
            return False
        known = self.newest
        if known is None or self.first is None or steps[0].step < self.first or steps[-1].step <= known.step:
            self.devices.clear()
            again, at = True, 0
        else:
            again, at = False, len(steps)
            while at and steps[at - 1].step > known.step:
                at -= 1
        learnt_from = len(steps) - LEARNT_STEPS
        for record in steps[at : max(at, learnt_from)]:
            self.grow(record)
        for record in steps[max(at, learnt_from) :]:
            self.observe(record)
        self.first, self.newest = steps[0].step, steps[-1]
        return again

    def observe(self, record: StepRecord) -> None:
        indices = {phase.device for phase in record.phases}
        for index in indices:
            here = record.phases if len(indices) == 1 else record.on(index)
            self._device(index).observe(record, here, self.owned.get(index))

    def grow(self, record: StepRecord) -> None:
        for index in {phase.device for phase in record.phases}:
            self._device(index).grow(record)

    def _device(self, index: int) -> Device:
        device = self.devices.get(index)
        if device is None:
            device = self.devices[index] = Device(index)
        return device

    def evidence(self, rank: RankFrame) -> bool:
        """Takes in what came beside the steps; whether there is something new in it."""
        self.host_growth.observe(rank)
        fresh = rank.checkpoints is not self.checkpoints and rank.checkpoints != self.checkpoints
        self.checkpoints = rank.checkpoints
        if rank.census is not None and (not self.censuses or self.censuses[-1] is not rank.census):
            self.censuses.append(rank.census)
            fresh = True
        ended = rank.status == "ended" and not self.ended
        self.ended = rank.status == "ended"
        return fresh or ended


def devices(rank: RankFrame) -> set[int]:
    """Every device that the rank speaks of."""
    return {device.index for device in rank.hello.devices} | {
        index for record in rank.models for index in record.model.devices
    }


def found(
    record: StepRecord | None, index: int, learnt: Device | None
) -> tuple[wire.Phase | None, wire.Ledger | None, Peak | None]:
    """Where a step ends on a device, the owners read there (both as learnt, if it was), and its peak."""
    if record is None:
        return None, None, None
    if learnt is not None and learnt.record is record:
        return learnt.end, learnt.owners, ledger.peak(record, index)
    end = ledger.boundary(record, index)
    return end, ledger.ledger_of(record, end) if end is not None else None, ledger.peak(record, index)
