"""`gpumon compare`: two runs side by side, the biggest difference first."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gpumon.cli import exits
from gpumon.cli.printing import say, say_json
from gpumon.cli.progress import working

if TYPE_CHECKING:
    from gpumon.analysis.compare import Difference, RankSummary, Run, RunComparison
    from gpumon_agent.endpoint import Descriptor

SHOWN = 12
NAME, FIGURE = 34, 12
TITLES = {"category": "By category", "phase": "Peak of each phase", "module": "By module"}


class PercentType(click.ParamType):  # type: ignore[type-arg]
    """ "5%" or "0.05"."""

    name = "PERCENT"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        text = str(value).strip()
        try:
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            share = -1.0
        if not 0 <= share < 1000:
            self.fail(f"{value!r} is not a share of a peak: write 5% or 0.05", param, ctx)
        return share


@click.command("compare")
@click.argument("before", metavar="A")
@click.argument("after", metavar="B")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.option(
    "--fail-above",
    type=PercentType(),
    metavar="PERCENT",
    help="Exit code 1 if B's peak is higher than A's by more, such as 5%.",
)
def command(before: str, after: str, as_json: bool, fail_above: float | None) -> None:
    """Compare the memory of two runs: A before, B after.

    \b
    gpumon compare monday.gpumon tuesday.gpumon
    gpumon compare --fail-above 5% main.jsonl branch.jsonl    # of gpumon dryrun --json
    gpumon compare monday.gpumon 12345                        # a running job

    Each is a file of `gpumon record`, a file with the output of `--json` (attach, replay or dryrun), or a running
    job (PID, name or endpoint). Of several ranks, the one with the highest peak is compared. Exit code 1: --fail-above.
    3: one of them has no step to compare.
    """
    from gpumon.analysis.compare import compare

    sides = []
    for each in (before, after):
        with working(f"reading {each}"):
            sides.append(_side(each))
    found = compare(*sides)
    if as_json:
        say_json(_stated(found))
    else:
        say("\n".join(_lines(found)))
    if fail_above is not None and found.growth > fail_above:
        from gpumon.analysis.units import percent

        say(f"gpumon: B's peak is {percent(found.growth)} higher than A's, above {percent(fail_above)}.", err=True)
        raise click.exceptions.Exit(exits.FITS_NOT)


def _side(name: str) -> RankSummary:
    from gpumon import link
    from gpumon.analysis.compare import Run

    run = Run()
    try:
        if Path(name).exists():
            for obj in _of_file(Path(name)):
                run.take(obj)
        else:
            asyncio.run(_of_job(link.resolve(name), run))
    except link.LinkError as error:
        raise click.ClickException(f"{name}: {error}") from error
    except msgspec.ValidationError as error:
        raise click.ClickException(f"{name} holds an object that --json does not print: {error}") from None
    highest = run.highest
    if highest is None:
        raise exits.CannotTell(f"{name} has no step whose peak was read; there is nothing to compare")
    return highest


def _of_file(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a recording, or of a file of JSON lines."""
    from gpumon import link
    from gpumon.export.objects import Objects
    from gpumon_agent.wire.recording import MAGIC

    try:
        with path.open("rb") as file:
            recorded = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise click.ClickException(f"{path}: {error.strerror}") from None
    if recorded:
        objects = Objects(replaying=True)
        for received in link.replay(path):
            for stated in objects.take(received):
                yield stated.object
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                obj = json.loads(line)
                if not isinstance(obj, dict) or not isinstance(obj.get("type"), str):
                    raise ValueError
            except (ValueError, RecursionError):
                raise click.ClickException(
                    f"{path} is neither a recording nor the output of --json (line {number} is no object)"
                ) from None
            yield obj


async def _of_job(descriptors: tuple[Descriptor, ...], run: Run) -> None:
    """What a job has done so far, from its agents. Raises LinkError."""
    from gpumon import link
    from gpumon.export.objects import Objects
    from gpumon_agent import wire

    objects, synced = Objects(), set()
    async with contextlib.aclosing(link.subscribe(descriptors)) as stream:
        async for received in stream:
            for stated in objects.take(received):
                run.take(stated.object)
            if isinstance(received.event, (wire.Synced, wire.Goodbye)):
                synced.add(received.source)
            if len(synced) >= len(descriptors):
                return


def _lines(found: RunComparison) -> Iterator[str]:
    from gpumon.analysis.units import percent, size

    one, other = found.before, found.after
    more = "higher" if found.growth > 0 else "lower"
    how = "the same" if not found.growth else f"{percent(abs(found.growth))} {more}"
    yield f"B's peak is {how}: {size(one.peak)} in {one.phase} → {size(other.peak)} in {other.phase}"
    for each in found.differences:
        if (each.kind, each.name) == ("peak", "reserved"):
            yield f"reserved  {size(each.before)} → {size(each.after)}"
    if found.changed:
        yield ""
        yield "What changed"
        yield from (f"  {name}: {before} → {after}" for name, before, after in found.changed)
    for kind, title in TITLES.items():
        here = [each for each in found.differences if each.kind == kind]
        if here:
            yield ""
            if kind == "category":
                title += ", at the peak" if found.at_peak else ", at a step's end"
            yield f"{title:<{NAME}}{'A':>{FIGURE}}{'B':>{FIGURE}}{'B − A':>{FIGURE}}"
            yield from (_row(each) for each in here[:SHOWN])
            if len(here) > SHOWN:
                yield f"  and {len(here) - SHOWN} more with smaller differences"


def _row(each: Difference) -> str:
    from gpumon.analysis.units import size

    name = each.name.replace("_", " ") if each.kind == "category" else each.name
    short = name if len(name) <= NAME - 3 else "…" + name[-(NAME - 4) :]
    figures = f"{size(each.before):>{FIGURE}}{size(each.after):>{FIGURE}}{size(each.bytes, sign=True):>{FIGURE}}"
    return f"  {short:<{NAME - 2}}{figures}"


def _stated(found: RunComparison) -> dict[str, Any]:
    return {
        "type": "comparison",
        "peak": [found.before.peak, found.after.peak],
        "growth": round(found.growth, 6),
        "phase": [found.before.phase, found.after.phase],
        "steps": [found.before.steps, found.after.steps],
        "rank": [found.before.rank, found.after.rank],
        "changed": [{"what": name, "before": before, "after": after} for name, before, after in found.changed],
        "differences": [
            {"kind": each.kind, "name": each.name, "before": each.before, "after": each.after, "bytes": each.bytes}
            for each in found.differences
        ],
    }
