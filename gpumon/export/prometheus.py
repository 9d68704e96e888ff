"""Prometheus metrics of the jobs on this machine: names, units and labels.

Model. A scrape turns frozen frames and reports into metric families. It reads nothing and waits for nothing, so any
number of scrapers see the same. Units: `_bytes`, `_seconds`, `_total` for counters, `_ratio` for shares. Unknown values
are absent, never 0. `gpumon_memory_bytes` is additive: the sum over `line` is the device's total if the driver was
read; without the driver's lines it is `gpumon_reserved_bytes`. Labels are few and bounded: `training` (the job's name),
`run` ("0", then "1" … for concurrent jobs of that name), `rank`, `device` ("cuda:0"), and one of line, phase, code,
state. Ranks without a number are numbered in order. Values that differ in every run (pid, host, versions) are labels of
`gpumon_rank_info` only. A peak is the maximum over the steps of the last minute, so that no scrape misses it. Cost:
benchmarks/replay_hour.py measures a scrape. Needs prometheus_client, an extra.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gpumon.analysis import buckets
from gpumon.analysis.job import GONE, job
from gpumon.analysis.ledger import device_name
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.types import DRIVER, OWNERS, REST
from gpumon.session.frame import Frame, RankFrame
from gpumon_agent._version import __version__

PEAK_WINDOW_NS = 60_000_000_000
LINES = (*OWNERS, *REST, *DRIVER)
STATES = ("live", "late", "silent", *GONE.values(), "missing")
RANKS_MAX = 1024
"""Per job; more would make a scrape too large."""


class JobReports(NamedTuple):
    """One job's latest reports."""

    training: str
    run: str
    frame: Frame
    reports: tuple[RankReport, ...]


class _Gauge(msgspec.Struct, frozen=True):
    name: str
    help: str
    labels: tuple[str, ...]
    counter: bool = False


_JOB = ("training", "run")
_RANK = (*_JOB, "rank")
_DEVICE = (*_RANK, "device")
_FAMILIES = {
    each.name: each
    for each in (
        _Gauge("gpumon_job_ranks", "Ranks of a job by state; missing ones never sent anything.",
               (*_JOB, "state")),
        _Gauge("gpumon_rank_info", "Describes a rank in its labels; always 1.",
               (*_RANK, "pid", "host", "node", "backend", "torch", "run_id")),
        _Gauge("gpumon_rank_up", "1 while the rank's process sends messages.", _RANK),
        _Gauge("gpumon_rank_restarts", "How often the launcher restarted the rank.", _RANK, True),
        _Gauge("gpumon_steps", "Iterations that the rank has closed.", _RANK, True),
        _Gauge("gpumon_step_duration_seconds", "Mean time of the last twenty iterations.", _RANK),
        _Gauge("gpumon_lost_events", "Messages of the rank that did not arrive.", _RANK, True),
        _Gauge("gpumon_host_resident_bytes", "Host memory of the rank's process.", _RANK),
        _Gauge("gpumon_host_pinned_bytes", "Host memory that torch's own allocator has pinned.", _RANK),
        _Gauge("gpumon_bucket_bytes", "DDP's gradient buckets on this rank.", _RANK),
        _Gauge("gpumon_memory_bytes", "A device's memory by owner at the newest step's end; lines add up.",
               (*_DEVICE, "line")),
        _Gauge("gpumon_allocated_bytes", "Bytes of tensors at the newest step's end.", _DEVICE),
        _Gauge("gpumon_reserved_bytes", "Bytes the allocator has reserved at the newest step's end.", _DEVICE),
        _Gauge("gpumon_device_capacity_bytes", "All memory of the device.", _DEVICE),
        _Gauge("gpumon_device_used_bytes", "Memory in use by all processes, by the driver.", _DEVICE),
        _Gauge("gpumon_peak_bytes", "Highest allocated bytes in a phase, over the steps of the last minute.",
               (*_DEVICE, "phase")),
        _Gauge("gpumon_forecast_peak_bytes", "Forecast peak of the next iteration.", _DEVICE),
        _Gauge("gpumon_forecast_peak_low_bytes", "Lower end of the forecast's 95 per cent interval.", _DEVICE),
        _Gauge("gpumon_forecast_peak_high_bytes", "Upper end of the forecast's 95 per cent interval.", _DEVICE),
        _Gauge("gpumon_headroom_bytes", "Bytes left above the next peak; if negative, bytes missing.", _DEVICE),
        _Gauge("gpumon_oom_probability_ratio", "Probability that the next iteration does not fit, 0 to 1.", _DEVICE),
        _Gauge("gpumon_steps_to_oom", "Iterations until memory runs out, if the peak grows.", _DEVICE),
        _Gauge("gpumon_allocator_retries", "cudaMalloc calls that failed and were tried again.", _DEVICE, True),
        _Gauge("gpumon_allocator_ooms", "Allocations that failed for good.", _DEVICE, True),
        _Gauge("gpumon_finding_open", "1 while a finding of the catalogue is open, 0 once it is gone.",
               (*_RANK, "code", "severity")),
    )
}  # fmt: skip


class _Families(msgspec.Struct):
    """The families of one scrape; families without samples are omitted."""

    made: dict[str, Metric] = msgspec.field(default_factory=dict)

    def add(self, name: str, labels: Sequence[str], value: float | None) -> None:
        if value is None:
            return
        family = self.made.get(name)
        if family is None:
            spec = _FAMILIES[name]
            kind = CounterMetricFamily if spec.counter else GaugeMetricFamily
            family = self.made[name] = kind(name, spec.help, labels=spec.labels)
        family.add_metric(list(labels), value)  # type: ignore[attr-defined]


class Jobs(Collector):
    """prometheus_client's collector; calls `watched` at every scrape, in any thread."""

    def __init__(self, watched: Callable[[], Sequence[JobReports]]) -> None:
        self._watched = watched

    def describe(self) -> Iterator[Metric]:
        """Nothing: families are known at the scrape."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        jobs = self._watched()
        exporter = GaugeMetricFamily("gpumon_exporter_info", "This exporter; always 1.", labels=("version",))
        exporter.add_metric([__version__], 1)
        yield exporter
        yield GaugeMetricFamily("gpumon_jobs", "Jobs on this machine with the agent.", value=len(jobs))
        families = _Families()
        for each in jobs:
            _job(families, each)
        yield from families.made.values()


def _job(families: _Families, watched: JobReports) -> None:
    of_job = (watched.training, watched.run)
    standing = job(watched.frame, [report.steps_per_s for report in watched.reports])
    states = Counter(each.state for each in standing.ranks if not each.replaced)
    for state in dict.fromkeys(STATES):
        families.add("gpumon_job_ranks", (*of_job, state), states.get(state, 0))
    replaced = {each.source for each in standing.ranks if each.replaced}
    taken: set[str] = set()
    for rank, report in zip(watched.frame.ranks[:RANKS_MAX], watched.reports, strict=False):
        if rank.source in replaced:
            continue
        label = str(rank.hello.rank) if rank.hello.rank is not None else str(len(taken))
        if label in taken:
            continue
        taken.add(label)
        _rank(families, (*of_job, label), rank, report)


def _rank(families: _Families, labels: tuple[str, str, str], rank: RankFrame, report: RankReport) -> None:
    hello = rank.hello
    about = (str(hello.pid), hello.host, hello.node or "", hello.backend, hello.torch or "", hello.run_id or "")
    families.add("gpumon_rank_info", (*labels, *about), 1)
    families.add("gpumon_rank_up", labels, int(rank.status == "live"))
    families.add("gpumon_rank_restarts", labels, hello.restarts)
    families.add("gpumon_steps", labels, rank.steps[-1].step + 1 if rank.steps else 0)
    families.add("gpumon_step_duration_seconds", labels, 1 / report.steps_per_s if report.steps_per_s else None)
    families.add("gpumon_lost_events", labels, rank.lost_events)
    families.add("gpumon_bucket_bytes", labels, buckets.of_rank(rank))
    families.add("gpumon_host_resident_bytes", labels, rank.heartbeat.rss if rank.heartbeat else None)
    families.add("gpumon_host_pinned_bytes", labels, rank.heartbeat.pinned if rank.heartbeat else None)
    open_now = {(found.code, found.severity): found.state == "open" for found in reversed(report.findings)}
    for (code, severity), is_open in sorted(open_now.items()):
        families.add("gpumon_finding_open", (*labels, code, severity), int(is_open))
    if rank.status == "ended":
        return  # its memory has been freed
    for device in report.devices:
        _device(families, (*labels, device_name(rank, device.device)), rank, device)


def _device(families: _Families, labels: tuple[str, ...], rank: RankFrame, device: DeviceReport) -> None:
    lines = device.ledger
    if lines is not None:
        for line in LINES:
            families.add("gpumon_memory_bytes", (*labels, line), getattr(lines, line))
        families.add("gpumon_allocated_bytes", labels, lines.allocated)
        families.add("gpumon_reserved_bytes", labels, lines.reserved)
    families.add("gpumon_device_capacity_bytes", labels, device.capacity)
    families.add("gpumon_device_used_bytes", labels, device.device_used)
    for phase, peak in _peaks(rank, device.device).items():
        families.add("gpumon_peak_bytes", (*labels, phase), peak)
    forecast = device.forecast
    if forecast is not None:
        families.add("gpumon_forecast_peak_bytes", labels, forecast.next_peak)
        families.add("gpumon_forecast_peak_low_bytes", labels, forecast.low)
        families.add("gpumon_forecast_peak_high_bytes", labels, forecast.high)
        families.add("gpumon_headroom_bytes", labels, None if forecast.headroom_at_most else forecast.headroom)
        families.add("gpumon_oom_probability_ratio", labels, forecast.p_oom)
        families.add("gpumon_steps_to_oom", labels, forecast.steps_to_oom)
    newest = rank.steps[-1].on(device.device) if rank.steps else ()
    for name, figure in (("gpumon_allocator_retries", "retries"), ("gpumon_allocator_ooms", "ooms")):
        known = [value for phase in newest if (value := getattr(phase, figure)) is not None]
        families.add(name, labels, known[-1] if known else None)


def _peaks(rank: RankFrame, device: int) -> dict[str, int]:
    peaks: dict[str, int] = {}
    since: int | None = None
    for record in reversed(rank.steps):
        if record.closed is None:
            continue
        if since is None:
            since = record.closed.t_ns - PEAK_WINDOW_NS
        elif record.closed.t_ns < since:
            break
        for phase in record.phases:
            peak = phase.allocated_peak
            if phase.device == device and peak is not None and peak > peaks.get(phase.phase, -1):
                peaks[phase.phase] = peak
    return peaks
