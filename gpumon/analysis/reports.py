"""Reports on a device and on a rank: made by `report`, shown by every output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from gpumon.analysis.types import Breakdown, Estimate, Finding, Forecast, GrownByHolder, Growth, HighestStep, Peak, Read

if TYPE_CHECKING:  # the first screen needs neither
    from gpumon.analysis.changes import ChangeResult
    from gpumon.analysis.diagnosis.oom_report import OomReport
    from gpumon.session.frame import Frame


class DeviceReport(msgspec.Struct, frozen=True):
    """Everything gpumon states about one device of one rank.

    Costly parts are computed on access: most reports are never displayed.
    """

    device: int
    make_ledger: Breakdown | Callable[[], Breakdown | None] | None  # or a function that computes it
    make_ledger_age: Callable[[], float | None] | None
    peak: Peak | None  # of the newest closed step
    make_estimate: Estimate | Callable[[], Estimate | None] | None  # or a function that computes it
    forecast: Forecast | None
    capacity: int | None  # the device's total
    device_used: int | None  # the driver's figure now, all processes
    read: Read | None = None  # the newest ledger with owners
    composed: Peak | None = None  # the newest peak with a breakdown
    growth: tuple[Growth, ...] = ()  # of allocated, blocks, unexplained, slack: those that are known
    regimes: tuple[int, ...] = ()  # steps at which the regime of peaks changed, newest last
    make_whatif: Callable[[DeviceReport], tuple[ChangeResult, ...]] | None = None
    highest: HighestStep | None = None  # peak of allocated so far
    held: GrownByHolder | None = (
        None  # what grows, and its holders; included in `ledger`, `peak`, `read` and `composed`
    )

    @property
    def ledger(self) -> Breakdown | None:
        """At the end of the newest step's optimizer phase."""
        made = self.make_ledger
        return made if made is None or isinstance(made, Breakdown) else made()

    @property
    def ledger_age_s(self) -> float | None:
        """Age of the driver's figures in it, in seconds."""
        return self.make_ledger_age() if self.make_ledger_age is not None else None

    @property
    def estimate(self) -> Estimate | None:
        made = self.make_estimate
        return made if made is None or isinstance(made, Estimate) else made()

    @property
    def whatif(self) -> tuple[ChangeResult, ...]:
        """The peak with each of the usual changes, computed at most once per step."""
        return self.make_whatif(self) if self.make_whatif is not None else ()


class RankReport(msgspec.Struct, frozen=True):
    """Everything gpumon states about one rank. `devices` is empty until the first phase closed."""

    source: str
    devices: tuple[DeviceReport, ...]
    findings: tuple[Finding, ...]
    steps_per_s: float | None
    oom: OomReport | None = None  # the newest out-of-memory, explained
    host_growth: tuple[Growth, ...] = ()  # of rss, pinned memory, and each child process


ROOM_PATIENCE_S = 2.0
"""How long a one-shot output waits for headroom: a reading of the device is placed with the next phase."""


def room_known(frame: Frame, reports: Iterable[RankReport]) -> bool:
    """Whether the free bytes are known for every running rank, as far as it has forecasts."""
    going_on = {rank.source for rank in frame.ranks if rank.goodbye is None}
    devices = [device for report in reports if report.source in going_on for device in report.devices]
    forecasts = [device.forecast for device in devices if device.forecast is not None]
    return all(forecast.headroom is not None and not forecast.headroom_at_most for forecast in forecasts)
