"""What the next iteration will need, and whether that fits: the forecast after each step, and what is left above it."""

from __future__ import annotations

from gpumon.analysis.forecast.forecaster import Forecaster as Forecaster
from gpumon.analysis.forecast.headroom import Others as Others
from gpumon.analysis.forecast.headroom import Room as Room
