"""One word for a forecast: fits, tight, or oom-ahead."""

from __future__ import annotations

from typing import Literal

from gpumon.analysis.lines import Forecast

Verdict = Literal["fits", "tight", "oom-ahead"]

TIGHT_FRACTION = 0.05
"""Less of the device than this left above the forecast's upper end: tight."""

TIGHT_P_OOM = 0.01
OOM_LIKELY = 0.5
"""Probabilities that an allocation fails, from which on it is tight, and from which on it is ahead."""


def verdict(forecast: Forecast, capacity: int | None) -> Verdict | None:
    """Whether the next iteration fits; None where the device's total (`capacity`, bytes) is not known."""
    if forecast.headroom is None or capacity is None:
        return None
    if forecast.headroom < 0 or (forecast.p_oom or 0.0) >= OOM_LIKELY:
        return "oom-ahead"
    spare = forecast.headroom - (forecast.high - forecast.next_peak)
    return "tight" if spare < TIGHT_FRACTION * capacity or (forecast.p_oom or 0.0) > TIGHT_P_OOM else "fits"
