"""A dry run's verdict as text, one statement a line, the answer first."""

from __future__ import annotations

import textwrap

from gpumon.analysis.answer import line, of_outcome
from gpumon.analysis.dryrun_result import Failed, HighestPeak, Outcome, Space
from gpumon.analysis.types import DRIVER, Breakdown
from gpumon.analysis.units import count, size

WIDTH = 100
LABEL = 12
REMEDIES = 3
SMALL = 1000
"""Lines below 1/1000 of the peak are left out."""

NOT_ALIVE = ("allocated", "reserved", "total", "slack", *DRIVER)


def lines(outcome: Outcome, checked: str, not_modelled: str) -> list[str]:
    """Lines of up to `WIDTH` cells."""
    stated = [("answer", line(of_outcome(outcome))), ("ended", _ended(outcome))]
    failed = next((each for each in outcome.failed if not each.survived), None)
    if failed is not None:
        stated.append(("failed", _failure(failed)))
        if failed.explained is not None:
            stated += [("to do", remedy.text) for remedy in failed.explained.remedies[:REMEDIES]]
    peak = outcome.peak
    if peak is not None:
        stated.append(("peak", _where(peak)))
        if peak.lines is not None:
            stated.append(("alive", _alive(peak, peak.lines)))
    several = len(outcome.devices) > 1
    stated += [(f"device {at}" if several else "margin", _margin(device)) for at, device in enumerate(outcome.devices)]
    stated += [("finding", f"{finding.title} ({finding.code})") for finding in outcome.findings]
    stated += [("checked", checked), ("not modelled", not_modelled)]
    return ["", *(row for label, text in stated for row in _wrapped(label, text))]


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=label.ljust(LABEL) + "  ", subsequent_indent=" " * (LABEL + 2),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _ended(outcome: Outcome) -> str:
    steps = f"{count(outcome.steps)} step{'' if outcome.steps == 1 else 's'}"
    if outcome.ended == "finished":
        return f"by itself, after {steps}"
    if outcome.ended == "steps":
        return f"by gpumon, after {steps} (--steps)"
    if outcome.ended == "left":
        return f"by gpumon, because you quit; the verdict covers {steps}"
    code = outcome.exit_code or 0
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    if outcome.fits is False:
        return f"{how}, after {steps}"
    said = f": {textwrap.shorten(outcome.error, 2 * WIDTH, placeholder=' …')}" if outcome.error else ""
    return f"{how}, its own, after {steps}{said}"


def _failure(failed: Failed) -> str:
    oom = failed.oom
    who = f"rank {failed.rank}, " if failed.rank is not None else ""
    inside = f", in {oom.module}" if oom.module else ""
    where = f", at {failed.explained.where}" if failed.explained is not None and failed.explained.where else ""
    text = f"{who}step {oom.step}, {oom.phase}{inside}{where}: {size(oom.requested)} requested"
    if oom.allocated is not None and oom.reserved is not None:
        text += f" with {size(oom.allocated)} allocated, {size(oom.reserved)} reserved"
    return text + (f" and {size(oom.free)} free on the device" if oom.free is not None else "")


def _where(peak: HighestPeak) -> str:
    who = f"rank {peak.rank}, " if peak.rank is not None else ""
    inside = f", in {peak.module}" if peak.module else ""
    reserved = f", {size(peak.reserved)} reserved" if peak.reserved is not None else ""
    return f"{size(peak.allocated)} allocated{reserved}: {who}step {peak.step}, {peak.phase}{inside}"


def _alive(peak: HighestPeak, alive: Breakdown) -> str:
    named = ", ".join(
        f"{name.replace('_', ' ')} {size(value)}"
        for name, value in alive.known()
        if name not in NOT_ALIVE and value * SMALL >= peak.allocated
    )
    when = f"{peak.lines_phase}'s end" if peak.lines_of == "end" else str(peak.lines_of)
    return f"{named} (step {peak.lines_step}, {when})"


def _margin(device: Space) -> str:
    if not device.used:
        return f"{device.name}: not used"
    return (
        f"{size(device.margin)} left of {size(device.capacity)} at the highest moment: "
        f"{size(device.reserved)} reserved, {size(device.context)} context"
    )
