"""The state of a whole job as one object. Every output states it first: screen, JSON, text, exit code.

Model. Each rank has one state; the job has the worst of them, with its rank. Among ranks in that state, the one that is
full first is named, then the one with the most bytes; of several that died, the first: the others often follow it.
States, worst first:

    out-of-memory  an allocation failed, and no step closed after it
    ended          a process is gone (of several: one died, or all ended); `what` says how
    will-not-fit   the batch in forward, or the next iteration, needs more than there is
    leak           bytes stay allocated from step to step
    tight          less than 5 % of what there is would be left
    unknown        nothing is known of the next iteration, or of the room on the device
    ok             it fits, and nothing grows

Nothing is computed here: verdicts, steps until full and findings come from the reports.
Cost. A pass over the findings of each rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from gpumon.analysis import units
from gpumon.analysis.job import DIED, GONE, died_unix_ns, ending
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.rules import HOST_LEAK, NEAR_CAPACITY, OOM_AHEAD, RETAINED_GRAPH, TENSOR_LEAK
from gpumon.analysis.types import KEPT, Finding, Forecast
from gpumon.session.frame import Frame, RankFrame
from gpumon_agent import wire

if TYPE_CHECKING:
    from gpumon.analysis.diagnosis.oom_report import OomReport
    from gpumon.analysis.dryrun_result import Outcome
    from gpumon.analysis.estimate.report import EstimateReport

State = Literal["out-of-memory", "ended", "will-not-fit", "leak", "tight", "unknown", "ok"]
STATES: tuple[State, ...] = ("out-of-memory", "ended", "will-not-fit", "leak", "tight", "unknown", "ok")

GROWING = (TENSOR_LEAK.code, RETAINED_GRAPH.code, HOST_LEAK.code)
"""Findings on unbounded growth, the device's before the host's."""

EVIDENCE_MAX = 4


class Who(msgspec.Struct, frozen=True):
    """The process, and the variable or line in its code. None: not known, or not relevant."""

    rank: int | None = None
    pid: int | None = None
    variable: str | None = None
    function: str | None = None
    file: str | None = None
    line: int | None = None
    source_line: str | None = None  # the text of that line


class When(msgspec.Struct, frozen=True):
    """When memory is full, or was: steps from now, seconds from now, and that moment in unix seconds."""

    steps: int | None = None
    seconds: float | None = None
    unix: float | None = None


class Answer(msgspec.Struct, frozen=True):
    """The state of a job, in the words that every output uses."""

    state: State
    what: str
    who: Who | None = None
    when: When | None = None
    do: str = ""
    evidence: tuple[str, ...] = ()
    bytes: int = 0  # among equal states the larger one is named

    @property
    def key(self) -> tuple[str, Who | None]:
        """Answers with equal keys count as the same answer."""
        return self.state, self.who


NOBODY = Answer("unknown", "no process has sent anything yet")


def answer(frame: Frame, reports: Iterable[RankReport], before: Answer | None = None) -> Answer:
    """`before`: what was answered last, see `worst`."""
    by_source = {report.source: report for report in reports}
    newest: dict[int | None, int] = {}  # rank → when its newest process began; others were replaced
    for rank in frame.ranks:
        newest[rank.hello.rank] = max(rank.hello.clock.unix_ns, newest.get(rank.hello.rank, 0))
    return worst(
        (
            of_rank(rank, by_source.get(rank.source), frame.unix_ns)
            for rank in frame.ranks
            if rank.hello.rank is None or rank.hello.clock.unix_ns >= newest[rank.hello.rank]
        ),
        before,
    )


def worst(answers: Iterable[Answer], before: Answer | None = None) -> Answer:
    """The answer that represents the job. A finished rank is ignored while another one runs.

    The one `before` is kept while no other rank is in a worse state, so that ranks with equal leaks do not alternate.
    If nothing is wrong with it, another one with a finding is named.
    """
    known = list(answers)
    running = [each for each in known if each.state != "ended" or each.bytes]
    found = min(running or known, key=_weight, default=NOBODY)
    if before is None or before.state != found.state:
        return found
    kept = next((each for each in known if each.key == before.key), found)
    return found if found.bytes and not kept.bytes else kept


def _weight(each: Answer) -> tuple[int, float, int, float]:
    steps = each.when.steps if each.when is not None and each.when.steps is not None else float("inf")
    ended = each.when.unix if each.state == "ended" and each.when is not None and each.when.unix is not None else 0.0
    return STATES.index(each.state), steps, -each.bytes, ended


def of_rank(rank: RankFrame, report: RankReport | None, unix_ns: int) -> Answer:
    hello = rank.hello
    who = Who(hello.rank if (hello.world_size or 1) > 1 or hello.rank else None, hello.pid)
    if report is None:
        return Answer("unknown", "no step has closed yet", who)
    found = [each for each in report.findings if each.state == "open" and each.severity != "info"]
    evidence = _evidence(found)
    leak = _leak(found)
    if rank.oom is not None and report.oom is not None and _final(rank, rank.oom):
        named = leak if report.oom.verdict == "leak" else None
        return of_oom(report.oom, _named(who, named) if named is not None else who, rank.unix_ns(rank.oom.t_ns) / 1e9)
    if rank.goodbye is not None:
        state = GONE.get(rank.goodbye.reason, "dead")
        ended = died_unix_ns(rank)
        return Answer(
            "ended", ending(rank) or "ended", who, When(unix=None if ended is None else ended / 1e9),
            evidence=evidence, bytes=int(state in DIED),
        )  # fmt: skip
    if rank.lost_link is not None:
        return Answer(
            "unknown",
            f"{rank.lost_link_said}: {rank.lost_link}",
            who,
            When(unix=rank.heard_unix_ns / 1e9),
            evidence=evidence,
        )
    if rank.status == "silent":
        return Answer(
            "unknown", "the process sends nothing: it is stopped (SIGSTOP?), or gets no processor time", who,
            When(unix=rank.heard_unix_ns / 1e9), evidence=evidence,
        )  # fmt: skip
    return _living(rank, report, found, leak, who, evidence, unix_ns)


def _evidence(found: Sequence[Finding]) -> tuple[str, ...]:
    """What the findings say, each with the text of its line."""
    return tuple(
        f"{each.title}. {each.where}: {each.source_line}" if each.source_line else each.title
        for each in found[:EVIDENCE_MAX]
    )


def _final(rank: RankFrame, oom: wire.Oom) -> bool:
    """Whether training did not survive it: no step closed afterwards."""
    return not rank.steps or rank.steps[-1].step <= oom.step


def _living(
    rank: RankFrame,
    report: RankReport,
    found: Sequence[Finding],
    leak: Finding | None,
    who: Who,
    evidence: tuple[str, ...],
    unix_ns: int,
) -> Answer:
    tightest = _tightest(report.devices)
    forecast = tightest.forecast if tightest is not None else None
    ahead = next((each for each in found if each.code == OOM_AHEAD.code), None)
    when = _full(forecast, report.steps_per_s, unix_ns)
    said = next((each for each in rank.outlooks if each.verdict == wire.OOM_AHEAD and _is_now(rank, each)), None)
    if said is not None or (forecast is not None and forecast.verdict == wire.OOM_AHEAD):
        what, missing = _too_large(said, forecast)
        cause = leak or ahead
        return Answer(
            "will-not-fit", what, _named(who, leak) if leak is not None else who, When(0, 0.0, unix_ns / 1e9),
            cause.remedy if cause is not None else "a smaller batch, activation checkpointing, or autocast",
            evidence, missing,
        )  # fmt: skip
    if leak is not None:
        host = leak.code == HOST_LEAK.code
        newest = rank.steps[-1].step if rank.steps else None
        what, named = grows(leak, newest), _named(who, leak)
        return Answer("leak", what, named, None if host else when, leak.remedy, evidence, _so_far(leak, newest))
    if ahead is not None:
        state: State = "leak" if forecast is not None and forecast.growth == KEPT else "will-not-fit"
        return Answer(state, ahead.title, who, when, ahead.remedy, evidence, ahead.bytes_per_step or 0)
    near = next((each for each in found if each.code == NEAR_CAPACITY.code), None)
    if near is not None or (forecast is not None and forecast.verdict == wire.TIGHT):
        do = near.remedy if near is not None else "lower the peak before a larger batch comes"
        what = _headroom(forecast, "little is left on the device")
        return _beside(Answer("tight", what, who, when, do, evidence), [each for each in found if each is not near])
    if forecast is None or forecast.verdict is None:
        why = (
            "the free memory of the device is not known"
            if forecast is not None
            else "the next iteration is not known yet"
        )
        return _beside(Answer("unknown", why, who, evidence=evidence), found)
    return _beside(Answer("ok", _headroom(forecast, ""), who, when, "", evidence), found)


def _beside(said: Answer, found: Sequence[Finding]) -> Answer:
    """Adds the most important finding, which does not decide the state: who, and what to do about it."""
    if not found:
        return said
    first = found[0]
    size = f" {units.size(first.bytes)}" if first.bytes else ""
    about = f"`{first.holder}`{size}" if first.holder else first.title.partition("; ")[0]
    who = said.who or Who()
    return msgspec.structs.replace(
        said,
        what=f"{said.what}. {first.code}: {about}",
        who=_named(who, first) if who.file is None else who,
        do=said.do or first.remedy,
        bytes=max(1, first.bytes or 0) if said.state == "ok" else said.bytes,
    )


def _leak(found: Sequence[Finding]) -> Finding | None:
    """The growth to report: the device before the host, with a holder before without, the fastest first."""
    growing = [each for each in found if each.code in GROWING]
    return min(
        growing,
        key=lambda each: (each.code == HOST_LEAK.code, each.holder is None, -(each.bytes_per_step or 0)),
        default=None,
    )


def _so_far(leak: Finding, newest: int | None) -> int:
    """Bytes by which it has grown until the newest step; what a census counted is older."""
    counted = leak.bytes or 0
    if newest is None or leak.step is None or not leak.bytes_per_step:
        return counted
    return max(counted, leak.bytes_per_step * (newest - leak.step + 1))


def grows(leak: Finding, newest: int | None = None) -> str:
    """ "`cache[*]` in main() grows by 4.00 MiB a step, 1.20 GiB so far"."""
    what = f"`{leak.holder}`" if leak.holder else "the host's memory" if leak.code == HOST_LEAK.code else "allocated"
    pace = f" grows by {units.size(leak.bytes_per_step)} a step" if leak.bytes_per_step else " grows"
    so_far = _so_far(leak, newest)
    return f"{what}{pace}{f', {units.size(so_far)} so far' if so_far else ''}"


def _named(who: Who, leak: Finding) -> Who:
    """Adds the variable that holds the leak: "cache[*] in main()", "train.py:31"."""
    by = leak.by
    named = Who(who.rank, who.pid, by.name if by else None, by.function if by else None)
    return _at(named, leak.where, leak.source_line)


def _at(who: Who, where: str | None, source_line: str | None) -> Who:
    file, _, line = (where or "").rpartition(":")
    if not line.isdigit():
        return who
    return msgspec.structs.replace(who, file=file, line=int(line), source_line=source_line)


def _is_now(rank: RankFrame, said: wire.Outlook) -> bool:
    return not rank.steps or said.step > rank.steps[-1].step


def _tightest(devices: Sequence[DeviceReport]) -> DeviceReport | None:
    """The device with the worst verdict; among equals the one with the least headroom."""
    words = (wire.OOM_AHEAD, wire.TIGHT, None, wire.FITS)

    def weight(device: DeviceReport) -> tuple[int, float]:
        forecast = device.forecast
        if forecast is None:
            return words.index(None), float("inf")
        return words.index(forecast.verdict), float("inf") if forecast.headroom is None else forecast.headroom

    return min(devices, key=weight, default=None)


def _too_large(said: wire.Outlook | None, forecast: Forecast | None) -> tuple[str, int]:
    which = "the next iteration" if said is None else f"step {units.count(said.step)}"
    needs = said or forecast
    if needs is None:
        return f"{which} will not fit", 0
    missing = -(needs.headroom or 0)
    more = f", {units.size(missing)} more than available" if missing > 0 else ""
    return f"{which} needs {units.size(needs.next_peak)} in {needs.phase}{more}", max(0, missing)


def _headroom(forecast: Forecast | None, otherwise: str) -> str:
    if forecast is None or forecast.headroom is None:
        return otherwise
    needs = f"the next iteration needs {units.size(forecast.next_peak)} in {forecast.phase}"
    bound = "at most " if forecast.headroom_at_most else ""
    return f"{needs}, {bound}{units.size(max(0, forecast.headroom))} is left"


def _full(forecast: Forecast | None, steps_per_s: float | None, unix_ns: int) -> When | None:
    if forecast is None or forecast.steps_to_oom is None:
        return None
    seconds = forecast.steps_to_oom / steps_per_s if steps_per_s else None
    return When(
        forecast.steps_to_oom,
        None if seconds is None else round(seconds, 3),
        None if seconds is None else round(unix_ns / 1e9 + seconds, 3),
    )


# ----------------------------------------------------------------------------------------------- from other verdicts


def of_oom(report: OomReport, who: Who | None = None, unix: float | None = None) -> Answer:
    """For an out-of-memory: watched, from a report on disk, or from a pasted message."""
    who = who or Who()
    return Answer(
        "out-of-memory",
        report.sentence.rstrip("."),
        who if who.file is not None or who.variable is not None else _at(who, report.where, report.code),
        When(0, None, unix),
        report.remedies[0].text if report.remedies else "",
        report.reasons,
    )


def of_outcome(outcome: Outcome) -> Answer:
    """For a dry run."""
    space = outcome.tightest
    device = "the device" if space is None else f"{space.name} ({units.size(space.capacity)})"
    evidence = _evidence(outcome.findings)
    leak = _leak(outcome.findings)
    failed = next((each for each in outcome.failed if not each.survived), None)
    if failed is not None:
        who = Who(failed.rank)
        if failed.explained is None:
            return Answer("out-of-memory", f"it does not fit {device}", who, evidence=evidence)
        named = leak if failed.explained.verdict == "leak" else None
        found = of_oom(failed.explained, _named(who, named) if named is not None else who)
        return msgspec.structs.replace(found, what=f"it does not fit {device}; {found.what}")
    if outcome.fits is None:
        return Answer("unknown", outcome.unknown, evidence=evidence)
    if outcome.fits:
        left = "" if space is None else f", {units.size(space.margin)} left at the highest moment"
        return Answer("ok", f"it fits {device}{left}", evidence=evidence)
    grown = f"{grows(leak)}: " if leak is not None else ""
    return Answer(
        "leak",
        f"{grown}it will not fit {device}",
        _named(Who(), leak) if leak is not None else None,
        None if outcome.grows_out is None else When(outcome.grows_out),
        leak.remedy if leak is not None else "find what is kept from step to step",
        evidence,
    )


def of_estimate(done: EstimateReport) -> Answer:
    """For an estimate. Without a device it is unknown whether it fits."""
    if done.device is None or done.limits is None:
        return Answer("unknown", f"it needs {units.size(done.needed)}", do="give --device to see whether it fits")
    left = done.device.total - done.needed
    what = f"it needs {units.size(done.needed)} of {done.device.name} ({units.size(done.device.total)})"
    if done.limits.fits:
        return Answer("ok", f"{what}, {units.size(left)} is left")
    helps = next((each.title for each in done.remedies if each.fits), "a smaller model, or more devices")
    more = f", {units.size(-left)} more than available" if left < 0 else ""
    return Answer("will-not-fit", f"{what}{more}", do=helps)


# --------------------------------------------------------------------------------------------------------------- text

_WORDS: dict[State, str] = {
    "out-of-memory": "OUT OF MEMORY",
    "ended": "ENDED",
    "will-not-fit": "WILL NOT FIT",
    "leak": "LEAK",
    "tight": "TIGHT",
    "unknown": "UNKNOWN",
    "ok": "OK",
}


class Parts(NamedTuple):
    """An answer's words, for outputs that place them themselves."""

    head: str
    """the state in capitals, and the rank: "LEAK · rank 3" """
    text: str
    """what, where and until when"""
    do: str


def parts(said: Answer) -> Parts:
    who, when = said.who, said.when
    head = _WORDS[said.state]
    if who is not None and who.rank is not None:
        head += f" · rank {who.rank}"
    text = said.what
    if who is not None and who.file is not None and f"{who.file}:{who.line}" not in said.what:
        text += f" ({who.file}:{who.line})"
    if said.state in ("leak", "tight", "ok") and when is not None and when.steps is not None:
        at = "" if when.unix is None else f", {clock(when)}"
        text += f"; full in {units.about(when.steps)}{at}"
    elif said.state in ("ended", "unknown") and when is not None and when.unix is not None:
        moment = time.strftime("%H:%M:%S", time.localtime(when.unix))
        text += f", at {moment}" if said.state == "ended" else f"; its last message came at {moment}"
    return Parts(head, text, said.do)


def line(said: Answer) -> str:
    """One line: state, rank, what, when, and what to do.

    "LEAK · rank 3: `cache[*]` in main() grows by 4.00 MiB a step, 1.20 GiB so far (train.py:31); full in 97 steps, at
    02:41. To do: bound `cache` …"
    """
    head, text, do = parts(said)
    text += "" if text.endswith(".") else "."
    return f"{head}: {text} To do: {do}." if do else f"{head}: {text}"


def clock(when: When) -> str:
    """ "at 02:41"; with the date if it is more than 20 hours away."""
    near = (when.seconds or 0.0) < 72_000
    return time.strftime("at %H:%M" if near else "at %b %d %H:%M", time.localtime(when.unix))
