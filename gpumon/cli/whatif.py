"""`gpumon whatif`: what a recorded run would need with another batch, length, precision or optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from gpumon.cli.printing import say, say_json
from gpumon.cli.progress import working
from gpumon_agent import wire

if TYPE_CHECKING:
    from gpumon.analysis.changes import Change, ChangeResult
    from gpumon.session.frame import RankFrame


class Factor(click.ParamType[float]):
    """ "2x", "0.5x", "1.5"."""

    name = "FACTOR"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            factor = float(str(value).lower().rstrip("x×"))
        except ValueError:
            self.fail(f"{value!r} is not a factor: write 2x or 0.5x", param, ctx)
        if not 0 < factor <= 1024:
            self.fail(f"{value!r} is not between 0 and 1024", param, ctx)
        return factor


@click.command("whatif")
@click.option("--session", type=click.Path(path_type=Path), metavar="FILE", required=True,
              help="A recording made by gpumon record.")  # fmt: skip
@click.option("--batch", type=Factor(), default=1.0, help="Multiply the batch: 2x, 0.5x.")
@click.option("--sequence", type=Factor(), default=1.0, help="Multiply the length of each sample.")
@click.option("--accumulate", type=click.IntRange(1, 1024), default=1, help="The same batch in N micro-batches.")
@click.option("--checkpointing", is_flag=True, help="Activation checkpointing of the repeated blocks.")
@click.option("--bf16", is_flag=True, help="Autocast to bf16.")
@click.option("--fused", is_flag=True, help="A fused optimizer step.")
@click.option("--bucket-views", is_flag=True, help="DDP's gradients as views of its buckets.")
@click.option(
    "--zero", type=click.IntRange(0, 3), default=0, help="ZeRO stage: shard state (1), gradients (2), weights (3)."
)
@click.option("--ranks", type=click.IntRange(min=2), help="Number of ranks for --zero; the run's own by default.")
@click.option("--rank", type=click.IntRange(min=0), help="The rank; the first by default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a change.")
def command(
    session: Path,
    batch: float,
    sequence: float,
    accumulate: int,
    checkpointing: bool,
    bf16: bool,
    fused: bool,
    bucket_views: bool,
    zero: int,
    ranks: int | None,
    rank: int | None,
    as_json: bool,
) -> None:
    """Estimate what a recorded run would need with changes, from its own measurements.

    \b
    gpumon whatif --session run.gpumon                        the usual changes, one by one
    gpumon whatif --session run.gpumon --batch 2x --fused     these together

    Each figure has an interval. If the recording lacks data for a figure, the reason is given.
    """
    from gpumon import link
    from gpumon.analysis.changes import USUAL, Change

    change = Change(batch, sequence, accumulate, checkpointing, bf16, fused, bucket_views, zero, ranks)
    plain = Change(ranks=ranks)
    changes: tuple[Change, ...] = (Change(), change)
    if change == plain:
        changes = tuple(c if not c.zero else Change(zero=c.zero, ranks=ranks) for c in USUAL)
    try:
        with working(f"reading {session}"):
            found = asked_of(link.replay(session), changes, rank)
    except link.LinkError as error:
        raise click.ClickException(str(error)) from error
    if found is None:
        raise click.ClickException(f"{session}: no step of {'the rank' if rank is None else f'rank {rank}'} was read")
    device, answers = found
    for each in answers:
        if as_json:
            say_json(stated(each, device))
        else:
            say(line(each))
    if not as_json:
        for note in dict.fromkeys(note for each in answers for note in each.notes):
            say(f"  · {note}")


def stated(answer: ChangeResult, device: int) -> dict[str, Any]:
    peak = answer.peak
    return {
        "type": "whatif",
        "device": device,
        "change": answer.change.name(),
        "peak": None if peak is None else round(peak.expected),
        "low": None if peak is None else round(peak.low),
        "high": None if peak is None else round(peak.high),
        "phase": answer.phase,
        "headroom": answer.headroom,
        "fits": answer.fits,
        "full_in_steps": answer.full_in,
        "why_not": answer.why_not,
        "notes": list(answer.notes),
    }


def line(answer: ChangeResult) -> str:
    from gpumon.analysis.units import size

    name = answer.change.name()
    if answer.peak is None:
        return f"{name:<30} unknown, because {answer.why_not}"
    peak = answer.peak
    span = f"({size(max(0, round(peak.low)))}–{size(round(peak.high))})"
    word = {True: "fits", False: "does not fit", None: "may fit" if answer.headroom is not None else ""}[answer.fits]
    if answer.full_in is not None and answer.fits is not False:
        word += f", but the leak fills the device in {answer.full_in:,} steps"
    left = (
        ""
        if answer.headroom is None
        else f", {size(abs(answer.headroom))} {'left' if answer.headroom >= 0 else 'missing'}"
    )
    return f"{name:<30} {size(round(peak.expected)):>10} {span:<24} in {answer.phase:<10} {word}{left}"


def asked_of(
    stream: Iterable[wire.Received], changes: Sequence[Change], number: int | None = None
) -> tuple[int, list[ChangeResult]] | None:
    """Answers at the recording's end, for the first device of the wanted rank; None without steps."""
    from gpumon.analysis import Reporter
    from gpumon.analysis.forecast import Forecaster
    from gpumon.analysis.history import step_peaks
    from gpumon.analysis.whatif import answer
    from gpumon.session.store import SessionStore

    store, reporter = SessionStore(replaying=True), Reporter()
    forecasters: dict[tuple[str, int], Forecaster] = {}
    unix_ns = 0
    for received in stream:
        store.apply(received)
        unix_ns = max(unix_ns, received.unix_ns)
        if not isinstance(received.event, wire.Step):
            continue
        rank = store.rank(received.source, unix_ns)
        if rank is None or not rank.steps:
            continue
        record = rank.steps[-1]
        for index in {phase.device for phase in record.phases}:
            figures = step_peaks(record, index)
            if figures is not None:
                forecasters.setdefault((rank.source, index), Forecaster()).observe(figures, record.on(index))
        reporter.rank(rank)
    for rank in store.frame(unix_ns).ranks:
        if number is not None and rank.hello.rank != number:
            continue
        report = reporter.rank(_as_live(rank))
        for device in report.devices:
            forecaster = forecasters.get((rank.source, device.device))
            if forecaster is not None:
                return device.device, answer(rank, device, forecaster.shape_model, changes)
    return None


def _as_live(rank: RankFrame) -> RankFrame:
    """As if it were live, so that an ended run has the headroom it had."""
    return msgspec.structs.replace(rank, status="live")
