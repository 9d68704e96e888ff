"""Everything `gpumon estimate` states about one workload: floor, phases, limits, remedies."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from gpumon.analysis.estimate import plan
from gpumon.analysis.estimate.plan import Expected, PlanChange, Subject, TargetDevice, Thumb
from gpumon.analysis.estimate.workload import Workload


class Limits(msgspec.Struct, frozen=True):
    """The largest that fits on a device."""

    fits: bool
    floor_fits: bool
    batch: int | None  # None: no forward is known, so the batch does not count
    sequence: int | None  # None: no tokens


class EstimateReport(msgspec.Struct, frozen=True):
    """`floor`: batch 1 and the shortest sequence. `context` is None without a device."""

    subject: Subject
    expected: Expected
    floor: Expected
    thumb: Thumb | None
    remedies: tuple[PlanChange, ...]
    device: TargetDevice | None
    limits: Limits | None

    @property
    def context(self) -> int:
        return self.device.context if self.device is not None else 0

    @property
    def needed(self) -> int:
        """Peak of reserved bytes, plus the context."""
        return self.expected.reserved + self.context


def make(subject: Subject, work: Workload, device: TargetDevice | None, *, brief: bool = False) -> EstimateReport:
    """`brief` omits limits and remedies."""
    expected = plan.expect(subject, work)
    least = replace(work, batch=1, accumulation=1, kv_cache=min(1, work.kv_cache))
    least = replace(least, sequence=1) if expected.played.has_tokens else least
    floor = plan.expect(subject, least)
    thumb = plan.rule_of_thumb(expected)
    limits = None
    if device is not None and not brief:
        limits = _limits(subject, work, device, least, expected)
    remedies = () if brief else tuple(plan.remedies(subject, expected, device))
    return EstimateReport(subject, expected, floor, thumb, remedies, device, limits)


def _limits(subject: Subject, work: Workload, device: TargetDevice, least: Workload, expected: Expected) -> Limits:
    if not plan.fits(subject, least, device):
        return Limits(fits=False, floor_fits=False, batch=0, sequence=0)
    has_tokens = expected.played.has_tokens and not work.kv_cache
    return Limits(
        fits=plan.fits(subject, work, device),
        floor_fits=True,
        batch=plan.largest_batch(subject, work, device) if expected.played.forward else None,
        sequence=plan.longest_sequence(subject, work, device) if has_tokens else None,
    )
