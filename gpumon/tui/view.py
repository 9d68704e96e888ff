"""What the screens draw: one frozen View per tick, and small derivations that several widgets share."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gpumon.analysis import ledger
from gpumon.analysis.answer import NOBODY, Answer
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.units import duration
from gpumon.session.frame import Frame, RankFrame
from gpumon.tui.position import Position
from gpumon_agent import wire

WHOLE_RUN = 1 << 62
SPANS = (20, 50, 100, 200, 500, 1000, 2000, WHOLE_RUN)
"""Steps in the timeline."""

DEFAULT_SPAN = WHOLE_RUN

WHOLE_FROM = 0.35
"""From this share of use on, plot and bar reach up to the capacity; below, they scale to what is used."""

MANY = 16
"""More ranks than this are analysed in turn, and have no heat strips below their table."""


class Said(msgspec.Struct, frozen=True):
    """A message of the viewer itself: connected, lost, reconnected."""

    unix_ns: int
    text: str


class View(msgspec.Struct, frozen=True):
    """The shown rank and device at one moment, plus the whole frame."""

    frame: Frame
    reports: tuple[RankReport, ...] = ()
    rank: RankFrame | None = None
    report: RankReport | None = None
    device: DeviceReport | None = None
    span: int = DEFAULT_SPAN
    paused: bool = False
    said: tuple[Said, ...] = ()
    answer: Answer = NOBODY
    """The state of the whole job."""
    cannot_ask: str | None = None
    """Why the shown rank's agent takes no requests; None: it does."""
    position: Position | None = None
    """Of a replay, or of the past step of a live run that is shown."""
    now: View | None = None
    """The newest state, while a past step of a live run is shown: of that step is only what this holds beside it."""

    @property
    def index(self) -> int | None:
        """torch's index of the shown device."""
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
    answered: Answer = NOBODY,
    cannot_ask: str | None = None,
) -> View:
    """The view of the rank with this `source` (the first if it is gone) and of `device`."""
    by_source = {report.source: report for report in reports}
    rank = next((r for r in frame.ranks if r.source == source), frame.ranks[0] if frame.ranks else None)
    report = by_source.get(rank.source) if rank else None
    devices = report.devices if report else ()
    shown = next((d for d in devices if d.device == device), devices[0] if devices else None)
    if cannot_ask is None and rank is not None and rank.status == "ended":
        cannot_ask = "the process has ended"
    return View(frame, tuple(reports), rank, report, shown, span, paused, said, answered, cannot_ask)


WITHOUT_PEAK = {
    "cpu": "the allocator does not count on the CPU; start with --track-cpu",
    "mps": "PyTorch counts no peaks on Apple's GPUs",
}
"""By `wire.Device.kind`: why there is none, and what to do."""


def device_of(view: View) -> wire.Device | None:
    """The shown device as torch describes it."""
    return None if view.rank is None or view.index is None else ledger.device_of(view.rank, view.index)


def uncounted(view: View) -> str:
    """Why the shown device has no peaks, and what to do; "" if it has them or no step has closed."""
    device, rank = view.device, view.rank
    if device is None or device.peak is not None or rank is None or not rank.steps:
        return ""
    described = device_of(view)
    return WITHOUT_PEAK.get(described.kind if described is not None else "", "PyTorch counts no peaks on this device")


def reading_of(view: View) -> wire.DeviceReading | None:
    """The driver's reading of the shown device, matched by UUID."""
    device = device_of(view)
    return ledger.reading_of(view.rank.host if view.rank else None, device.uuid if device else None)


def device_name(device: wire.Device | None) -> str:
    """As cuda:0 or cpu."""
    return "device" if device is None else device.label


def newest_step(rank: RankFrame) -> int | None:
    """The current step, as far as received, or the past one that is shown."""
    if rank.open_step is not None:
        return rank.open_step.step
    if rank.steps:
        return rank.steps[-1].step
    return rank.heartbeat.step if rank.heartbeat else None


def newest_read(rank: RankFrame, device: int) -> int:
    """Negative index of the newest step whose figures were read; the agent may skip steps to keep its time budget."""
    for back in range(1, len(rank.steps) + 1):
        here = rank.steps[-back].on(device)
        if here and all(p.allocated is not None for p in here):
            return -back
    return -1


def age(seconds: float) -> str:
    """Whole seconds, so that the text does not flicker."""
    return f"{int(seconds)} s" if seconds < 60 else duration(float(int(seconds)))
