"""The result of a dry run: whether the script fits the device, where it peaked, and the breakdown there.

A `DryRunResult` gets every message of the run, in `link`'s order, and keeps what the verdict needs: the peak of each
rank and device, the ledger nearest to it, and every failed allocation. The device itself reports its highest use (all
processes and contexts together) at the end, so

    margin = capacity − most in use = capacity − reserved − context

is exact, even if no rank reported anything. Reserved is here what all processes took from the device beside contexts.

An out-of-memory error counts unless the rank closed a step after it (a search for the largest batch).
Cost: one report per closed step. Memory: one record per rank and device.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec
from msgspec.structs import replace

from gpumon.analysis import ledger
from gpumon.analysis.diagnosis.oom_report import OomReport
from gpumon.analysis.report import Reporter
from gpumon.analysis.rules import TENSOR_LEAK
from gpumon.analysis.types import Breakdown, Finding, Forecast, Peak
from gpumon.session.store import SessionStore
from gpumon_agent import wire

NEAR = 0.99
"""A breakdown serves for the highest peak if its own has this share of it: in a steady run only some steps have one."""

Ended = Literal["finished", "steps", "left", "failed"]
"""The script ended with exit code 0; after the requested steps; because the viewer left; in any other way."""


class Space(msgspec.Struct, frozen=True):
    """A device and its highest use. Bytes."""

    name: str
    capacity: int
    used: int
    context: int  # of all processes

    @property
    def reserved(self) -> int:
        return self.used - self.context

    @property
    def margin(self) -> int:
        return self.capacity - self.used


class HighestPeak(msgspec.Struct, frozen=True):
    """The peak of one rank on one device: of a phase, or at a failed allocation."""

    rank: int | None
    pid: int
    device: int
    step: int
    phase: str
    allocated: int
    reserved: int | None  # the rank's highest, perhaps at another moment
    module: str | None = None
    lines: Breakdown | None = None
    lines_step: int | None = None
    lines_of: Literal["peak", "end", "failure"] | None = None  # the step's peak, its phase's end, or the failure
    lines_phase: str | None = None


class Failed(msgspec.Struct, frozen=True):
    rank: int | None
    oom: wire.Oom
    explained: OomReport | None
    survived: bool


class Outcome(msgspec.Struct, frozen=True):
    """The verdict. `fits` is None if the run cannot tell; `unknown` says why."""

    fits: bool | None
    ended: Ended
    exit_code: int | None  # the script's; negative: a signal; None: ended from outside
    steps: int  # closed by every rank that trains
    devices: tuple[Space, ...]
    highest: tuple[HighestPeak, ...]  # in order of rank
    failed: tuple[Failed, ...]
    findings: tuple[Finding, ...] = ()  # open ones of all ranks, without info
    forecast: Forecast | None = None  # of the rank with the highest peak
    error: str = ""  # the exception that ended a rank: "ValueError: …"
    unknown: str = ""

    @property
    def grows_out(self) -> int | None:
        """Steps until out-of-memory, from what stays from step to step; None: no growth."""
        if any(not each.survived for each in self.failed):
            return None  # it is out of memory already
        return _grows_out(self.forecast, self.findings, self.tightest)

    @property
    def tightest(self) -> Space | None:
        return min(self.devices, key=lambda device: device.margin, default=None)

    @property
    def peak(self) -> HighestPeak | None:
        return max(self.highest, key=lambda highest: highest.allocated, default=None)


class _Followed(msgspec.Struct):
    top: wire.Phase | wire.Oom | None = None
    allocated: int = 0  # then
    reserved: int | None = None
    peak: Peak | None = None  # the highest with lines
    end: tuple[int, str, Breakdown] | None = None  # newest ledger of a boundary: step, phase
    forecast: Forecast | None = None
    failure: OomReport | None = None  # if the newest top is a failure

    def rises(self, top: wire.Phase | wire.Oom, allocated: int | None, reserved: int | None) -> None:
        if allocated is not None and (self.top is None or allocated > self.allocated):
            self.top, self.allocated = top, allocated
        if reserved is not None:
            self.reserved = max(self.reserved or 0, reserved)


class DryRunResult:
    def __init__(self) -> None:
        self._store = SessionStore()
        self._reporter = Reporter()
        self._followed: dict[tuple[str, int], _Followed] = {}
        self._failed: dict[str, list[tuple[wire.Oom, OomReport | None]]] = {}
        self._survived: dict[str, int] = {}  # how many of them
        self._steps: dict[str, int] = {}
        self._hellos: dict[str, wire.Hello] = {}
        self._findings: dict[str, tuple[Finding, ...]] = {}
        self._error = ""

    @property
    def steps(self) -> int:
        """Steps closed by every rank of the job; without ranks, by every process that has closed one."""
        closed, world = self._ranks()
        if world > 1:
            return min(closed.values()) if len(closed) >= world else 0
        return min(self._steps.values(), default=0)

    def _ranks(self) -> tuple[dict[int, int], int]:
        """The steps closed by each rank, and the number of ranks."""
        closed: dict[int, int] = {}
        for source, hello in self._hellos.items():
            if hello.rank is not None:
                closed[hello.rank] = max(closed.get(hello.rank, 0), self._steps.get(source, 0))
        return closed, max((hello.world_size or 1 for hello in self._hellos.values()), default=1)

    def take(self, received: wire.Received) -> None:
        """One message of an agent, or one reading of the machine."""
        self._store.apply(received)
        source, event = received.source, received.event
        if isinstance(event, wire.Hello):
            self._hellos[source] = event
        elif isinstance(event, wire.Phase):
            self._on(source, event.device).rises(event, event.allocated_peak, event.reserved_peak)
        elif isinstance(event, wire.Step):
            self._steps[source] = self._steps.get(source, 0) + 1
            self._survived[source] = len(self._failed.get(source, ()))
            self._look(received)
        elif isinstance(event, wire.Oom):
            self._look(received)
            rank = self._store.rank(source, received.unix_ns)
            explained = self._reporter.rank(rank).oom if rank is not None else None
            self._failed.setdefault(source, []).append((event, explained))
            followed = self._on(source, event.device)
            followed.rises(event, event.allocated, event.reserved)
            if followed.top is event:
                followed.failure = explained
        elif isinstance(event, wire.Goodbye) and event.reason == "exception":
            self._error = self._error or event.detail

    def _on(self, source: str, device: int) -> _Followed:
        return self._followed.setdefault((source, device), _Followed())

    def _look(self, received: wire.Received) -> None:
        rank = self._store.rank(received.source, received.unix_ns)
        if rank is None:
            return
        report = self._reporter.rank(rank)
        self._findings[rank.source] = report.findings
        for device in report.devices:
            followed = self._on(rank.source, device.device)
            peak = device.peak
            if peak and peak.lines and (followed.peak is None or peak.allocated > followed.peak.allocated):
                followed.peak = peak
            record = rank.steps[-1] if rank.steps else rank.open_step
            end = ledger.boundary(record, device.device) if record is not None else None
            if device.ledger is not None and end is not None:
                followed.end = (end.step, end.phase, device.ledger)
            followed.forecast = device.forecast

    def outcome(
        self,
        ended: Ended,
        exit_code: int | None,
        devices: tuple[Space, ...],
        *,
        steps: int | None = None,
        missed: str = "",
    ) -> Outcome:
        """The verdict, after the script has ended. `devices`: the highest use of each. `steps`: those requested.

        `missed` names the rank that others waited for; empty if none.
        """
        frame = self._store.frame(time.time_ns())
        hellos = {rank.source: rank.hello for rank in frame.ranks}
        highest = [
            (_highest(hellos[source], followed.top, followed), followed)
            for (source, _), followed in self._followed.items()
            if source in hellos and followed.top is not None
        ]
        failed = tuple(
            Failed(hellos[source].rank, oom, explained, at < self._survived.get(source, 0))
            for source, ooms in self._failed.items()
            if source in hellos
            for at, (oom, explained) in enumerate(ooms)
        )
        _, tallest = max(highest, key=lambda pair: pair[0].allocated, default=(None, None))
        forecast = tallest.forecast if tallest is not None else None
        unknown = self._unknown(ended, devices, steps, missed)
        findings = tuple(
            f for found in self._findings.values() for f in found if f.state == "open" and f.severity != "info"
        )
        tightest = min(devices, key=lambda device: device.margin, default=None)
        fits = None if unknown else _grows_out(forecast, findings, tightest) is None
        if any(not each.survived for each in failed):
            fits, unknown, forecast = False, "", None  # there is no next iteration
        return Outcome(
            fits,
            ended,
            exit_code,
            self.steps,
            devices,
            tuple(sorted((h for h, _ in highest), key=lambda h: (h.rank or 0, h.pid, h.device))),
            failed,
            findings,
            forecast,
            self._error,
            unknown,
        )

    def _unknown(self, ended: Ended, devices: tuple[Space, ...], steps: int | None, missed: str) -> str:
        """Why the run cannot tell whether it fits; empty if it can."""
        if ended == "failed":
            return "the script failed by itself, not for want of memory"
        if not any(device.used for device in devices):
            return "the script used no GPU"
        if missed:
            return missed
        closed, world = self._ranks()
        if not self._steps:
            return "no training step was seen"
        if world > 1:
            wanted = 1 if steps is None or ended == "finished" else steps
            for rank in range(world):
                if closed.get(rank, 0) < wanted:
                    had = f"{closed[rank]} of {wanted} steps" if closed.get(rank) else "no step"
                    return f"rank {rank} closed {had}" if rank in closed else f"rank {rank} was not seen"
        return ""


GROWTH_LEARNT_FROM = 20
"""Steps. A shorter dry run cannot distinguish a leak from settling."""


def _grows_out(forecast: Forecast | None, findings: tuple[Finding, ...], tightest: Space | None) -> int | None:
    """From the forecast; else from the rate of the tensors that a finding names, and the device's margin."""
    if (
        forecast is not None
        and forecast.growth == "kept"
        and forecast.learnt_from >= GROWTH_LEARNT_FROM
        and forecast.steps_to_oom is not None
        and forecast.steps_to_oom_high is not None
    ):
        return forecast.steps_to_oom
    rate = max((f.bytes_per_step or 0 for f in findings if f.code == TENSOR_LEAK.code), default=0)
    return None if not rate or tightest is None else tightest.margin // rate


def _highest(hello: wire.Hello, top: wire.Phase | wire.Oom, followed: _Followed) -> HighestPeak:
    allocated, reserved = followed.allocated, followed.reserved
    highest = HighestPeak(hello.rank, hello.pid, top.device, top.step, top.phase, allocated, reserved)
    failure = followed.failure if isinstance(top, wire.Oom) else None
    if failure is not None and failure.lines is not None:
        return replace(
            highest, module=failure.module, lines=failure.lines, lines_step=top.step, lines_of="failure",
            lines_phase=top.phase,
        )  # fmt: skip
    peak = followed.peak
    if peak is not None and peak.allocated >= NEAR * allocated:
        return replace(
            highest, module=peak.module, lines=peak.lines, lines_step=peak.step, lines_of="peak", lines_phase=peak.phase
        )
    if followed.end is not None:
        step, phase, lines = followed.end
        return replace(highest, lines=lines, lines_step=step, lines_of="end", lines_phase=phase)
    return highest
