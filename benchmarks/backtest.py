"""Scores the forecasts of a recorded run against naive ones: `python benchmarks/backtest.py FILE…`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpumon.cli.printing import say

if TYPE_CHECKING:
    from forecasting.backtest import Backtest


@click.command("backtest")
@click.argument("files", nargs=-1, required=True, metavar="FILE…", type=click.Path(path_type=Path))
def command(files: Sequence[Path]) -> None:
    """Play FILE, made by `gpumon record`, and score each forecast by the step that then came.

    \b
    outlook   said as a batch entered forward, its shapes known
    next      said after the step before, its batch not known
    naive     the last peak; the largest so far; a line through the device's total, alarm at 1 MB/s

    Errors are shares of the peak that was; "held" is how often the 95 % interval did.
    """
    from forecasting.backtest import backtest

    from gpumon import link

    for file in files:
        try:
            found = backtest(link.replay(file))
        except link.LinkError as error:
            raise click.ClickException(str(error)) from error
        if not found:
            raise click.ClickException(f"{file}: no step in it can be scored (its phases have no peaks)")
        for each in found:
            say("\n".join(lines(file, each)))


def lines(file: Path, score: Backtest) -> list[str]:
    who = f"rank {score.rank}, " if score.rank is not None else ""
    kind = "shapes that vary" if score.varying else "same shapes"
    out = [f"{file.name}: {who}device {score.device}, {score.steps:,} steps, {kind}, {score.changes} new regimes"]
    out.append(f"  {'':<16}{'median error':>14}{'95th':>10}{'held':>10}{'steps':>9}")
    rows = [("outlook", score.outlook), ("next", score.next), *score.naive.items()]
    out += [
        f"  {name:<16}{_share(each.median):>14}{_share(each.ninety_fifth):>10}{_share(each.coverage):>10}"
        f"{len(each.errors):>9,}"
        for name, each in rows
    ]
    for oom in score.ended:
        said = (
            "the outlook did not say so" if oom.by_shape is None else f"the outlook {oom.by_shape / 1e6:.1f} ms before"
        )
        found = "no finding" if oom.steps_ahead is None else f"the finding {oom.steps_ahead:,} steps before"
        room = "" if oom.told_room else " (what the process can have was not known)"
        out.append(f"  out of memory in step {oom.step:,}, {oom.phase}: {said}, {found}{room}")
    error = score.steps_to_oom_error()
    if error is not None:
        out.append(
            f"  steps to OOM: {_share(error)} off in the median, once a quarter of the way was run; the interval held "
            f"{_share(score.steps_to_oom_coverage())} of the time"
        )
    out.append(
        f"  false warnings in {score.clean_steps:,} steps: {score.false_outlooks} outlooks, "
        f"{score.false_findings} findings; "
        f"a line through the device's total: {score.slope_alarms} alarms in {score.slope_readings} readings"
    )
    return out


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


if __name__ == "__main__":
    command()
