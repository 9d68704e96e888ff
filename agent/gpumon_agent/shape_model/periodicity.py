"""Predicts phases that do not follow the batch (optimizer, clipping, a user's own): constant, periodic, or neither.

Model. If the newest two rounds were alike (alternating optimizers, an evaluation, a checkpoint every n steps), a
phase is predicted to have its value of one round before, or not to run. Else, if it ran in at least half of the recent
steps, the prediction is its newest value if that came twice in a row, else the median. Values are relative to the
step's start, relative to the end of the step before, or absolute, whichever is steadiest.
Cost. One pass over the newest `RECENT` values, over all of them if they differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

SEEN_MAX = 128  # steps: rounds of half as many are recognized, and phases that come at most so many steps apart
RECENT = 9
ABOVE_START, ABOVE_END, AS_HIGH = 1, 2, 3
"""Another baseline than the step's start is used if its values spread less: the end of the step before (a start that
includes the inputs varies with them), or none, where both vary with the batch. Without it outlooks of heavy models are
0.1 to 1 % off instead of 0 (benchmarks/forecast.py)."""

Seen = tuple[int, int, int, int]
"""(step; bytes above its start; above the end of the step before; absolute)"""


def coming(seen: deque[Seen], steps: int, age: int, of: int) -> float | None:
    """The value a phase is expected to have in the step after `steps`; None: not expected to run.

    `age`: steps since the regime began. `of`: which value of `Seen`.
    """
    count = len(seen)
    newest, value = seen[-1][0], seen[-1][of]
    if count >= 2 and newest - seen[-2][0] > 1:
        gap = newest - seen[-2][0]
        if count >= 3 and seen[-2][0] - seen[-3][0] == gap:
            return float(value) if steps + 1 - newest == gap else None
    recent = [each[of] for each in _newest(seen) if each[0] > steps - RECENT]
    if 2 * len(recent) < min(age, RECENT) or not recent:
        return None
    if count >= 2 and value == seen[-2][of]:
        return float(value)
    if newest - seen[0][0] == count - 1:  # in every step: are its values periodic?
        values = [each[of] for each in seen]
        period = _period(values)
        if period is not None:
            return float(values[(steps - newest) % period - period])
    return _middle(recent)


def steadiest(seen: deque[Seen]) -> int:
    """The baseline with the least spread."""
    _, starts, ends, absolute = zip(*_newest(seen), strict=True)
    if starts.count(starts[0]) == len(starts) or len(starts) < RECENT // 2:
        return ABOVE_START
    found, least = ABOVE_START, _spread(starts)
    for of, values in ((ABOVE_END, ends), (AS_HIGH, absolute)):
        spread = _spread(values)
        if spread < least:
            found, least = of, spread
    return found


def _newest(seen: deque[Seen]) -> list[Seen]:
    """At most `RECENT`, newest first."""
    return list(islice(reversed(seen), RECENT))


def _spread(values: Sequence[int]) -> int:
    """The sum of the distances from the median."""
    ordered = sorted(values)
    half, odd = divmod(len(ordered), 2)
    return sum(ordered[half:]) - sum(ordered[:half]) - odd * ordered[half]


def _middle(values: Sequence[float]) -> float:
    return float(sorted(values)[len(values) // 2])


def _period(values: list[int]) -> int | None:
    """The shortest round that came twice. Allocations repeat to the byte."""
    half = len(values) // 2
    if values[-1] in values[-1 - half : -1]:  # seldom, where values differ
        for period in range(1, half + 1):
            if values[-1] == values[-1 - period] and values[-period:] == values[-2 * period : -period]:
                return period
    return None
