"""Everything gpumon states about a frame, rank by rank. Long: it puts together the answers of all of analysis.

A `Reporter` follows ranks over many frames. It learns each step once, in order, so a frame costs only its new steps. A
rank's report depends on its steps and the newest host reading, and is kept while both are unchanged (and no census or
checkpoint arrives).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from gpumon.analysis import device_budget, ledger
from gpumon.analysis.findings import Look, retries
from gpumon.analysis.findings.agent import parts_off
from gpumon.analysis.forecast import Room
from gpumon.analysis.lazy_figures import LazyLedger, lazy_estimate
from gpumon.analysis.leak_identity import TAKEN, Leak
from gpumon.analysis.rank_state import DeviceState, RankState, found
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.rules import RANK_SKEW
from gpumon.analysis.tracker import RULES
from gpumon.analysis.types import Forecast
from gpumon.session.frame import Frame, RankFrame, StepRecord
from gpumon_agent import wire
from gpumon_agent.shape_model.verdict import expandable, verdict

if TYPE_CHECKING:
    from gpumon.analysis.changes import ChangeResult
    from gpumon.analysis.diagnosis.oom_report import OomReport

PACE_STEPS = 20
"""Steps over which the pace is averaged."""

MET_STEPS = max(rule.opens_after for rule in RULES.values())
"""Newest steps of a newly met rank at each of which findings are evaluated, as if it had been watched."""

WAITING_STEPS = 64
"""The most steps of a rank left unlearnt: a session keeps a few hundred, and none may be lost unlearnt."""

ROOM_SHARE = 0.25
"""A rank has room if its headroom exceeds this share of the forecast's upper end."""


class Reporter:
    def __init__(self) -> None:
        self._ranks: dict[str, RankState] = {}
        self._pids: frozenset[int] | None = frozenset()  # of all ranks; None: to be counted again
        self._medians = 0  # how often the typical peak of some rank changed
        self._typical: dict[str, dict[tuple[str, int], float]] = {}  # these, by job, then by source and device

    def report(
        self, frame: Frame, due: Container[str] | None = None, shown: str | None = None
    ) -> tuple[RankReport, ...]:
        """One report per rank, in the frame's order. `due`: the sources to update, None for all.

        The others keep their last report; their steps are learnt at their turn. If one rank is `shown`, the forecasts
        of others with enough room learn only some steps of each turn, and all of them once that rank is shown.
        """
        present = {rank.source for rank in frame.ranks}
        for source in self._ranks.keys() - present:
            self._forget_typical(source, self._ranks.pop(source))
            self._pids = None
            self._medians += 1
        for rank in frame.ranks:
            self.meet(rank)
        return tuple(
            [
                self._known(rank, due) or self.rank(rank, sparsely=shown is not None and rank.source != shown)
                for rank in frame.ranks
            ]
        )

    def _known(self, rank: RankFrame, due: Container[str] | None) -> RankReport | None:
        if due is None or rank.source in due or rank.goodbye is not None or rank.oom is not None:
            return None
        state = self._ranks[rank.source]
        waiting = rank.steps[-1].step - state.newest.step if rank.steps and state.newest is not None else 0
        return None if waiting > WAITING_STEPS or state.tracker.confirming else state.report

    def meet(self, rank: RankFrame) -> None:
        """Registers a rank before its first closed step, so that other ranks know its process."""
        self._meet(rank)

    def _meet(self, rank: RankFrame) -> RankState:
        state = self._ranks.get(rank.source)
        if state is None:
            state = self._ranks[rank.source] = RankState()
        hello = rank.hello
        if state.hello is hello:
            return state
        self._forget_typical(rank.source, state)
        state.hello, state.placed = hello, -1
        self._pids = None
        self._medians += 1
        state.pid, state.job = hello.pid, hello.run_id or (hello.name if (hello.world_size or 1) > 1 else None)
        state.label, state.host = rank.label, rank.hello.host
        for index, device in state.devices.items():
            self._note_typical(rank.source, state, index, device.typical)
        return state

    def rank(self, rank: RankFrame, *, sparsely: bool = False) -> RankReport:
        """The report of one rank. `sparsely`: its forecast is not displayed, and may skip steps while it has room."""
        state = self._meet(rank)
        if state.report is None:
            for back in range(min(len(rank.steps) - 1, MET_STEPS), 0, -1):
                self._rank(replace(rank, steps=rank.steps[:-back], open_step=None), state, sparsely=False)
        return self._rank(rank, state, sparsely=sparsely)

    def _rank(self, rank: RankFrame, state: RankState, *, sparsely: bool) -> RankReport:
        newest = rank.steps[-1] if rank.steps else None
        key = (
            id(newest),
            len(rank.steps),
            rank.thinned,
            rank.host_unix_ns,
            rank.models,
            id(rank.open_step) if not newest else 0,
            rank.oom,
            rank.heartbeat,
            rank.censuses,
            rank.checkpoints,
            _ahead(rank),
            rank.status == "ended",
        )
        if state.report is None or key != state.key or (state.skipped and not sparsely):
            again = state.follow(rank, sparsely=sparsely and _has_room(state.report))
            if again:
                self._forget_typical(rank.source, state)
                self._medians += 1
            if again or len(state.devices) != state.placed:
                state.placed = len(state.devices)
                state.uuids = frozenset(d.uuid for d in rank.hello.devices if d.uuid and d.index in state.devices)
            state.report = self._state(rank, state)
            state.key = key
        return state.report

    def _state(self, rank: RankFrame, state: RankState) -> RankReport:
        seen = sorted(state.devices) or sorted({p.device for p in rank.open_step.phases} if rank.open_step else ())
        newest = rank.steps[-1] if rank.steps else None
        ahead = _ahead(rank)
        more = state.evidence(rank) or ahead != state.ahead
        leaks = {at: each.named.leak(state.censuses, at, each.growth.growth()) for at, each in state.devices.items()}
        devices = tuple(_device_report(rank, index, state, leaks.get(index)) for index in seen)
        state.ahead = ahead
        if newest is not None and (more or newest.step != state.looked_at):
            for device in devices:
                self._look(rank, state, device, leaks.get(device.device), newest, again=newest.step == state.looked_at)
            state.looked_at = newest.step
        return RankReport(
            rank.source,
            devices,
            (*state.tracker.findings(), *parts_off(rank)),
            steps_per_s(rank.steps),
            _oom(rank, devices, state),
            state.host_growth.growth(),
        )

    def _look(
        self,
        rank: RankFrame,
        state: RankState,
        report: DeviceReport,
        leak: Leak | None,
        record: StepRecord,
        again: bool,
    ) -> None:
        device_state = state.devices.get(report.device)
        if device_state is None:
            return
        described = ledger.device_of(rank, report.device)
        typical = device_state.forecaster.typical_peak()
        median = typical[1] if typical is not None else None
        if median != device_state.typical:
            device_state.typical = median
            self._medians += 1
            self._note_typical(rank.source, state, report.device, median)
        if typical is None or not self._stands_out(typical[0], state.job):
            state.peers, state.peers_of = (), -1  # the usual case: the peers are not needed
        elif state.peers_of != self._medians:
            state.peers, state.peers_of = self._peers(rank.source, state.job), self._medians
        if self._pids is None:
            self._pids = frozenset(other.pid for other in self._ranks.values())
        reading = ledger.reading_of(rank.host, described.uuid if described else None)
        state.tracker.look(
            Look(
                rank=rank,
                device=report.device,
                record=record,
                figures=device_state.newest,
                forecast=report.forecast,
                lines=report.make_ledger,
                reading=reading,
                capacity=report.capacity,
                our_pids=self._pids,
                usually_above=typical[0] if typical is not None else None,
                typical_peak=device_state.typical,
                peers_peaks=state.peers,
                retries_before=device_state.retries,
                elsewhere=self._elsewhere(rank, reading),
                growth=report.growth,
                host_growth=state.host_growth.growth() if report.device == min(state.devices) else (),
                censuses=state.censuses,
                leak=leak,
                outlier=device_state.batches.outlier,
                standing=device_state.standing,
                tables=state.tables,
            ),
            again=again,
        )
        if again:
            return
        device_state.retries = retries(record, report.device)

    def _peers(self, source: str, job: str | None) -> tuple[float, ...]:
        typical = self._typical.get(job or "", {})
        return tuple([median for (other, _), median in typical.items() if other != source])

    def _stands_out(self, usually_above: float, job: str | None) -> bool:
        """Whether rank-skew is possible: far enough above the lowest median of the job, its own included."""
        medians = self._typical.get(job or "", {}).values()
        return usually_above - min(medians, default=usually_above) >= RANK_SKEW.least_bytes

    def _note_typical(self, source: str, state: RankState, device: int, median: float | None) -> None:
        if state.job is not None and median is not None:
            self._typical.setdefault(state.job, {})[source, device] = median

    def _forget_typical(self, source: str, state: RankState) -> None:
        typical = self._typical.get(state.job or "", {})
        for key in [key for key in typical if key[0] == source]:
            del typical[key]

    def _elsewhere(self, rank: RankFrame, reading: wire.DeviceReading | None) -> dict[int, str]:
        """pid → label of this machine's watched processes that train only on other devices."""
        if reading is None or not reading.processes or len(reading.processes) < 2:
            return {}
        uuid = reading.uuid
        return {
            other.pid: other.label
            for source, other in self._ranks.items()
            if source != rank.source and other.host == rank.hello.host and other.uuids and uuid not in other.uuids
        }


def _has_room(report: RankReport | None) -> bool:
    """Whether headroom is so large that the forecast need not be precise."""
    if report is None:
        return False
    forecasts = [device.forecast for device in report.devices]
    return all(f is not None and (f.headroom is None or f.headroom > ROOM_SHARE * f.high) for f in forecasts)


def _ahead(rank: RankFrame) -> tuple[wire.Outlook, ...]:
    """Batches in forward now that will not fit, according to the agent."""
    if not rank.outlooks:
        return ()
    return tuple(each for each in rank.outlooks if each.verdict == wire.OOM_AHEAD)


_reporter = Reporter()


def report(frame: Frame) -> tuple[RankReport, ...]:
    """One report per rank, in the frame's order, from a Reporter shared by the whole process."""
    return _reporter.report(frame)


def _device_report(rank: RankFrame, index: int, state: RankState, leak: Leak | None) -> DeviceReport:
    device_state = state.devices.get(index)
    record = rank.steps[-1] if rank.steps else rank.open_step
    end, owners, peak = found(record, index, device_state)
    driver = ledger.driver_lines(rank, index)
    described = ledger.device_of(rank, index)
    reading = ledger.reading_of(rank.host, described.uuid if described else None)
    make_ledger = None
    held = leak.held if leak is not None else None
    if record is not None and end is not None:
        make_ledger = LazyLedger(
            rank, record.step, end, owners, device_state.lasting if device_state else None, driver, held
        )
    forecast = None
    if device_state is not None and not device_state.replays:  # the allocator's counters do not see CUDA graph replays
        forecast = _forecast(rank, device_state, driver)
    return DeviceReport(
        device=index,
        make_ledger=make_ledger,
        make_ledger_age=None if make_ledger is None else make_ledger.age_s,
        peak=ledger.peak_with_held(peak, held),
        make_estimate=lazy_estimate(state.owned.get(index), device_state, make_ledger),
        forecast=forecast,
        capacity=_capacity(described, reading),
        device_used=_used(reading),
        read=ledger.read_with_held(device_state.read, held) if device_state else None,
        composed=ledger.peak_with_held(device_state.composed, held) if device_state else None,
        growth=device_state.growth.growth() if device_state else (),
        regimes=tuple(device_state.forecaster.shape_model.changes) if device_state else (),
        highest=device_state.highest if device_state else None,
        make_whatif=None if device_state is None or forecast is None else partial(_whatif, rank, device_state),
        held=held,
    )


def _forecast(rank: RankFrame, device_state: DeviceState, driver: ledger.DriverLines | None) -> Forecast | None:
    """The next iteration's forecast, with the verdict and time to full that every output states."""
    budget = _budget(rank, device_state, driver)
    forecast = device_state.forecaster.forecast(budget, device_state.growth.kept())
    if forecast is None or forecast.headroom is None:
        return (
            _at_most(forecast, device_budget.most(rank, device_state.index))
            if forecast and rank.status != "ended"
            else forecast
        )
    if budget is None:
        return forecast
    fragments = device_state.forecaster.fragments
    fragments.fitted = max(fragments.fitted, forecast.highest)
    word, _ = verdict(forecast.next_peak, forecast.low, forecast.high, True, budget.available, None, fragments)
    return msgspec.structs.replace(forecast, verdict=word)


def _at_most(forecast: Forecast, most: int | None) -> Forecast:
    """Without a driver reading, headroom is an upper bound, and only "does not fit" can be stated."""
    if most is None:
        return forecast
    word = wire.OOM_AHEAD if forecast.low > most else None
    return msgspec.structs.replace(
        forecast, headroom=most - forecast.next_peak, headroom_at_most=True, verdict=word
    )  # fmt: skip


def _whatif(rank: RankFrame, device_state: DeviceState, report: DeviceReport) -> tuple[ChangeResult, ...]:
    """Answers for the usual changes at the newest step. Computed only when displayed: it takes a millisecond."""
    newest = rank.steps[-1].step if rank.steps else 0
    if newest != device_state.asked_at and device_state.newest is not None:
        from gpumon.analysis.changes import SHORT
        from gpumon.analysis.whatif import SETTLED, answer

        if newest < SETTLED:  # without the optimizer's state
            return ()
        device_state.asked_at = newest
        device_state.whatif = tuple(answer(rank, report, device_state.forecaster.shape_model, SHORT))
    return device_state.whatif


def _oom(rank: RankFrame, devices: tuple[DeviceReport, ...], state: RankState) -> OomReport | None:
    if rank.oom is None:
        return None
    from gpumon.analysis.diagnosis.cause import LeakEvidence
    from gpumon.analysis.diagnosis.live import of_rank  # imported only when needed

    kept = state.tracker.keeping(rank.oom.device)
    named = tuple(finding for finding in kept if finding.bytes_per_step)
    here = next((device for device in devices if device.device == rank.oom.device), None)
    if here is None:
        return of_rank(rank, None, kept)
    forecast = here.forecast
    rate = forecast.bytes_per_step if forecast is not None and forecast.growth == "kept" else None
    if rate is None:  # varying batches hide the growth in the peaks
        rate = sum(finding.bytes_per_step or 0 for finding in named)
    taken = [each.since for each in here.growth if each.figure in TAKEN and each.since is not None]
    growth = LeakEvidence(rate, rank.oom.step - min(taken, default=0), named) if rate else None
    return of_rank(rank, growth, kept, here.held)


def _budget(rank: RankFrame, device_state: DeviceState, driver: ledger.DriverLines | None) -> Room | None:
    """What the process can have: from a reading in a steady state, else conservatively from the newest one.

    Its own allocations do not change reserved + free, so the sum is used until a later reading can be placed. On the
    CPU: the machine's available memory, plus the least that the process held meanwhile.
    """
    newest = device_state.newest
    if newest is None or rank.status == "ended":
        return None
    described = ledger.device_of(rank, device_state.index)
    if described is not None and described.kind == "cpu" and rank.host and rank.host.memory_available is not None:
        return Room(min(newest.start, newest.end) + rank.host.memory_available)
    found = device_budget.by(driver, rank, device_state.index)
    if found is not None and rank.host_unix_ns is not None:
        device_state.available = found
        device_state.others.read((driver.unix_ns if driver is not None else rank.host_unix_ns) / 1e9, found)
    if device_state.available is None:
        return None
    device_state.forecaster.fragments.expandable = expandable(rank.hello.settings.values())
    shrinks = device_state.others.per_step(steps_per_s(rank.steps))
    return Room(device_state.available, device_state.forecaster.fragments.bytes, shrinks)


def _capacity(described: wire.Device | None, reading: wire.DeviceReading | None) -> int | None:
    if reading is not None and reading.total is not None:
        return reading.total
    return described.total_bytes if described is not None else None


def _used(reading: wire.DeviceReading | None) -> int | None:
    if reading is None:
        return None
    if reading.used is None and reading.total is not None and reading.free is not None:
        return reading.total - reading.free
    return reading.used


def steps_per_s(steps: Sequence[StepRecord]) -> float | None:
    """Pace over the newest steps, from their closing times; None before the second."""
    recent = steps[-PACE_STEPS - 1 :]
    if len(recent) < 2 or recent[0].closed is None or recent[-1].closed is None:
        return None
    elapsed_ns = recent[-1].closed.t_ns - recent[0].closed.t_ns
    done = recent[-1].step - recent[0].step
    return done / (elapsed_ns / 1e9) if elapsed_ns > 0 and done > 0 else None
