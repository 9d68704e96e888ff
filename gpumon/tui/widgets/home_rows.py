"""Rows of the Home screen: each job with its ranks and devices, then GPU processes without an agent."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence

import msgspec

from gpumon.analysis import ledger
from gpumon.analysis.answer import Answer, of_rank
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.units import NOT_KNOWN, duration
from gpumon.session.frame import Frame, RankFrame
from gpumon.tui.feed import ProcessFacts
from gpumon.tui.view import newest_read, newest_step
from gpumon_agent import wire

Key = tuple[str | int | None, ...]


class JobRow(msgspec.Struct, frozen=True, gc=False):
    """A job, or one of its ranks or devices below it; None for unknown figures."""

    key: Key
    job: str  # the job's key
    label: str
    answer: Answer
    head: bool = True  # the job's first row; `about` is below it
    source: str | None = None
    device: int | None = None
    device_name: str = ""
    peak: int | None = None
    reserved: int | None = None
    used: int | None = None  # of the device, by all processes
    capacity: int | None = None
    step: int | None = None
    steps_per_s: float | None = None
    headroom: int | None = None
    headroom_at_most: bool = False
    ended: bool = False
    about: str = ""


class ProcessRow(msgspec.Struct, frozen=True, gc=False):
    """A process on a GPU that has no agent."""

    key: Key
    gpu: str
    pid: int
    user: str
    bytes: int | None
    command: str


class HomePage(msgspec.Struct, frozen=True):
    """Everything that is drawn; compared by value."""

    jobs: tuple[JobRow, ...] = ()
    processes: tuple[ProcessRow, ...] = ()
    hidden: tuple[str, ...] = ()  # sentences about GPUs whose processes are unknown
    driver: bool = False  # whether the driver names any device
    ready: bool = False  # whether the machine was looked at

    @property
    def rows(self) -> tuple[JobRow | ProcessRow, ...]:
        return (*self.jobs, *self.processes)


def job_rows(
    job: str, name: str, about: str, frame: Frame, reports: Iterable[RankReport], answered: Answer
) -> list[JobRow]:
    """One row if the job has one rank on one device; else one for the job and one for each of these."""
    by_source = {report.source: report for report in reports}
    ended = all(rank.status == "ended" for rank in frame.ranks)
    rows: list[JobRow] = []
    for rank in frame.ranks:
        report = by_source.get(rank.source)
        said = of_rank(rank, report, frame.unix_ns)
        rows += [_row(job, rank, report, device, said) for device in (report.devices if report else ()) or (None,)]
    if len(rows) == 1:
        return [msgspec.structs.replace(rows[0], label=name, answer=answered, head=True, about=about)]
    ranks = len(frame.ranks)
    if ranks > 1:
        about = f"{ranks} ranks · {about}"
    source = frame.ranks[0].source if ranks else None
    return [JobRow((job,), job, name, answered, source=source, ended=ended and bool(ranks), about=about), *rows]


def _row(job: str, rank: RankFrame, report: RankReport | None, device: DeviceReport | None, said: Answer) -> JobRow:
    forecast = device.forecast if device else None
    described = ledger.device_of(rank, device.device) if device else None
    reserved = None
    if device is not None and rank.steps:
        phases = rank.steps[newest_read(rank, device.device)].on(device.device)
        reserved = max((phase.reserved for phase in phases if phase.reserved is not None), default=None)
    return JobRow(
        (job, rank.source, device.device if device else None),
        job,
        rank.label,
        said,
        head=False,
        source=rank.source,
        device=device.device if device else None,
        device_name=described.label if described else "",
        peak=device.peak.allocated if device and device.peak else None,
        reserved=reserved,
        used=device.device_used if device else None,
        capacity=device.capacity if device else None,
        step=newest_step(rank),
        steps_per_s=report.steps_per_s if report and rank.status == "live" else None,
        headroom=forecast.headroom if forecast and rank.status != "ended" else None,
        headroom_at_most=forecast is not None and forecast.headroom_at_most,
        ended=rank.status == "ended",
    )


def about(facts: ProcessFacts, arguments: Sequence[str], pid: int | None, unix_ns: int) -> str:
    """What tells jobs of one name apart: age, pid, directory, arguments. The longest is last, and cut first."""
    parts = [f"pid {pid}"] if pid is not None else []
    if facts.began_unix is not None:
        parts.append(f"for {coarse_age(unix_ns / 1e9 - facts.began_unix)}")
    if facts.cwd:
        parts.append(f"in {short_path(facts.cwd)}")
    if arguments:
        parts.append(" ".join(arguments))
    return " · ".join(parts)


def coarse_age(seconds: float) -> str:
    """Whole minutes after the first: a row that changes is drawn again."""
    if seconds < 60:
        return f"{max(0, int(seconds))} s"
    return f"{int(seconds) // 60} min" if seconds < 3_600 else duration(float(int(seconds) // 60 * 60))


PATH_CELLS = 32
"""A longer path loses its beginning, so that the arguments after it are seen at 80 columns."""


def short_path(path: str) -> str:
    home = os.environ.get("HOME", "")
    if home not in ("", "/") and (path == home or path.startswith(home + "/")):
        path = "~" + path[len(home) :]
    return path if len(path) <= PATH_CELLS else "…" + path[1 - PATH_CELLS :]


def process_rows(host: wire.Host | None, agents: Collection[int], facts: dict[int, ProcessFacts]) -> list[ProcessRow]:
    """What the driver lists on each GPU, less the processes that have an agent; the largest first."""
    rows: list[ProcessRow] = []
    for number, reading in enumerate(host.devices if host is not None else ()):
        found = [each for each in reading.processes or () if each.pid not in agents]
        found.sort(key=lambda each: (-(each.bytes or 0), each.pid))
        for each in found:
            known = facts.get(each.pid, ProcessFacts())
            command = " ".join((os.path.basename(known.command[0]), *known.command[1:])) if known.command else ""  # noqa: PTH119
            rows.append(
                ProcessRow(
                    ("gpu", reading.uuid, each.pid), str(number), each.pid, known.user or NOT_KNOWN, each.bytes,
                    command or wire.clean(each.name or NOT_KNOWN),
                )
            )  # fmt: skip
    return rows


def hidden(host: wire.Host | None) -> tuple[str, ...]:
    """Of each GPU whose processes the driver does not tell: why."""
    return tuple(
        f"GPU {number}: {reading.why.get('processes', 'the driver does not list its processes')}"
        for number, reading in enumerate(host.devices if host is not None else ())
        if reading.processes is None
    )
