"""The sections of a report's page. Each states what reports and history say; nothing is computed here."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gpumon.analysis import comparison, ledger
from gpumon.analysis.answer import Answer
from gpumon.analysis.answer import parts as words
from gpumon.analysis.comparison import Compared
from gpumon.analysis.diagnosis.oom_report import OomReport
from gpumon.analysis.job import ending, job
from gpumon.analysis.job_findings import JobFinding
from gpumon.analysis.pages import PAGES
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.types import DRIVER, OWNERS, REST, Breakdown, Finding, Peak
from gpumon.analysis.units import count, exact, pace, percent, size
from gpumon.export.markup import Html, el, facts, table
from gpumon.export.report_steps import parts, shown
from gpumon.session.frame import Frame, RankFrame, StepRecord
from gpumon_agent._version import __version__

LETTER_FROM = 3.0
"""A part of a bar has its letter from this width on, in per cent: about two letters wide on a phone."""


class Subject(NamedTuple):
    """What one section is about. `report` None: nothing of the rank's devices is known."""

    rank: RankFrame
    whole: RankReport | None
    report: DeviceReport | None
    known: list[StepRecord]
    letters: Mapping[str, str]

    @property
    def name(self) -> str:
        if self.report is None:
            return self.rank.label
        device = ledger.device_of(self.rank, self.report.device)
        kind = device.kind if device is not None else "device"
        return f"{self.rank.label} · {kind if kind == 'cpu' else f'{kind}:{self.report.device}'}"


def clock(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(unix_s))


def when(frame: Frame, unix_s: float) -> str:
    what = "a recording" if frame.replaying else "a running job"
    return f"gpumon {__version__} made this page of {what}, {clock(unix_s)}."


def answer(said: Answer) -> Html:
    head, text, do = words(said)
    text += "" if text.endswith(".") else "."
    more = [el("p", f"To do: {do}.")] if do else []
    return el("div", el("p", el("strong", head), f": {text}"), *more, class_=f"answer {said.state}")


def ranks(frame: Frame) -> list[Html]:
    """A table of several ranks."""
    standing = job(frame)
    if len(standing.ranks) < 2:
        return []
    by_source = {rank.source: rank for rank in frame.ranks}
    rows = []
    for each in standing.ranks:
        rank = by_source.get(each.source or "")
        state = each.state + (" (replaced)" if each.replaced else "")
        if rank is None:
            rows.append([f"rank {each.rank}", state, "", "", each.node or ""])
            continue
        step = count(rank.steps[-1].step) if rank.steps else ""
        rows.append([rank.label, state, str(rank.hello.pid), step, each.node or rank.hello.host])
    return [el("h2", "Ranks"), table(("", "state", "pid", "last step", "host"), rows, numbers=(3,))]


def named(subjects: Sequence[Subject], said: Answer) -> int:
    """The first section of the rank that the answer names."""
    wanted = None if said.who is None else said.who.pid
    return next((at for at, each in enumerate(subjects) if each.rank.hello.pid == wanted), 0)


def chooser(names: Sequence[str], chosen: int) -> list[Html]:
    if len(names) < 2:
        return []
    options = [
        el("option", name, **({"selected": "selected"} if at == chosen else {})) for at, name in enumerate(names)
    ]
    return [el("p", el("label", "Show ", el("select", *options, id="subject")))]


# --------------------------------------------------------------------------------------------------- a rank's device


def section(subject: Subject, chosen: Sequence[StepRecord], line: Mapping[str, Any] | None) -> Html:
    rank, whole, report, known, letters = subject
    made = [el("h2", subject.name), _summary(subject)]
    if whole is not None and whole.oom is not None and (report is None or rank.oom is None or
                                                        rank.oom.device == report.device):  # fmt: skip
        made += _oom(whole.oom, letters)
    made.append(el("h3", "Peak of each step"))
    if line is not None:
        made += _plot(shown(known, chosen), line["capacity"], to_capacity=line["to_capacity"])
    else:
        made.append(el("p", "No step's peak was read.", class_="dim"))
    if report is not None:
        made += [*_highest(report, known, letters), *_device(report, letters), *_estimate(rank, report)]
    return el("section", *made, class_="subject")


def _summary(subject: Subject) -> Html:
    rank, whole, report, known, _ = subject
    highest = report.highest if report is not None else None
    forecast = report.forecast if report is not None else None
    ahead = ""
    if forecast is not None:
        ahead = f"{size(forecast.next_peak)} in {forecast.phase} ({size(forecast.low)} to {size(forecast.high)})"
        if forecast.headroom is not None:
            bound = "at most " if forecast.headroom_at_most else ""
            ahead += f", {bound}{size(forecast.headroom)} of headroom"
    return facts(
        [
            ("highest peak", "" if highest is None else f"{size(highest.allocated)} in step {count(highest.step)}"),
            ("capacity", "" if report is None or report.capacity is None else size(report.capacity)),
            ("next iteration", ahead),
            ("steps read", "" if not known else f"{count(known[0].step)} to {count(known[-1].step)}"),
            ("pace", "" if whole is None or not whole.steps_per_s else pace(whole.steps_per_s)),
            ("ended", ending(rank) or ""),
        ]
    )


def _plot(how_many: str, capacity: int | None, *, to_capacity: bool) -> list[Html]:
    def key(kind: str, name: str) -> Html:
        line = el("line", x1="0", x2="30", y1="5", y2="5", class_=kind)
        return el("span", el("svg", line, viewBox="0 0 30 10", aria_hidden="true"), f" {name}", class_="key")

    keys = [key("peak", "peak of allocated"), key("reserved", "peak of reserved")]
    if capacity is not None:
        keys.append(key("capacity", f"capacity, {size(capacity)}" + ("" if to_capacity else " (above the plot)")))
    return [
        el("p", *keys),
        el("div", el("noscript", "The timeline needs JavaScript."), class_="timeline"),
        el(
            "p",
            el("button", "Highest peak", type="button", class_="highest"),
            f" Click, drag or use the arrow keys to choose a step. {how_many}",
            class_="dim",
        ),
        el("div", class_="chosen", aria_live="polite"),
    ]


def bar(lines: Sequence[tuple[str, int]], letters: Mapping[str, str]) -> Html:
    total = max(1, sum(max(0, value) for _, value in lines))
    made: list[Html] = []
    x = 0.0
    for line, value in lines:
        width = 100 * max(0, value) / total
        title = el("title", f"{line.replace('_', ' ')} {size(value)}")
        made.append(el("rect", title, x=f"{x:.3f}%", width=f"{width:.3f}%", height="100%", class_=f"l-{line}"))
        if width >= LETTER_FROM:
            made.append(el("text", letters.get(line, ""), x=f"{x + width / 2:.3f}%", y="68%"))
        x += width
    return el("svg", *made, class_="bar", aria_hidden="true")


def breakdown(lines: Sequence[tuple[str, int]], total: tuple[str, int], letters: Mapping[str, str]) -> list[Html]:
    """A bar, and its legend, which adds up to the total. What is missing to it is a line of its own."""
    rest = total[1] - sum(value for _, value in lines)
    lines = [*lines, *([("unattributed", rest)] if rest else [])]
    rows: list[Sequence[str]] = [
        (_swatch(line, letters), line.replace("_", " "), size(value), percent(value / total[1]), exact(value))
        for line, value in lines
        if total[1]
    ]
    rows.append(("", el("b", total[0]), el("b", size(total[1])), "", el("b", exact(total[1]))))
    return [bar(lines, letters), table(("", "line", "size", "share", "bytes"), rows, numbers=(2, 3, 4))]


def _swatch(line: str, letters: Mapping[str, str]) -> Html:
    letter = el("text", letters.get(line, ""), x="50%", y="75%")
    return el(
        "svg", el("rect", width="100%", height="100%", class_=f"l-{line}"), letter, class_="swatch", aria_hidden="true"
    )


def _highest(report: DeviceReport, known: Sequence[StepRecord], letters: Mapping[str, str]) -> list[Html]:
    """The breakdown of the highest peak; if it was not read by owner, of the highest one that was."""
    made = [el("h3", "The highest peak by owner")]
    if report.highest is None:
        return [*made, el("p", "No step's peak was read.", class_="dim")]
    at = report.highest
    taken = [one for record in known if (one := _taken_apart(record, report)) is not None]
    if not taken:
        return [
            *made,
            el("p", f"{size(at.allocated)} in step {count(at.step)}. No peak was read by owner.", class_="dim"),
        ]
    peak, lines = max(taken, key=lambda one: (one[0].step == at.step, one[0].allocated))
    if peak.step != at.step:
        said = f"The highest peak, {size(at.allocated)} in step {count(at.step)}, was not read by owner."
        made.append(el("p", f"{said} This is the highest one that was.", class_="dim"))
    elif peak.allocated < at.allocated:
        said = f"The highest peak, {size(at.allocated)}, was in an unread step shortly before this one."
        made.append(el("p", said, class_="dim"))
    made.append(el("p", _place(peak) + "."))
    return [*made, *breakdown(parts(lines), ("allocated", lines.allocated or 0), letters)]


def _taken_apart(record: StepRecord, report: DeviceReport) -> tuple[Peak, Breakdown] | None:
    peak = ledger.peak_with_held(ledger.peak(record, report.device), report.held)
    return None if peak is None or peak.lines is None or peak.lines.allocated is None else (peak, peak.lines)


def _place(peak: Peak) -> str:
    where = f" in {peak.phase}" if peak.phase else ""
    module = f", while {peak.module} ran" if peak.module else ""
    return f"{size(peak.allocated)}{where} of step {count(peak.step)}{module}"


def _device(report: DeviceReport, letters: Mapping[str, str]) -> list[Html]:
    """The device as the newest step ended, as far as the driver's figures are known."""
    lines, title = report.ledger, "The device as the newest step ended"
    if (lines is None or lines.allocated is None) and report.read is not None:
        lines, title = report.read.lines, f"The device as step {count(report.read.step)} ended"
    if lines is None or lines.allocated is None:
        return []
    owners = [*OWNERS, "unexplained", "unattributed", "rounding"]
    names, total = owners, ("allocated", lines.allocated)
    if lines.reserved is not None:
        names, total = [*owners, "slack"], ("reserved", lines.reserved)
        if lines.total is not None and None not in (lines.context, lines.other_processes, lines.free):
            names, total = [*names, *DRIVER], ("the device's total", lines.total)
    return [el("h3", title), *breakdown(parts(lines, names), total, letters)]


def _estimate(rank: RankFrame, report: DeviceReport) -> list[Html]:
    newest = next((each for each in reversed(rank.steps) if _read(each, report.device)), None)
    found = comparison.compare(report, newest)
    if found is None:
        return []
    groups = [
        ("as the step ends", (*found.owners, *([found.allocated] if found.allocated else []))),
        ("added within the step", found.added),
        ("peak of the phase", (*found.phases, *([found.peak] if found.peak else []))),
    ]
    rows = [_compared(row, "" if at else group) for group, rows in groups for at, row in enumerate(rows)]
    heads = ("", "", "estimate", "measured", "difference", "source of the estimate")
    remarks = comparison.remarks(found, report)
    return [
        el("h3", "Estimate and measurement"),
        table(heads, rows, numbers=(2, 3, 4)),
        *(el("p", each) for each in remarks),
    ]


def _read(record: StepRecord, device: int) -> bool:
    here = record.on(device)
    return bool(here) and all(phase.allocated is not None for phase in here)


def _compared(row: Compared, group: str) -> Sequence[str]:
    return (
        group, row.line.replace("_", " "), size(row.estimate), size(row.measured), size(row.difference, sign=True),
        row.source,
    )  # fmt: skip


def _oom(report: OomReport, letters: Mapping[str, str]) -> list[Html]:
    where = [
        f"step {count(report.step)}" if report.step is not None else "", report.phase or "", report.module or "",
        report.where or "",
    ]  # fmt: skip
    made = [
        el("h3", "Out of memory"),
        el("p", report.sentence),
        facts(
            [
                ("where", ", ".join(each for each in where if each)),
                ("line", report.code or ""),
                ("message", report.message),
            ]
        ),
        *_list("Why", report.reasons),
        *_list(
            "What helps",
            [each.text + (f" (saves {size(each.saves)})" if each.saves else "") for each in report.remedies],
        ),
        *_list("Notes", (*report.notes, *report.assumptions)),
    ]
    lines = report.lines
    if lines is None or lines.allocated is None:
        return made
    names = [name for name in (*OWNERS, *REST) if name != "slack"]
    return [*made, el("p", "By owner, as the allocation failed:"),
            *breakdown(parts(lines, names), ("allocated", lines.allocated), letters)]  # fmt: skip


def _list(title: str, items: Sequence[str]) -> list[Html]:
    return [el("p", f"{title}:"), el("ul", *(el("li", item) for item in items))] if items else []


# ------------------------------------------------------------------------------------------------ findings, machine


def finding(each: JobFinding, subjects: Sequence[Subject]) -> Html:
    found = each.finding
    heading = el("span", found.severity, class_=f"severity {found.severity}")
    ranks = f" · {each.ranks}" if each.ranks else ""
    gone = " · gone" if found.state != "open" else ""
    rank = next((one.rank for one in subjects if one.rank.source == each.sources[0]), None)
    pairs = [
        ("finding", found.code),
        ("holder", _holder(found)),
        ("line", found.where or ""),
        ("since", _since(found.step, rank)),
        ("bytes", "" if found.bytes is None else size(found.bytes)),
        ("growth", "" if found.bytes_per_step is None else f"{size(found.bytes_per_step)} a step"),
        ("so far", "" if found.so_far is None else size(found.so_far)),
        ("to do", found.remedy),
    ]
    return el(
        "details", el("summary", heading, f" {found.title}{ranks}{gone}"), facts(pairs), *_documentation(found.code)
    )


def _holder(found: Finding) -> str:
    """With its line; `Finding.where` is the line that made the bytes."""
    if found.by is None:
        return found.holder or ""
    return found.by.text + (f" ({found.by.where})" if found.by.where else "")


def _since(step: int | None, rank: RankFrame | None) -> str:
    if step is None:  # not in the history
        return ""
    steps = () if rank is None else (*rank.older, *rank.steps)
    closed = next((record.closed for record in steps if record.step >= step and record.closed is not None), None)
    at = "" if closed is None or rank is None else f", {clock(rank.unix_ns(closed.t_ns) / 1e9)}"
    return f"step {count(step)}{at}"


def _documentation(code: str) -> list[Html]:
    page = PAGES.get(code)
    if page is None:
        return []
    pairs = [
        ("what it means", page.means), ("how gpumon detects it", page.evidence), ("what to do", page.do),
        ("when it is not reported", page.silent),
    ]  # fmt: skip
    return [el("details", el("summary", f"About {code}"), facts(pairs))]


def machine(frame: Frame) -> Html:
    """One row a process."""
    made = []
    for rank in frame.ranks:
        said, host = rank.hello, rank.host
        steps = (*rank.older, *rank.steps)
        closed = [each.closed for each in (steps[:1] + steps[-1:]) if each.closed is not None]
        times = [clock(rank.unix_ns(each.t_ns) / 1e9) for each in closed]
        devices = [f"{device.kind}:{device.index} {device.name}, {size(device.total_bytes)}" for device in said.devices]
        pairs = [
            ("command", " ".join(said.argv)),
            ("host", said.host),
            ("pid", str(said.pid)),
            ("device", "; ".join(devices)),
            ("driver", (host.driver if host is not None else None) or "not known"),
            ("host memory", "" if host is None or host.memory_total is None else size(host.memory_total)),
            ("torch", said.torch or "not known"),
            ("python", said.python),
            ("gpumon", f"{said.agent} in the training, {__version__} for this page"),
            ("first step", times[0] if times else ""),
            ("last step", times[-1] if times else ""),
            ("settings", ", ".join(f"{name}={value}" for name, value in said.settings.items() if value)),
        ]
        made.append(el("details", el("summary", rank.label), facts(pairs), open="open"))
    return Html("\n".join(made))
