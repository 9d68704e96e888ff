"""Rows of the Ranks screen: one per device of each rank, including ranks never heard, in the chosen order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import msgspec

from gpumon.analysis import buckets
from gpumon.analysis.job import JobStatus, RankStatus, State, ending, job
from gpumon.analysis.ledger import device_of
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.robust import median
from gpumon.session.frame import RankFrame
from gpumon.tui.view import View

HEAT_STEPS = 160
"""The most steps of a heat strip."""


class RankRow(msgspec.Struct, frozen=True, gc=False):
    """One device of one rank; None for unknown figures."""

    rank: int | None
    state: State
    node: str
    source: str | None = None
    device: int | None = None
    restarts: int = 0
    behind: int = 0
    pid: int | None = None
    host: str = ""
    name: str = ""
    step: int | None = None
    step_s: float | None = None
    peak: int | None = None
    phase: str = ""
    spread: int | None = None  # difference from the median peak
    reserved: int | None = None
    slack: int | None = None
    buckets: int | None = None
    headroom: int | None = None
    headroom_at_most: bool = False
    capacity: int | None = None  # of the device
    word: str = ""
    worst: str = ""  # the code of the gravest of `findings`
    findings: int = 0  # open warnings and critical findings
    critical: bool = False
    said: str = ""  # how the process ended

    @property
    def label(self) -> str:
        return "–" if self.rank is None else str(self.rank)


NOBODY = JobStatus((), None)


class RankPage(msgspec.Struct, frozen=True):
    """Everything that is drawn; compared by value."""

    rows: tuple[RankRow, ...] = ()
    job: JobStatus = NOBODY
    sentences: tuple[str, ...] = ()
    first_step: int = 0
    heat: tuple[tuple[int | None, ...], ...] = ()  # by row: peaks of the steps from `first_step` on
    order: str = "rank"
    reverse: bool = False


ORDERS: dict[str, Callable[[RankRow], float | None]] = {
    "rank": lambda row: row.rank,
    "peak": lambda row: None if row.peak is None else -row.peak,
    "reserved": lambda row: None if row.reserved is None else -row.reserved,
    "slack": lambda row: None if row.slack is None else -row.slack,
    "headroom": lambda row: row.headroom,
    "step": lambda row: row.step,
    "s/step": lambda row: None if row.step_s is None else -row.step_s,
    "findings": lambda row: -row.findings or None,
}
"""Sort keys: the worst first."""


class PeakHistory(msgspec.Struct):
    """Each device's peak by step, in order. Kept between looks, so only new steps are read."""

    _known: dict[tuple[str, int], dict[int, int]] = msgspec.field(default_factory=dict)

    def of(self, rank: RankFrame, device: int) -> dict[int, int]:
        known = self._known.setdefault((rank.source, device), {})
        newest = next(reversed(known), -1)
        steps = rank.steps
        if newest > (steps[-1].step if steps else -1):  # a past step is shown
            known.clear()
            newest = -1
        for record in steps[-min(HEAT_STEPS, steps[-1].step - newest) :] if steps and steps[-1].step > newest else ():
            if record.step <= newest:  # skipped step numbers
                continue
            peak = record.peak(device)
            if peak is not None:
                known[record.step] = peak
        while len(known) > HEAT_STEPS:
            del known[next(iter(known))]
        return known

    def keep(self, present: Collection[str]) -> None:
        for key in [key for key in self._known if key[0] not in present]:
            del self._known[key]


def rank_page(view: View, peaks: PeakHistory, order: str = "rank", reverse: bool = False) -> RankPage:
    reports = {report.source: report for report in view.reports}
    ranks = {rank.source: rank for rank in view.frame.ranks}
    paces = [report.steps_per_s if (report := reports.get(source)) else None for source in ranks]
    standing = job(view.frame, paces)
    rows: list[RankRow] = []
    for each in standing.ranks:
        rank = ranks.get(each.source or "")
        if rank is None:
            rows.append(RankRow(each.rank, each.state, each.node or ""))
            continue
        report = reports.get(rank.source)
        rows += [_row(each, rank, report, device) for device in (report.devices if report else ()) or (None,)]
    rows = ordered(_with_spread(rows), order, reverse)
    peaks.keep(ranks.keys())
    first, heat = _heat(rows, ranks, peaks)
    return RankPage(tuple(rows), standing, buckets.sentences(view.frame), first, heat, order, reverse)


def ordered(rows: Sequence[RankRow], order: str, reverse: bool = False) -> list[RankRow]:
    """By node and rank, or by a figure; rows without that figure are last in both directions."""
    if order == "rank":
        return list(reversed(rows)) if reverse else list(rows)
    key = ORDERS[order]
    known = sorted((row for row in rows if key(row) is not None), key=lambda row: key(row) or 0, reverse=reverse)
    return known + sorted((row for row in rows if key(row) is None), key=lambda row: row.source is None)


def _row(standing: RankStatus, rank: RankFrame, report: RankReport | None, device: DeviceReport | None) -> RankRow:
    pace = report.steps_per_s if report else None
    warning = [f for f in report.findings if f.state == "open" and f.severity != "info"] if report else []
    described = device_of(rank, device.device) if device else None
    forecast = device.forecast if device else None
    lines = device.ledger if device else None
    return RankRow(
        rank=standing.rank,
        state=standing.state,
        node=standing.node or "",
        source=rank.source,
        device=device.device if device else None,
        restarts=standing.restarts,
        behind=standing.behind,
        pid=rank.hello.pid,
        host=rank.hello.host,
        name=described.label if described else "",
        step=standing.step,
        step_s=1 / pace if pace else None,
        peak=device.peak.allocated if device and device.peak else None,
        phase=(device.peak.phase or "") if device and device.peak else "",
        reserved=lines.reserved if lines else None,
        slack=lines.slack if lines else None,
        buckets=buckets.of_rank(rank, device.device if device else None),
        headroom=forecast.headroom if forecast else None,
        headroom_at_most=forecast is not None and forecast.headroom_at_most,
        capacity=device.capacity if device else None,
        worst=next((f.code for f in warning if f.severity == "critical"), warning[0].code if warning else ""),
        word=(forecast.verdict or "") if forecast else "",
        findings=len(warning),
        critical=any(f.severity == "critical" for f in warning),
        said=ending(rank) or (f"{rank.lost_link_said}: {rank.lost_link}" if rank.lost_link else ""),
    )


def _with_spread(rows: list[RankRow]) -> list[RankRow]:
    peaks = [row.peak for row in rows if row.peak is not None]
    if len(peaks) < 2:
        return rows
    middle = round(median(peaks))
    return [row if row.peak is None else msgspec.structs.replace(row, spread=row.peak - middle) for row in rows]


def _heat(
    rows: Sequence[RankRow], ranks: dict[str, RankFrame], peaks: PeakHistory
) -> tuple[int, tuple[tuple[int | None, ...], ...]]:
    """Peaks by row, up to the last step that any rank closed."""
    known = [
        peaks.of(ranks[row.source], row.device) if row.source in ranks and row.device is not None else {}
        for row in rows
    ]  # fmt: skip
    if not any(known):
        return 0, ()
    last = max(next(reversed(each)) for each in known if each)
    first = max(min(next(iter(each)) for each in known if each), last - HEAT_STEPS + 1)
    steps = range(first, last + 1)
    return first, tuple([tuple(map(each.get, steps)) for each in known])


def reading(row: RankRow) -> str:
    """The row's state, with the lag of a late rank."""
    return f"late −{row.behind}" if row.state == "late" else row.state


def trouble(row: RankRow) -> str:
    """What is wrong with a rank that has fallen behind or ended, and where to look; empty if nothing is wrong."""
    if row.state == "missing":
        return "no message yet: it has not started, or has no agent (`gpumon ls` on its machine lists those that have)"
    if row.state == "late":
        return f"{row.behind:,} steps behind the first rank: Enter shows its current phase"
    if row.state == "silent":
        return row.said or f"process {row.pid} is alive but sends nothing: stopped, or in a long call outside Python"
    return row.said if row.state in ("failed", "killed", "dead", "left") else ""
