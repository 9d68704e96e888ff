"""Random leaks on docs/forecast-accuracy.md: what was said of their end, beside what anybody could have said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean, stdev

from forecasting.backtest import Backtest
from forecasting.bound import chances, told, within
from forecasting.runs import NOISY, leaks_since

from gpumon.analysis.robust import median


@dataclass
class _Device:
    """All runs on one device."""

    title: str
    rows: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    said: list[list[float]] = field(default_factory=list)  # errors, run by run
    held: list[bool] = field(default_factory=list)
    best: list[float] = field(default_factory=list)


def random_leaks(every: Sequence[tuple[str, str, Backtest]]) -> Iterator[str]:
    """`every`: name, kind and score."""
    if not any(kind == "leak again" for _, kind, _ in every):
        return
    yield """## Random leaks

Those of above whose amounts are random, each four times more with other batches and amounts, and once on a device of
8 GiB. When a random leak ends cannot be known better than its amounts are random: amounts that differ by c times their
mean (one standard deviation), seen in n steps, tell how long the next k steps last to within c · √(1/n + 1/k), one
standard deviation, whoever reckons. With c = ⅔ and half of a hundred steps run that is 13 %, and nobody can expect to
be within 10 % more often than 55 times of 100; with half of two thousand run it is 3 %, and nearly everybody is. The
interval that is said beside the steps to OOM is as wide as that.
"""
    devices = [_device(every, "1 GiB", long=False), _device(every, "8 GiB", long=True)]
    yield "| device | ended at step | said: within 10 % | in the median of | best possible | 95 % interval held |"
    yield "|---|---|---|---|---|---|"
    for of in devices:
        steps = list(chain.from_iterable(of.said))
        near = sum(median(errors) <= 0.1 for errors in of.said if errors)
        yield (
            f"| {of.title} | {min(of.ends):,} to {max(of.ends):,} | {percent(within(steps))} of {len(steps):,} steps | "
            f"{near} of {len(of.said)} runs | {percent(fmean(of.best))} | {percent(fmean(of.held))} |"
        )
    yield """
Counted from a quarter of the way on, with ten steps or more left. *Best possible* is computed, step by step
(benchmarks/forecasting/bound.py): the chance to be within 10 % of somebody who takes the mean of the amounts seen and
knows all but what nobody has, the amounts to come and, on 1 GiB, at which of the heights that the same job's five runs
ended at this one will. As a trial of that, *told where* is what somebody would have said who knew to the byte what will
stand as an allocation fails, and since when the script leaks.

| run | ended at step | said, off and within 10 % | interval held | told where | best possible |
|---|---|---|---|---|---|"""
    for of in devices:
        yield from of.rows
    yield ""


def _device(every: Sequence[tuple[str, str, Backtest]], title: str, *, long: bool) -> _Device:
    of = _Device(title)
    for name in NOISY:
        since = leaks_since(name)
        runs = [
            (called, score)
            for called, kind, score in every
            if called.startswith(name) and (kind == "long leak") == long and score.ended
        ]
        heights = [score.standing[-1][1] for _, score in runs]
        apart = stdev(heights) if len(heights) > 1 else 0.0
        for called, score in runs:
            errors, held, best = score.steps_to_oom_errors(), score.steps_to_oom_held(), chances(score, since, apart)
            of.ends.append(score.oom_step or 0)
            of.said.append(errors)
            of.held += held
            of.best += best
            of.rows.append(
                f"| {called} | {score.oom_step:,} | {_off(errors)} | {fmean(held or [0]):.0%} | "
                f"{_off(told(score, since))} | {fmean(best or [0]):.0%} |"
            )
    return of


def _off(errors: Sequence[float]) -> str:
    return f"{percent(median(errors))}, {within(errors):.0%}" if errors else "–"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"
