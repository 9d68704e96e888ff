"""What a series of steps says of the next one: its level, its trend upwards, its share that follows the batch."""

from __future__ import annotations

from collections.abc import Sequence

from gpumon.analysis.robust import Line, Trend, median, no_trend, resistant_line, steady_rate, theil_sen, thinned

TREND_Z = 5.0  # Kendall's S, in standard deviations: a trend below this is none
TREND_BYTES_PER_STEP = 256.0
SAME_RATE_STEPS = 8
SAME_RATE_TOLERANCE = 0.05


def upwards(steps: Sequence[int], values: Sequence[int]) -> Trend | None:
    """The trend, if it is one: significant, or the very same rate in each of the newest steps."""
    if values.count(values[0]) == len(values):
        return None
    newest = values[-SAME_RATE_STEPS:]
    same = len(newest) == SAME_RATE_STEPS and steady_rate(newest, tolerance=SAME_RATE_TOLERANCE)
    if not same and no_trend(thinned(values), TREND_Z):
        return None
    trend = theil_sen([(float(step), float(value)) for step, value in zip(steps, values, strict=True)])
    if trend is None or trend.slope < TREND_BYTES_PER_STEP:
        return None
    return trend if same or trend.z >= TREND_Z else None


def level(values: Sequence[float]) -> float:
    """The newest value where the last three agree, else the median; of two that differ the higher."""
    count = len(values)
    if count <= 2:
        return max(values)
    newest = values[-1]
    if newest == values[-2] == values[-3]:
        return newest
    ordered, half = sorted(values), count // 2
    return ordered[half] if count % 2 else (ordered[half - 1] + ordered[half]) / 2


def over_batch(points: Sequence[tuple[float, float]]) -> Line:
    """A phase's excess over the multiple of the usual batch: through the origin where all batches were alike."""
    if points.count(points[0]) == len(points):
        return Line(0.0, float(points[0][1]))
    line = resistant_line(points)
    usual = median([size for size, _ in points])
    if line is not None and line.slope > 0 and line.intercept >= 0:
        return Line(line.intercept, line.slope * usual)
    return Line(0.0, median([excess for _, excess in points]))
