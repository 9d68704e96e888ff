"""What is learnt of a rank step by step, so that a report costs what is new in it.

What is learnt is a function of the rank's history, which the helper keeps and every viewer has alike: its beginning,
a thinned rest, and all of the newest steps (`RankFrame.older`, `steps`). So each time the helper thins that history
(every 512 steps) a rank is learnt again from what is left of it, by a viewer that was there from the start as by one
that has just come. The forecast is learnt from the newest `LEARNT_STEPS` as of then and from every step since, all else
from every step there is. A rank is learnt again too where older steps turn up behind newer ones (the snapshot of the
past arrives after the first live events).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpumon.analysis import ledger
from gpumon.analysis.batches import Batches
from gpumon.analysis.estimate import closed_form
from gpumon.analysis.estimate.closed_form import Owned
from gpumon.analysis.findings import tables
from gpumon.analysis.forecast import Forecaster, Others
from gpumon.analysis.growth_series import DeviceGrowth, HostGrowth
from gpumon.analysis.history import StepPeaks, carried, higher, look
from gpumon.analysis.leak_identity import LeakNames
from gpumon.analysis.persistent_conditions import PersistentConditions
from gpumon.analysis.reports import RankReport
from gpumon.analysis.tracker import Tracker
from gpumon.analysis.types import Highest, Peak, Read
from gpumon.session.frame import ModelRecord, RankFrame, StepRecord
from gpumon_agent import wire
from gpumon_agent.wire.thinning import tells

if TYPE_CHECKING:
    from gpumon.analysis.changes import Answer

Phases = tuple[wire.Phase, ...]

SPARSELY = 16
"""Steps of those that came since the last look from which the forecast of a rank that nobody looks at is learnt."""

LEARNT_STEPS = 256
"""Newest steps the forecast is learnt from when a rank is learnt again; every model's own window is shorter."""

Kind = tuple[tuple[int, ...], tuple[int, ...]]


def kind(step: StepPeaks) -> Kind:
    """Which optimizers stepped, and which inputs the step had, whatever their sizes: the number of dimensions of each.
    That tells apart steps that train other parts of a model, or another model."""
    return step.optimizers, tuple(len(shape) for shape in step.input_shapes)


@dataclass(slots=True)
class DeviceState:
    """What was learnt of one device of one rank."""

    index: int
    lasting: wire.Ledger | None = None  # newest sampled ledger at the step's end
    first: dict[Kind, list[StepPeaks]] = field(default_factory=dict)  # what the estimate learns from
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
    typical: float | None = None  # peak, at the newest look
    growth: DeviceGrowth = field(default_factory=DeviceGrowth)
    batches: Batches = field(default_factory=Batches)
    standing: PersistentConditions = field(default_factory=PersistentConditions)
    named: LeakNames = field(default_factory=LeakNames)
    skipped: bool = False  # the forecaster did not see every step
    highest: Highest | None = None  # peak so far

    @property
    def replays(self) -> bool:
        """The newest step ran a CUDA graph, whose peaks nobody sees."""
        return self.record is not None and wire.GRAPH_REPLAY in [phase.phase for phase in self.record.phases]

    def again(self) -> DeviceState:
        """Knows nothing of the steps, and all that was learnt otherwise."""
        return DeviceState(
            self.index,
            retries=self.retries,
            available=self.available,
            others=self.others,
            typical=self.typical,
            named=self.named,
        )

    def catch_up(self, steps: Sequence[StepRecord], owners: Owned | None) -> None:
        """The forecast from every step, as of a rank that is met now: somebody looks at it."""
        self.forecaster, self.skipped = Forecaster(), False
        newest: StepPeaks | None = None
        for record in steps:
            seen = look(record, record.on(self.index))
            known = seen.figures or (carried(newest, record, seen) if newest is not None else None)
            if known is not None:
                newest = known
                here = record.on(self.index)
                self.forecaster.observe(known, here, owners.gradients if owners is not None else None)

    def observe(
        self,
        steps: Sequence[tuple[StepRecord, Phases]],
        owners: Owned | None,
        *,
        forecast: bool = True,
        sparsely: bool = False,
    ) -> None:
        """Closed steps, oldest first, with their phases on this device. `forecast`: it is learnt from them too, if
        `sparsely` from some of them.

        Each model takes all of them before the next does: a step that goes through all models pushes the code of each
        out of the processor's caches, and takes twice as long.
        """
        seen = [look(record, here) for record, here in steps]
        figures: list[tuple[StepPeaks, Phases]] = []
        for (record, here), each in zip(steps, seen, strict=True):
            known = each.figures
            if known is None and self.newest is not None:
                known = carried(self.newest, record, each)
            elif known is not None and not known.skipped and self._tells(known):
                self.first.setdefault(kind(known), []).append(known)
            if known is not None:
                self.newest = known
                figures.append((known, here))
        if forecast:
            self._learn_forecast(figures, owners, sparsely)
        elif figures:
            self.forecaster.skip(max([peaks.peak for peaks, _ in figures]))
        for peaks, _ in figures:
            self.batches.observe(peaks)
        for (record, _), each in zip(steps, seen, strict=True):
            self.highest = higher(self.highest, record.step, each)
        for (record, _), each in zip(steps, seen, strict=True):
            self.standing.observe(record, self.index, each)
        for (record, _), each in zip(steps, seen, strict=True):
            if each.end is not None:
                self._grow(record, each.end, each.highest)
        self._take_apart([record for record, _ in steps if record.ledgers])
        self.record, self.end = steps[-1][0], seen[-1].end
        self.owners = ledger.ledger_of(self.record, self.end) if self.end is not None else None

    def _learn_forecast(
        self, figures: Sequence[tuple[StepPeaks, Phases]], owners: Owned | None, sparsely: bool
    ) -> None:
        gradients = owners.gradients if owners is not None else None
        skipped = figures[:-SPARSELY] if sparsely else []
        if skipped:
            self.skipped = True
            self.forecaster.skip(max([peaks.peak for peaks, _ in skipped]))
        for peaks, here in figures[len(skipped) :]:
            self.forecaster.observe(peaks, here, gradients)

    def _tells(self, step: StepPeaks) -> bool:
        """Whether the estimate learns from it: one of its kind's first, or the first whose batch has another size."""
        first = self.first.get(kind(step))
        sizes = None if first is None else [each.input_bytes for each in first]
        return tells(sizes, len(self.first), step.input_bytes)

    def alike(self) -> tuple[StepPeaks, ...]:
        """What the estimate of the newest step is learnt from: the first of its kind, or else of the first kind."""
        if self.newest is None or not self.first:
            return ()
        return tuple(self.first.get(kind(self.newest)) or next(iter(self.first.values())))

    def _grow(self, record: StepRecord, end: wire.Phase, highest: int) -> None:
        read = ledger.ledger_of(record, end)
        self.growth.observe(record, end, read, highest)
        if read is not None and read.weights is not None:
            self.lasting = read

    def _take_apart(self, sampled: Sequence[StepRecord]) -> None:
        """The newest ledger with owners and the newest peak of which more than its height is known."""
        read = next((found for record in reversed(sampled) if (found := ledger.read(record, self.index))), None)
        self.read = read or self.read
        for record in reversed(sampled):
            peak = ledger.peak(record, self.index)
            if peak is not None and peak.lines is not None:
                self.composed = peak
                return


@dataclass(slots=True)
class RankState:
    """What was learnt of one rank, and the report that stands for it."""

    devices: dict[int, DeviceState] = field(default_factory=dict)
    first: int = 0  # step number of the oldest record of the frame that was learnt from
    newest: StepRecord | None = None
    thinned: wire.Thinned | None = None  # the history, when it was learnt again
    forecast_from: int = -1  # the step after which the forecast is learnt
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
    censuses: tuple[wire.Census, ...] = ()
    checkpoints: tuple[wire.Checkpoint, ...] = ()
    ended: bool = False
    oom: wire.Oom | None = None
    peers: tuple[float, ...] = ()  # the medians of the other ranks of its job
    peers_of: int = -1  # as of which change of them
    ahead: tuple[wire.Outlook, ...] = ()  # batches that will not fit, when findings were last looked for
    uuids: frozenset[str] = frozenset()  # of the devices its phases are on; empty until the first closed

    @property
    def skipped(self) -> bool:
        """The forecast of one of its devices did not see every step."""
        return any(device.skipped for device in self.devices.values())

    def follow(self, rank: RankFrame, *, sparsely: bool = False) -> bool:
        """Learns what is new; whether what was known had to be learnt again."""
        if rank.models is not self.models:
            self.models, self.tables = rank.models, tables(rank.models)
            self.owned = {index: closed_form.owned(rank.models, index) for index in devices(rank)}
        again = self._follow(rank, sparsely)
        if not sparsely:
            for index, device in self.devices.items():
                if device.skipped:
                    device.catch_up(after(rank.steps, self.forecast_from), self.owned.get(index))
        return again

    def _follow(self, rank: RankFrame, sparsely: bool) -> bool:
        steps, known = rank.steps, self.newest
        if not steps or (steps[-1] is known and rank.thinned is self.thinned):
            return False
        again = rank.thinned is not self.thinned or steps[0].step < self.first
        if known is None or again or steps[-1].step <= known.step:
            self._learn_again(rank)
            again = True
        else:
            self.observe(after(steps, known.step), sparsely=sparsely)
        self.first, self.newest = steps[0].step, steps[-1]
        return again

    def _learn_again(self, rank: RankFrame) -> None:
        steps, self.thinned = rank.steps, rank.thinned
        self.devices = {index: device.again() for index, device in self.devices.items()}
        self.host_growth.again(rank)
        newest = rank.thinned.newest - LEARNT_STEPS if rank.thinned else -1
        self.forecast_from = newest
        recent = after(steps, newest)
        self.observe([*rank.older, *steps[: len(steps) - len(recent)]], forecast=False)
        self.observe(recent)

    def observe(self, steps: Sequence[StepRecord], *, forecast: bool = True, sparsely: bool = False) -> None:
        """Closed steps, oldest first."""
        by_device: dict[int, list[tuple[StepRecord, Phases]]] = {}
        for record in steps:
            for index in record.devices():
                by_device.setdefault(index, []).append((record, record.on(index)))
        for index, found in by_device.items():
            self._device(index).observe(found, self.owned.get(index), forecast=forecast, sparsely=sparsely)

    def _device(self, index: int) -> DeviceState:
        device = self.devices.get(index)
        if device is None:
            device = self.devices[index] = DeviceState(index)
        return device

    def evidence(self, rank: RankFrame) -> bool:
        """Takes in what came beside the steps; whether there is something new in it."""
        self.host_growth.observe(rank)
        fresh = rank.checkpoints is not self.checkpoints and rank.checkpoints != self.checkpoints
        self.checkpoints = rank.checkpoints
        fresh = fresh or rank.censuses is not self.censuses
        self.censuses = rank.censuses
        ended = rank.status == "ended" and not self.ended
        self.ended = rank.status == "ended"
        failed, self.oom = rank.oom is not self.oom, rank.oom
        return fresh or ended or failed


def after(steps: Sequence[StepRecord], number: int) -> Sequence[StepRecord]:
    """Those behind a step, of steps in order."""
    return steps[bisect_right(steps, number, key=lambda record: record.step) :]


def devices(rank: RankFrame) -> set[int]:
    """Every device that the rank speaks of."""
    return {device.index for device in rank.hello.devices} | {
        index for record in rank.models for index in record.model.devices
    }


def found(
    record: StepRecord | None, index: int, learnt: DeviceState | None
) -> tuple[wire.Phase | None, wire.Ledger | None, Peak | None]:
    """Where a step ends on a device, the owners read there (both as learnt, if it was), and its peak."""
    if record is None:
        return None, None, None
    if learnt is not None and learnt.record is record:
        return learnt.end, learnt.owners, ledger.peak(record, index)
    end = ledger.boundary(record, index)
    return end, ledger.ledger_of(record, end) if end is not None else None, ledger.peak(record, index)
