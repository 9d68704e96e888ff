"""A report's ledger and estimate, computed on first use: a report is made every step and seldom read.

Cost. Until then, references to the inputs. On use, gpumon.analysis.ledger once, and
gpumon.analysis.estimate.closed_form each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from gpumon.analysis import ledger
from gpumon.analysis.estimate import closed_form
from gpumon.analysis.estimate.closed_form import Owned
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.types import Breakdown, Estimate, GrownByHolder
from gpumon_agent import wire

if TYPE_CHECKING:
    from gpumon.analysis.rank_state import DeviceState
    from gpumon.session.frame import RankFrame


class LazyLedger:
    """The ledger at the end of a step, computed on the first call."""

    __slots__ = ("_driver", "_end", "_held", "_lasting", "_made", "_owners", "_rank", "_step")

    def __init__(
        self,
        rank: RankFrame,
        step: int,
        end: wire.Phase,
        owners: wire.Ledger | None,
        lasting: wire.Ledger | None,
        driver: ledger.DriverLines | None,
        held: GrownByHolder | None,
    ) -> None:
        self._rank, self._step, self._end, self._owners = rank, step, end, owners
        self._lasting, self._driver, self._held = lasting, driver, held
        self._made: tuple[Breakdown | None] | None = None

    def __call__(self) -> Breakdown | None:
        if self._made is None:
            lines = ledger.lines(self._end, self._owners, self._lasting, self._driver)
            if lines is not None:
                held_by = self._owners.held_by if self._owners is not None else ()
                lines = ledger.with_held(lines, self._held, self._step, held_by)
            self._made = (lines,)
        return self._made[0]

    def age_s(self) -> float | None:
        """Age of the driver's figures in it, in seconds."""
        lines, driver = self(), self._driver
        if lines is None or lines.total is None or driver is None:
            return None
        return max(0.0, (self._rank.unix_ns(self._end.t_ns) - driver.unix_ns) / 1e9)


class LazyEstimate(msgspec.Struct, frozen=True):
    """The inputs of a closed-form estimate, which a call computes."""

    owners: Owned
    first: tuple[StepPeaks, ...] | None
    input_bytes: int | None
    make_ledger: Callable[[], Breakdown | None] | None

    def __call__(self) -> Estimate:
        lines = self.make_ledger() if self.make_ledger is not None else None
        owners = closed_form.calibrated(self.owners, lines)
        shown = closed_form.learn(self.first, owners, self.input_bytes) if self.first is not None else None
        return closed_form.estimate(owners, shown, lines)


def lazy_estimate(
    owners: Owned | None, state: DeviceState | None, make_ledger: LazyLedger | None
) -> LazyEstimate | None:
    if owners is None:
        return None
    size = state.newest.input_bytes if state is not None and state.newest is not None else None
    return LazyEstimate(owners, state.alike() if state is not None else None, size, make_ledger)
