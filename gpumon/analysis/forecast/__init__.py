"""The forecast of the next iteration's peak after each step, and the headroom above it."""

from __future__ import annotations

from gpumon.analysis.forecast.forecaster import Forecaster as Forecaster
from gpumon.analysis.forecast.headroom import Others as Others
from gpumon.analysis.forecast.headroom import Room as Room
