"""Predicts phases that do not follow the batch (optimizer, clipping, a user's own): constant, periodic, or neither.

Model. If the newest `ROUNDS` rounds were alike (alternating optimizers, an evaluation, a checkpoint every n steps), a
phase is predicted to have its value of one round before, or not to run. Else, if it ran in at least half of the recent
steps, the prediction is its newest value if that came twice in a row, else the most frequent one if it came `OFTEN`
times, else the median. Values are relative to the step's start, relative to the end of the step before, or absolute,
whichever is steadiest.
Cost. One pass over the newest `RECENT` values, over all of them if they differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

PERIOD = 64  # steps of the longest round recognized
ROUNDS = 2
LAGS = 4  # steps that may be closed but not learned when a batch comes
RECENT = 9
OFTEN = 3  # of them: a value seen so often is expected again
ABOVE_START, ABOVE_END, AS_HIGH = 1, 2, 3
STEADIER = 0.75
"""Another baseline than the step's start is used if it leaves less than this share of the spread: the end of the step
before (a start that includes the inputs varies with them), or none, where both vary with the batch. Without it outlooks
of heavy models are 0.1 to 0.3 % off instead of 0 (benchmarks/forecast.py)."""
_ALIKE = 0.001

Seen = tuple[int, int, int, int]
"""(step; bytes above its start; above the end of the step before; absolute)"""


def coming(seen: deque[Seen], steps: int, age: int, of: int) -> list[float | None]:
    """The value a phase is expected to have in the step after `steps`; None: not expected to run.

    One for each of the next `LAGS` steps if the phase or its values are periodic; else one for all.
    `age`: steps since the regime began. `of`: which value of `Seen`.
    """
    count = len(seen)
    newest, value = seen[-1][0], seen[-1][of]
    if count >= 2 and newest - seen[-2][0] > 1:
        gap = newest - seen[-2][0]
        if count >= 3 and seen[-2][0] - seen[-3][0] == gap:
            due = steps - newest < gap  # else it is overdue
            return [float(value) if due and not (now - newest) % gap else None for now in _coming(steps)]
    recent = [each[of] for each in list(seen)[-RECENT:] if each[0] > steps - RECENT]
    if 2 * len(recent) < min(age, RECENT) or not recent:
        return [None]
    if count >= 2 and _alike(value, seen[-2][of]):
        return [float(value)]
    if newest - seen[0][0] == count - 1:  # in every step: are its values periodic?
        values = [each[of] for each in seen]
        period = _period(values)
        if period is not None:
            return [float(values[(now - newest - 1) % period - period]) for now in _coming(steps)]
    most = max(recent, key=recent.count)  # allocations repeat to the byte
    return [float(most) if recent.count(most) >= OFTEN else _middle(recent)]


def steadiest(seen: deque[Seen]) -> int:
    """The baseline with the least spread: ABOVE_START unless another is clearly better."""
    recent = [seen[at] for at in range(-min(len(seen), RECENT), 0)]
    starts = [each[ABOVE_START] for each in recent]
    if starts.count(starts[0]) == len(starts) or len(starts) < RECENT // 2:
        return ABOVE_START
    found, least = ABOVE_START, _spread(starts)
    for of in (ABOVE_END, AS_HIGH):
        spread = _spread([each[of] for each in recent])
        if spread < STEADIER * least:
            found, least = of, spread
    return found


def _spread(values: list[int]) -> float:
    usual = _middle(values)
    return sum([abs(value - usual) for value in values])


def _middle(values: Sequence[float]) -> float:
    return float(sorted(values)[len(values) // 2])


def _coming(steps: int) -> range:
    return range(steps + 1, steps + 1 + LAGS)


def _period(values: list[int]) -> int | None:
    """The shortest round that the newest `ROUNDS` rounds repeat."""
    count = len(values)
    for period in range(1, count // ROUNDS + 1):
        if not _alike(values[-1], values[-1 - period]):
            continue
        if all(_alike(values[-i], values[-i - period]) for i in range(2, (ROUNDS - 1) * period + 1)):
            return period
    return None


def _alike(left: int, right: int) -> bool:
    return abs(left - right) <= _ALIKE * max(abs(left), 4096)
