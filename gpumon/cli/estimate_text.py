"""The estimate as text: the answer on the first line, and below it 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpumon.analysis.answer import line, of_estimate
from gpumon.analysis.estimate.comparing import ParameterComparison
from gpumon.analysis.estimate.plan import TargetDevice
from gpumon.analysis.estimate.report import EstimateReport
from gpumon.analysis.estimate.sharding import RankShare
from gpumon.analysis.estimate.workload import Workload
from gpumon.analysis.types import OWNERS
from gpumon.analysis.units import MINUS, Unit, count, in_unit, percent, size, unit_for
from gpumon.cli.checked import ESTIMATE
from gpumon.cli.estimate_answer import named, of_shares, of_stages, row_name

NAME, FIGURE = 13, 11
TITLE = 46


def lines(done: EstimateReport) -> Iterator[str]:
    expected = done.expected
    model, work = expected.model, expected.work
    frozen = model.count - model.trained_count
    trained = f", {count(model.trained_count)} of them trained" if frozen else ""
    yield line(of_estimate(done))
    yield f"{done.subject.name}: {count(model.count)} parameters{trained}"
    yield from _how(work, expected.played.has_tokens, expected.played.forward)
    yield ""
    yield _floor(done)
    yield from _need(done)
    yield ""
    yield from _table(done)
    yield from _limits(done)
    yield from _remedies(done)
    yield from _checked()


def _how(work: Workload, has_tokens: bool, forward: bool) -> Iterator[str]:
    parts = [work.precision.name, "inference" if work.inference else work.optimizer.says]
    if forward:
        tokens = f" × {count(work.kv_cache or work.sequence)} tokens" if has_tokens else ""
        parts.append(f"batch {count(work.batch)}{tokens}")
        parts.append(f"{work.attention} attention")
    if work.accumulation > 1:
        parts.append(f"{work.accumulation} forwards a step")
    if work.checkpointing:
        parts.append("checkpointing")
    if work.world_size > 1:
        stage = f"ZeRO {work.zero}" if work.zero else "DDP, bucket views" if work.bucket_views else "DDP"
        stage += " by FSDP1" if work.flat and work.zero == 3 else ""
        parts.append(f"{work.world_size} ranks, {stage}")
    yield from _wrapped(" · ".join(parts))


def _floor(done: EstimateReport) -> str:
    if not done.expected.played.forward:
        return f"floor   {size(done.floor.reserved + done.context)} with any batch: the forward is not known"
    tokens = ", 1 token" if done.expected.played.has_tokens else ""
    text = f"floor   {size(done.floor.reserved + done.context)} with batch 1{tokens}"
    if done.device is None or done.limits is None:
        return text
    return f"{text}: {'fits' if done.limits.floor_fits else 'does not fit'} {named(done.device)}"


def _need(done: EstimateReport) -> Iterator[str]:
    high, work = done.expected.highest, done.expected.work
    first = ", first iteration" if high.iteration == 1 and not work.inference else ""
    if done.device is None:
        yield f"need    {size(done.needed)} reserved, and a context beside it (0.4 to 1.8 GiB, by device)"
    else:
        yield f"need    {size(done.needed)}: {size(done.expected.reserved)} reserved, {size(done.context)} context"
    yield f"peak    {size(high.peak)} allocated, in {high.phase}{first}"
    if kept := done.expected.played.kv_cache:
        yield f"keys    {size(kept)} of it are keys and values kept"


def _table(done: EstimateReport) -> Iterator[str]:
    """Bytes by line at each phase's peak, in a steady iteration."""
    phases, sources = done.expected.steady, dict(done.expected.sources)
    unit = unit_for(max(phase.reserved for phase in phases))
    heading = "".join(phase.phase.rjust(FIGURE) for phase in phases)
    yield f"{unit.name + ' at peak':<{NAME}}{heading}  source"
    for name in (*OWNERS, "rounding"):
        values = [getattr(phase.at_peak, name) or 0 for phase in phases]
        if any(values):
            yield _row(name, values, unit, sources.get(name, ""))
    yield _row("allocated", [phase.peak for phase in phases], unit, "the sum")
    yield _row("reserved", [phase.reserved for phase in phases], unit, sources["reserved"])
    yield ""
    thumb = done.thumb
    if thumb is not None:
        off = f"{percent(abs(thumb.off))} too {'much' if thumb.off > 0 else 'little'}"
        yield "rule of thumb: 4 × 4 B × parameters + activations × batch + 2 GB ="
        yield f"  {size(thumb.total)}, {off}"


def _row(name: str, values: Sequence[int], unit: Unit, source: str) -> str:
    figures = "".join((in_unit(value, unit) if value else "–").rjust(FIGURE) for value in values)
    return f"{name:<{NAME}}{figures}  {source}".rstrip()


def stage_lines(done: Sequence[EstimateReport]) -> Iterator[str]:
    """Several ZeRO stages, one row each: the maximum of every line, and the total peak."""
    first, device = done[0].expected, done[0].device
    yield line(of_stages(done, device))
    yield f"{done[0].subject.name}: {count(first.model.count)} parameters · {count(first.work.world_size)} ranks"
    yield from _how(replace(first.work, world_size=1), first.played.has_tokens, first.played.forward)
    yield ""
    highest = [{name: _most(each, name) for name in OWNERS if name != "inputs"} for each in done]
    least = max(each.expected.peak for each in done) // 200  # smaller lines get no column
    names = [name for name in highest[0] if any(lines[name] > least for lines in highest)]
    unit = unit_for(max(each.expected.peak for each in done))
    heading = "".join(_SHORT.get(name, name).rjust(_STAGE) for name in (*names, "peak"))
    yield f"{unit.name:<8}{heading}"
    for each, lines_of in zip(done, highest, strict=True):
        figures = [*(lines_of[name] for name in names), each.expected.peak]
        text = "".join((in_unit(value, unit) if value else "–").rjust(_STAGE) for value in figures)
        stage = each.expected.work.zero
        fits = "" if device is None else "  fits" if each.expected.played.fits(device.budget) else "  does not fit"
        yield f"{f'ZeRO {stage}' if stage else 'DDP':<8}{text}{fits}"
    yield ""
    yield "Each line at its highest on a rank, not all at one moment. ZeRO 3 is FSDP."
    yield from _checked()


_SHORT = {
    "activations": "saved",
    "gradients": "grads",
    "optimizer": "states",
    "temporaries": "brief",
    "workspaces": "cuBLAS",
}
_STAGE = 9


def _most(done: EstimateReport, name: str) -> int:
    return max(getattr(phase.at_peak, name) or 0 for phase in done.expected.phases)


def _limits(done: EstimateReport) -> Iterator[str]:
    limits, device, work = done.limits, done.device, done.expected.work
    if limits is None or device is None:
        return
    verdict = "fits" if limits.fits else "does not fit"
    yield f"{named(device)}, of which a context takes {size(device.context)} (assumed): {verdict}"
    most = []
    if limits.floor_fits and limits.batch is not None:
        tokens = f" of {count(work.kv_cache or work.sequence)} tokens" if done.expected.played.has_tokens else ""
        most.append(f"batch {count(limits.batch)}{tokens}")
    if limits.floor_fits and limits.sequence is not None:
        whole = " (the longest the model takes)" if limits.sequence == done.subject.longest else ""
        most.append(f"{count(limits.sequence)} tokens{whole} at batch {count(work.batch)}")
    if most:
        yield from _wrapped(f"the most that fits: {', or '.join(most)}")


def _remedies(done: EstimateReport) -> Iterator[str]:
    helping = [remedy for remedy in done.remedies if remedy.saves * 200 > done.expected.peak]
    if helping:
        yield ""
        yield f"{'the peak of ' + size(done.expected.peak) + ' would be, with':<{TITLE}}{'peak':>10}"
    for remedy in helping:
        fits = "" if remedy.fits is None else "fits" if remedy.fits else "does not fit"
        title = remedy.title if len(remedy.title) < TITLE - 2 else remedy.title[: TITLE - 4] + "…"
        yield f"  {title:<{TITLE - 2}}{size(remedy.peak):>10}{size(-remedy.saves, sign=True):>12}  {fits}".rstrip()
    idle = [remedy.title for remedy in done.remedies if remedy not in helping]
    if idle:
        yield from _wrapped(f"no help here: {'; '.join(idle)}")


def _checked() -> Iterator[str]:
    yield ""
    yield from _wrapped(f"checked: {ESTIMATE}")


def _wrapped(text: str, width: int = 80) -> Iterator[str]:
    line = ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = "  " + word
        else:
            line = f"{line} {word}" if line else word
    yield line


def share_lines(
    parameters: int, known: Sequence[tuple[Workload, RankShare]], device: TargetDevice | None
) -> Iterator[str]:
    """A table of bytes per rank, one row per workload."""
    work = known[0][0]
    what = "inference" if work.inference else work.optimizer.name
    ranks = f"{work.world_size} ranks, bytes of each" if work.world_size > 1 else "one rank"
    yield line(of_shares(known, device))
    yield f"{count(parameters)} parameters · {what} · {ranks}"
    yield ""
    unit = unit_for(max(share.total for _, share in known))
    heading = "".join(name.rjust(FIGURE - 1) for name in ("weights", "gradients", "optimizer", "sum"))
    yield f"{unit.name:<18}{heading}{'B/parameter':>13}"
    for work, share in known:
        figures = (share.weights + share.casts, share.gradients, share.optimizer, share.total)
        text = "".join((in_unit(value, unit) if value else "–").rjust(FIGURE - 1) for value in figures)
        text = f"{row_name(work):<18}{text}{share.total / parameters:>13.4g}"
        fits = "" if device is None else "fits" if share.total <= device.budget else "does not fit"
        yield f"{text}  {fits}".rstrip()
    yield ""
    yield from _wrapped(
        "Exact, but without activations and temporaries of a step. Under autocast the casts of all weights are counted "
        "with the weights."
    )


def comparison_lines(done: ParameterComparison, first: str, second: str) -> Iterator[str]:
    """Parameters of either model by layer."""
    more = done.second - done.first
    yield (
        f"B has {count(abs(more))} parameters {'more' if more > 0 else 'fewer'} than A"
        if more
        else f"A and B have the same number of parameters, {count(done.first)}"
    )
    yield f"parameters by layer: A {first}"
    yield f"                     B {second}"
    yield ""
    width = min(max(len(row.layer) for row in done.rows), 38)
    yield f"{'':<{width}}{'A':>14}{'B':>14}{'B − A':>14}"
    for row in done.rows:
        name = row.layer if len(row.layer) <= width else "…" + row.layer[1 - width :]
        yield f"{name:<{width}}{count(row.first):>14}{count(row.second):>14}{_difference(row.difference):>14}"
    total = f"{count(done.first):>14}{count(done.second):>14}{_difference(done.second - done.first):>14}"
    yield f"{'parameters':<{width}}{total}"
    if done.vocabularies is not None and done.per_entry is not None:
        one, two = done.vocabularies
        yield ""
        sizes = f"{count(one)} and {count(two)} entries"
        yield f"The vocabulary explains all of it: {sizes} of {count(done.per_entry)} parameters each."


def _difference(value: int) -> str:
    return "–" if not value else f"{'+' if value > 0 else MINUS}{abs(value):,}"
