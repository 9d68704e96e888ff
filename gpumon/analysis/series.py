"""What a series of steps says of the next one: its level, its trend upwards, its share that follows the batch."""

from __future__ import annotations

from gpumon.analysis.robust import Line, Trend, median, resistant_line, steady_rate, theil_sen

TREND_Z = 5.0  # Kendall's S, in standard deviations: a trend below this is none
TREND_BYTES_PER_STEP = 256.0
SAME_RATE_STEPS = 8
SAME_RATE_TOLERANCE = 0.05


def upwards(points: list[tuple[float, float]]) -> Trend | None:
    """The trend, if it is one: significant, or the very same rate in each of the newest steps."""
    values = [y for _, y in points]
    if values.count(values[0]) == len(values):
        return None
    trend = theil_sen(points)
    if trend is None or trend.slope < TREND_BYTES_PER_STEP:
        return None
    newest = [y for _, y in points[-SAME_RATE_STEPS:]]
    same = len(newest) == SAME_RATE_STEPS and steady_rate(newest, tolerance=SAME_RATE_TOLERANCE)
    return trend if same or trend.z >= TREND_Z else None


def level(values: list[float]) -> float:
    """The newest value where the last three agree, else the median; of two that differ the higher."""
    if len(values) <= 2:
        return max(values)
    return values[-1] if values[-1] == values[-2] == values[-3] else median(values)


def over_batch(points: list[tuple[float, float]]) -> Line:
    """A phase's excess over the multiple of the usual batch: through the origin where all batches were alike."""
    if points.count(points[0]) == len(points):
        return Line(0.0, float(points[0][1]))
    line = resistant_line(points)
    usual = median([size for size, _ in points])
    if line is not None and line.slope > 0 and line.intercept >= 0:
        return Line(line.intercept, line.slope * usual)
    return Line(0.0, median([excess for _, excess in points]))
