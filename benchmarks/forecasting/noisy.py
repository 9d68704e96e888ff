"""Random leaks on docs/forecast-accuracy.md: what was said of their end, beside what anybody could have said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

from forecasting.bound import chances, told, within
from forecasting.runs import NOISY, leaks_since

from gpumon.analysis.backtest import Backtest
from gpumon.analysis.robust import median


def random_leaks(every: Sequence[tuple[str, str, Backtest]]) -> Iterator[str]:
    """`every`: name, kind and score."""
    if not any(kind == "leak again" for _, kind, _ in every):
        return
    yield """## Random leaks

Those of above whose amounts are random, each four times more with other batches and amounts, and once on a device of
8 GiB. Errors are of the steps to OOM once a quarter of the way is run, ten or more of them left: their median, and how
many are 10 % or less. *Told where* is what somebody would have said who knew since when the script leaks, takes the
mean amount since, and was told to the byte what will stand as an allocation fails (benchmarks/forecasting/bound.py):
what is off there is the randomness of the amounts seen and of those to come. *Told by the others*: those bytes are the
mean of the same job's other runs, as for somebody who saw it run out of memory four times before. *Held* is how often
the interval did that was said with it. *Best possible* is computed, not tried: the chance to be within 10 % of an
estimator that takes the mean of the amounts seen and lacks only what nobody has: the amounts to come, and which of the
ends that the job's five runs had (by their standard deviation) this one will have. So the 10 % cannot hold nineteen
times of twenty unless 1/n + 1/k ≤ (0.051 / c)², with n steps seen, k to come, and c the amounts' standard deviation by
their mean: where c is ½, some two hundred steps to each side.
"""
    for title, long in (("1 GiB", False), ("8 GiB", True)):
        names = ("said", "told where", "told by the others")[: 2 if long else 3]
        sums: list[list[list[float]]] = [[] for _ in names]
        best: dict[str, list[float]] = {}
        all_held: list[bool] = []
        heads = ["ended at step", "said", "held", *names[1:], *(() if long else ("best possible",))]
        yield f"| run, {title} | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}"
        for name in NOISY:
            since = leaks_since(name)
            runs = [
                (called, score)
                for called, kind, score in every
                if called.startswith(name) and (kind == "long leak") == long and score.ended
            ]
            ends = [score.standing[-1][1] for _, score in runs]
            apart = stdev(ends) if len(ends) > 1 else 0.0
            for which, (called, score) in enumerate(runs):
                others = ends[:which] + ends[which + 1 :]
                figures = [score.steps_to_oom_errors(), told(score, since)]
                if not long:
                    figures.append(told(score, since, sum(others) / len(others)) if others else [])
                for kept, errors in zip(sums, figures, strict=True):
                    kept.append(errors)
                held = score.steps_to_oom_held()
                all_held += held
                cells = [f"{score.oom_step:,}", _off(figures[0]), f"{sum(held) / max(1, len(held)):.0%}"]
                cells += map(_off, figures[1:])
                for law, chance in (
                    ("the mean amount and the end", chances(score, since, rate_known=True)),
                    ("the end", chances(score, since)),
                    ("the mean of the job's ends", chances(score, since, apart)),
                ):
                    best.setdefault(law, []).extend(chance)
                if not long:
                    cells.append(f"{fmean(chance):.0%}" if chance else "–")
                yield f"| {called} | {' | '.join(cells)} |"
        yield ""
        for name, runs_errors in zip(names, sums, strict=True):
            steps = [error for errors in runs_errors for error in errors]
            near = sum(median(errors) <= 0.1 for errors in runs_errors if errors)
            yield (
                f"- {title}, {name}: within 10 % at {percent(within(steps))} of {len(steps):,} steps, and in the "
                f"median of {near} of {len(runs_errors)} runs;"
            )
        yield f"- {title}: the 95 % interval held at {percent(sum(all_held) / max(1, len(all_held)))} of these steps;"
        for law, chances_ in best.items():
            if long and law.startswith("the mean of"):
                continue
            yield f"- {title}, best possible, told {law}: {percent(fmean(chances_))};"
        yield ""


def _off(errors: Sequence[float]) -> str:
    return f"{percent(median(errors))}, {within(errors):.0%}" if errors else "–"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"
