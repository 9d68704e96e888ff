"""Pure functions from a frame to what gpumon states about it."""

from gpumon.analysis.report import Reporter, report
from gpumon.analysis.reports import DeviceReport, RankReport
from gpumon.analysis.types import Breakdown, Estimate, Finding, Forecast, Peak

__all__ = [
    "Breakdown",
    "DeviceReport",
    "Estimate",
    "Finding",
    "Forecast",
    "Peak",
    "RankReport",
    "Reporter",
    "report",
]
