"""A report's estimate, made when somebody asks for it: a report is made at every step, and seldom looked at.

Cost. Kept: what it is made from. Asked for: gpumon.analysis.estimate.closed_form, each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumon.analysis.estimate import closed_form
from gpumon.analysis.estimate.closed_form import Owned
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.lines import Estimate, Lines

if TYPE_CHECKING:
    from gpumon.analysis.learnt import Device


@dataclass(frozen=True, slots=True)
class Estimating:
    """What an estimate is made from, once somebody asks for it."""

    owners: Owned
    first: tuple[StepPeaks, ...] | None
    input_bytes: int | None
    lines: Lines | None

    def __call__(self) -> Estimate:
        owners = closed_form.calibrated(self.owners, self.lines)
        shown = closed_form.learn(self.first, owners, self.input_bytes) if self.first is not None else None
        return closed_form.estimate(owners, shown, self.lines)


def estimating(owners: Owned | None, learnt: Device | None, lines: Lines | None) -> Estimating | None:
    if owners is None:
        return None
    size = learnt.newest.input_bytes if learnt is not None and learnt.newest is not None else None
    return Estimating(owners, tuple(learnt.first) if learnt is not None else None, size, lines)
