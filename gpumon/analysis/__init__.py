"""Pure functions from a frame to what gpumon states about it."""

from gpumon.analysis.lines import Estimate, Finding, Forecast, Lines, Peak
from gpumon.analysis.report import Reporter, report
from gpumon.analysis.reports import DeviceReport, RankReport

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
