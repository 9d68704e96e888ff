"""What the screens draw from: one frozen View a tick, and the small derivations that several widgets share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpumon.analysis import ledger
from gpumon.analysis.job import died_unix_ns, ending, job
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.units import duration
from gpumon.session.frame import Frame, RankFrame
from gpumon_agent import wire

SPANS = (20, 50, 100, 200, 500, 1000, 2000)
"""How many steps the timeline can show."""

DEFAULT_SPAN = 200

MANY = 16
"""Ranks, beyond which they share the screen in a grid, and are looked at in turn."""

LOOK_BACK = 256
"""Steps in which one with figures is looked for."""


@dataclass(frozen=True, slots=True)
class Said:
    """Something the viewer itself has to say: attached, gone, picked up again."""

    unix_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class View:
    """One moment of the shown rank and device, beside the whole frame."""

    frame: Frame
    reports: tuple[RankReport, ...] = ()
    rank: RankFrame | None = None
    report: RankReport | None = None
    device: DeviceReport | None = None
    span: int = DEFAULT_SPAN
    paused: bool = False
    said: tuple[Said, ...] = ()
    cannot_ask: str | None = None
    """Why nothing can be asked of the shown rank's agent; None: it can."""

    @property
    def index(self) -> int | None:
        """torch's ordinal of the shown device."""
        if self.device is not None:
            return self.device.device
        if self.rank is not None and self.rank.hello.devices:
            return self.rank.hello.devices[0].index
        return None


def choose(
    frame: Frame,
    reports: Sequence[RankReport],
    source: str | None,
    device: int | None,
    *,
    span: int = DEFAULT_SPAN,
    paused: bool = False,
    said: tuple[Said, ...] = (),
    cannot_ask: str | None = None,
) -> View:
    """The view of the rank whose source is `source` (the first one if it is gone) and of its `device`."""
    by_source = {report.source: report for report in reports}
    rank = next((r for r in frame.ranks if r.source == source), frame.ranks[0] if frame.ranks else None)
    report = by_source.get(rank.source) if rank else None
    devices = report.devices if report else ()
    shown = next((d for d in devices if d.device == device), devices[0] if devices else None)
    if cannot_ask is None and rank is not None and rank.status == "ended":
        cannot_ask = "the process has ended"
    return View(frame, tuple(reports), rank, report, shown, span, paused, said, cannot_ask)


def device_of(view: View) -> wire.Device | None:
    """The shown device as torch describes it."""
    return None if view.rank is None or view.index is None else ledger.device_of(view.rank, view.index)


def reading_of(view: View) -> wire.DeviceReading | None:
    """The shown device as its driver describes it, matched by UUID."""
    device = device_of(view)
    return ledger.reading_of(view.rank.host if view.rank else None, device.uuid if device else None)


def device_name(device: wire.Device | None) -> str:
    """cuda:0; the CPU has no ordinal."""
    if device is None:
        return "device"
    return device.kind if device.kind == "cpu" else f"{device.kind}:{device.index}"


def newest_step(rank: RankFrame) -> int | None:
    """The step training stands in, as far as it was heard."""
    if rank.open_step is not None:
        return rank.open_step.step
    if rank.steps:
        return rank.steps[-1].step
    return rank.heartbeat.step if rank.heartbeat else None


def newest_read(rank: RankFrame, device: int) -> int:
    """Index from the end of the newest step whose figures were read: the agent, to keep its budget, may skip some."""
    for back in range(1, min(len(rank.steps), LOOK_BACK) + 1):
        here = rank.steps[-back].on(device)
        if here and all(p.allocated is not None for p in here):
            return -back
    return -1


def first_death(frame: Frame) -> tuple[str | None, str | None]:
    """Which rank died first (its source), and when and of what as a sentence: the others of a job follow it."""
    source = job(frame).first_to_die
    rank = next((rank for rank in frame.ranks if rank.source == source), None)
    if rank is None or rank.goodbye is None:
        return None, None
    at = died_unix_ns(rank)
    when = "" if at is None else f", {time.strftime('%H:%M:%S', time.localtime(at / 1e9))}"
    return source, f"{rank.label} died first{when}: {ending(rank, detail=rank.goodbye.reason != 'lost')}"


def age(seconds: float) -> str:
    """Whole seconds, so that a figure which ages does not flicker."""
    return f"{int(seconds)} s" if seconds < 60 else duration(float(int(seconds)))
