"""State learnt of a rank step by step, so that a report costs only its new steps.

The state is a function of the rank's history, which the helper keeps and every viewer gets alike: its beginning, a
thinned middle, and all of the newest steps (`RankFrame.older`, `steps`). Each time the helper thins that history (every
512 steps), every viewer relearns the rank from what is left, whether it was there from the start or has just attached.
The forecast learns from the newest `LEARNT_STEPS` at that time and every step since, everything else from all steps. A
rank is also relearnt if older steps appear behind newer ones (the snapshot of the past arrives after the first live
events).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gpumon.analysis import ledger
from gpumon.analysis.batches import Batches
from gpumon.analysis.estimate import closed_form
from gpumon.analysis.estimate.closed_form import Owned
from gpumon.analysis.findings import tables
from gpumon.analysis.forecast import Forecaster, Others
from gpumon.analysis.growth_series import DeviceGrowth, HostGrowth
from gpumon.analysis.history import StepPeaks, higher, look
from gpumon.analysis.leak_identity import LeakNames
from gpumon.analysis.persistent_conditions import PersistentConditions
from gpumon.analysis.reports import RankReport
from gpumon.analysis.tracker import Tracker
from gpumon.analysis.types import HighestStep, Peak, Read
from gpumon.session.frame import ModelRecord, RankFrame, StepRecord
from gpumon_agent import wire
from gpumon_agent.wire.thinning import tells

if TYPE_CHECKING:
    from gpumon.analysis.changes import ChangeResult

Phases = tuple[wire.Phase, ...]

SPARSELY = 8
"""Newest steps since the last look from which a rank's forecast learns while it is not displayed."""

LEARNT_STEPS = 256
"""Newest steps from which the forecast is relearnt; every model's own window is shorter."""

Kind = tuple[tuple[int, ...], tuple[int, ...]]


def kind(step: StepPeaks) -> Kind:
    """The optimizers that stepped, and the number of dimensions of each input. Distinguishes steps that train different
    parts of a model, or another model."""
    return step.optimizers, tuple(len(shape) for shape in step.input_shapes)


class DeviceState(msgspec.Struct):
    index: int
    lasting: wire.Ledger | None = None  # newest sampled ledger at the step's end
    first: dict[Kind, list[StepPeaks]] = msgspec.field(default_factory=dict)  # what the estimate learns from
    newest: StepPeaks | None = None
    record: StepRecord | None = None  # the newest one learnt, and the results from it:
    end: wire.Phase | None = None
    owners: wire.Ledger | None = None  # read there
    forecaster: Forecaster = msgspec.field(default_factory=Forecaster)
    read: Read | None = None  # the newest ledger with owners
    composed: Peak | None = None  # the newest peak with a breakdown
    retries: int | None = None  # at the previous look
    available: int | None = None  # reserved + free, at the newest reading that could be placed
    others: Others = msgspec.field(default_factory=Others)
    whatif: tuple[ChangeResult, ...] = ()
    asked_at: int | None = None  # the step at which what-if was answered last
    typical: float | None = None  # peak, at the newest look
    growth: DeviceGrowth = msgspec.field(default_factory=DeviceGrowth)
    batches: Batches = msgspec.field(default_factory=Batches)
    standing: PersistentConditions = msgspec.field(default_factory=PersistentConditions)
    named: LeakNames = msgspec.field(default_factory=LeakNames)
    skipped: bool = False  # the forecaster did not see every step
    highest: HighestStep | None = None  # peak so far

    @property
    def replays(self) -> bool:
        """Whether the newest step ran a CUDA graph, whose peaks are not visible."""
        return self.record is not None and wire.GRAPH_REPLAY in [phase.phase for phase in self.record.phases]

    def again(self) -> DeviceState:
        """A new state: nothing about steps, but everything learnt otherwise."""
        return DeviceState(
            self.index,
            retries=self.retries,
            available=self.available,
            others=self.others,
            typical=self.typical,
            named=self.named,
        )

    def catch_up(self, steps: Sequence[StepRecord], owners: Owned | None) -> None:
        """Relearns the forecast from every step, as for a newly met rank: it is displayed now."""
        self.forecaster, self.skipped = Forecaster(), False
        for record in steps:
            here = record.on(self.index)
            known = look(record, here).figures
            if known is not None:
                self.forecaster.observe(known, here, owners.gradients if owners is not None else None)

    def observe(
        self,
        steps: Sequence[tuple[StepRecord, Phases]],
        owners: Owned | None,
        *,
        forecast: bool = True,
        sparsely: bool = False,
    ) -> None:
        """Learns closed steps, oldest first, with their phases on this device. `forecast`: for the forecast too;
        `sparsely`: from some of them only.

        Each model takes all steps before the next one does: switching models at each step evicts their code from the
        processor's caches, and takes twice as long.
        """
        seen = [look(record, here) for record, here in steps]
        figures: list[tuple[StepPeaks, Phases]] = []
        for (_, here), each in zip(steps, seen, strict=True):
            known = each.figures
            if known is not None:
                if not known.skipped and self._tells(known):
                    self.first.setdefault(kind(known), []).append(known)
                self.newest = known
                figures.append((known, here))
        if forecast:
            self._learn_forecast(figures, owners, sparsely)
        elif figures:
            self.forecaster.skip(max([peaks.peak for peaks, _ in figures]))
        for peaks, _ in figures:
            self.batches.observe(peaks)
        for (record, _), each in zip(steps, seen, strict=True):
            self.highest = higher(self.highest, record.step, each.highest)
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
        """Whether the estimate learns from it: among the first of its kind, or the first with another batch size."""
        first = self.first.get(kind(step))
        sizes = None if first is None else [each.input_bytes for each in first]
        return tells(sizes, len(self.first), step.input_bytes)

    def alike(self) -> tuple[StepPeaks, ...]:
        """The steps behind the newest step's estimate: the first of its kind, or else of the first kind."""
        if self.newest is None or not self.first:
            return ()
        return tuple(self.first.get(kind(self.newest)) or next(iter(self.first.values())))

    def _grow(self, record: StepRecord, end: wire.Phase, highest: int) -> None:
        read = ledger.ledger_of(record, end)
        self.growth.observe(record, end, read, highest)
        if read is not None and read.weights is not None:
            self.lasting = read

    def _take_apart(self, sampled: Sequence[StepRecord]) -> None:
        """Keeps the newest ledger with owners and the newest peak with a breakdown."""
        read = next((found for record in reversed(sampled) if (found := ledger.read(record, self.index))), None)
        self.read = read or self.read
        for record in reversed(sampled):
            peak = ledger.peak(record, self.index)
            if peak is not None and peak.lines is not None:
                self.composed = peak
                return


class RankState(msgspec.Struct):
    devices: dict[int, DeviceState] = msgspec.field(default_factory=dict)
    first: int = 0  # step number of the oldest record of the frame that was learnt from
    newest: StepRecord | None = None
    thinned: wire.Thinned | None = None  # the history at the last relearning
    forecast_from: int = -1  # the step after which the forecast is learnt
    key: tuple[object, ...] = ()
    report: RankReport | None = None
    models: tuple[ModelRecord, ...] | None = None  # those that `owned` was made from
    owned: dict[int, Owned | None] = msgspec.field(default_factory=dict)
    tables: tuple[tuple[ModelRecord, tuple[wire.Module, ...]], ...] = ()  # large embeddings of these
    tracker: Tracker = msgspec.field(default_factory=Tracker)
    looked_at: int | None = None  # newest step that findings were looked for at
    hello: wire.Hello | None = None
    pid: int = 0
    job: str | None = None
    label: str = ""
    host: str = ""
    placed: int = -1  # how many devices `uuids` was made for
    host_growth: HostGrowth = msgspec.field(default_factory=HostGrowth)
    censuses: tuple[wire.Census, ...] = ()
    checkpoints: tuple[wire.Checkpoint, ...] = ()
    ended: bool = False
    oom: wire.Oom | None = None
    peers: tuple[float, ...] = ()  # medians of the job's other ranks
    peers_of: int = -1  # the version of the medians they are from
    ahead: tuple[wire.Outlook, ...] = ()  # batches that will not fit, when findings were last looked for
    uuids: frozenset[str] = frozenset()  # of the devices its phases are on; empty until the first closed

    @property
    def skipped(self) -> bool:
        """Whether one of its devices' forecasts did not see every step."""
        return any(device.skipped for device in self.devices.values())

    def follow(self, rank: RankFrame, *, sparsely: bool = False) -> bool:
        """Learns what is new. Returns whether everything had to be relearnt."""
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
            self._learn_again(rank, sparsely=sparsely and known is not None)
            again = True
        else:
            self._observe_from(after(steps, known.step), sparsely=sparsely)
        self.first, self.newest = steps[0].step, steps[-1]
        return again

    def _learn_again(self, rank: RankFrame, *, sparsely: bool) -> None:
        steps, self.thinned = rank.steps, rank.thinned
        self.devices = {index: device.again() for index, device in self.devices.items()}
        self.host_growth.again(rank)
        newest = rank.thinned.newest - LEARNT_STEPS if rank.thinned else -1
        self.forecast_from = newest
        self._observe_from([*rank.older, *steps], sparsely=sparsely)

    def _observe_from(self, steps: Sequence[StepRecord], *, sparsely: bool) -> None:
        """The forecast only from those after `forecast_from`, also where they come one by one, as in a replay."""
        recent = after(steps, self.forecast_from)
        earlier = steps[: len(steps) - len(recent)]
        if earlier:
            self.observe(earlier, forecast=False)
        if recent:
            self.observe(recent, sparsely=sparsely)

    def observe(self, steps: Sequence[StepRecord], *, forecast: bool = True, sparsely: bool = False) -> None:
        """Closed steps, oldest first."""
        by_device: dict[int, list[tuple[StepRecord, Phases]]] = {}
        for record in steps:
            for index in record.devices():
                by_device.setdefault(index, []).append((record, record.on(index)))
            if record.closed is not None and not record.phases and record.closed.quiet_peaks:  # the end of a run
                for quiet in record.closed.quiet_peaks:
                    device = self._device(quiet.device)
                    device.highest = higher(device.highest, record.step, quiet.allocated_peak or 0)
        for index, found in by_device.items():
            self._device(index).observe(found, self.owned.get(index), forecast=forecast, sparsely=sparsely)

    def _device(self, index: int) -> DeviceState:
        device = self.devices.get(index)
        if device is None:
            device = self.devices[index] = DeviceState(index)
        return device

    def evidence(self, rank: RankFrame) -> bool:
        """Takes in what arrives beside the steps. Returns whether a census, checkpoint, end or failure is new."""
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
    """The steps after step `number`; `steps` are in order."""
    return steps[bisect_right(steps, number, key=lambda record: record.step) :]


def devices(rank: RankFrame) -> set[int]:
    return {device.index for device in rank.hello.devices} | {
        index for record in rank.models for index in record.model.devices
    }


def found(
    record: StepRecord | None, index: int, learnt: DeviceState | None
) -> tuple[wire.Phase | None, wire.Ledger | None, Peak | None]:
    """The end of a step on a device, the owners read there (both cached, if it was learnt), and its peak."""
    if record is None:
        return None, None, None
    if learnt is not None and learnt.record is record:
        return learnt.end, learnt.owners, ledger.peak(record, index)
    end = ledger.boundary(record, index)
    return end, ledger.ledger_of(record, end) if end is not None else None, ledger.peak(record, index)
