"""Pure functions from a frame to what gpumon states about it."""

from gpumon.analysis.lines import DeviceReport, Estimate, Finding, Forecast, Lines, Peak, RankReport
from gpumon.analysis.report import Reporter, report

__all__ = [
    "DeviceReport",
    "Estimate",
    "Finding",
    "Forecast",
    "Lines",
    "Peak",
    "RankReport",
    "Reporter",
    "report",
]
