"""What benchmarks/forecast.py found, and docs/forecast-accuracy.md made of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from forecasting.backtest import Accuracy, Backtest, Ended
from forecasting.noisy import percent, random_leaks
from forecasting.runs import Pair
from forecasting.scarce import Scarce

from gpumon.analysis.changes import Answer

MIB = 1 << 20
BLIND = "boxes"
"""Runs of this name need what no shape tells."""
SAME, VARYING = 0.005, 0.02
"""Errors that the outlook is to stay below: of the same shapes, and in the median of shapes that vary."""


@dataclass
class Scored:
    name: str
    scores: list[Backtest]
    kind: str
    again: bool = False  # recorded by an older state: its outlooks were made now


@dataclass
class Checked:
    """What was said of a change, and what the changed run then needed."""

    pair: Pair
    answer: Answer
    before: int
    needed: int


@dataclass
class Result:
    scored: list[Scored] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    checked: list[Checked] = field(default_factory=list)
    scarce: list[Scarce] = field(default_factory=list)
    costs: list[tuple[str, str]] = field(default_factory=list)
    memory: list[tuple[int, int, int]] = field(
        default_factory=list
    )  # steps, blocks of Python's allocator, KiB resident


def replaced(before: str, text: str) -> str:
    """The page with those of its sections that were made anew; the head is made with the first table."""
    known, made = _sections(before), _sections(text)
    if _FIRST not in made:
        made = {heading: section for heading, section in made.items() if heading.startswith("## ")}
    return "\n\n".join({**known, **made}.values()) + "\n"


_FIRST = "## Shapes"


def _sections(text: str) -> dict[str, str]:
    """By their headings; what stands above the first one by the page's title."""
    parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    return {part.partition("\n")[0]: part.strip() for part in parts}


Rows = Sequence[tuple[Scored, Backtest]]

TABLES = (
    ("Shapes", "What forecasting was made with.", ("shapes",)),
    (
        "Other models, other batches",
        "Written when forecasting was done. What pairs and heavy showed (planes, phases after the inputs) was mended"
        "\nlater, with these very runs.",
        ("held",),
    ),
    ("Out of memory by shape", "One batch forty times as large as the largest, half-way.", ("shape", "held shape")),
    ("Out of memory by a leak", "", ("leak", "held leak")),
    ("Scenarios", "Every one of the catalogue, 60 steps, each rank.", ("scenario",)),
    ("Clean runs, synthetic", "The largest batch with 3 % to spare.", ("clean",)),
)


def page(result: Result) -> Iterator[str]:
    every = [(each, score) for each in result.scored for score in each.scores]
    yield """# How well forecasts hold

Written by `python benchmarks/forecast.py --write`, by `--scores --write` where no other choice is named;
[forecast.md](forecast.md) says how forecasts are made. Recorded on the virtual GPU, whose allocator is PyTorch's own,
and played back message by message: out of memory with `gpumon record` beside `gpumon run`, the rest by forks that
write down what the agent says; all but the batches that are too large without the governor, so that each of these
short steps was read. *Outlook* is what was said as a batch entered forward, its shapes known; *next* what was said a
step before, its batch not known; errors are shares of the peak that then was, from the third step on (same shapes) or
after 20 (shapes that vary); *held* is how often the 95 % interval did, *exact* how often the peak was what was said
to the byte: then any interval holds, however narrow.
"""
    for title, about, kinds in TABLES:
        rows = [(each, score) for each, score in every if each.kind in kinds]
        if not rows:
            continue
        yield f"## {title}\n"
        if about:
            yield f"{about}\n"
        yield from _table(rows)
        yield ""
    yield from random_leaks([(each.name, each.kind, score) for each, score in every])
    if every:
        yield "## Together\n"
        yield from summary(every)
    again = sum(each.again for each in result.scored)
    if again:
        yield (
            f"\n{again} of these runs were recorded by an older state: their outlooks were made anew, step by step, "
            "from what the recording had told until then."
        )
    if result.failed:
        yield f"\nNot scored (no step with peaks and a forward): {', '.join(result.failed)}."
    if result.scarce:
        yield """
## Where few steps are read whole

By `--scarce`. The runs above that end out of memory by shape, and those whose shapes vary, with the agent's readings
taken out of all but one step in so many (forecasting/scarce.py): of the others it has what stands at their end and
their highest moment.

| steps read whole | out of memory said | false | outlooks | off, median | 95th | held |
|---|---|---|---|---|---|---|"""
        yield from (each.row() for each in result.scarce)
    if result.checked:
        yield from _whatif(result.checked)
    if result.costs:
        yield f"""
## Cost

By `--cost`. CPU time of one thread, a batch or a step, in the quickest and in the slowest of three rounds; `nothing` is
what measuring itself shows. The agent's batch is what the training thread waits for. The viewer's forecast is learning
a step and saying the next one's, a picture each step; its whole report, at 4 pictures and 20 steps a second, is all
that it works out of a rank: ledgers, growth, findings. Load average of the last minute: {os.getloadavg()[0]:.1f} on
{os.cpu_count()} cores.
"""
        yield "| what | |\n|---|---|"
        yield from (f"| {name} | {text} |" for name, text in result.costs)

    if result.memory:
        steps = result.memory[-1][0]
        yield f"\n## Memory\n\nBy `--memory --memory-steps {steps}`. One process plays agent and viewer: lengths,"
        yield "pairs of lengths and images, ever new names of phases, a leak that comes and goes.\n"
        yield "| steps | blocks of Python's allocator | resident |\n|---|---|---|"
        yield from (f"| {steps:,} | {blocks:,} | {kib / 1024:.1f} MiB |" for steps, blocks, kib in result.memory)


def _table(rows: Rows) -> Iterator[str]:
    yield "| run | steps | outlook, median | 95th | exact | held | next, median | held | last peak | largest | ended |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for each, score in rows:
        outlook = score.outlook
        rank = f", rank {score.rank}" if len(each.scores) > 1 else ""
        exact = outlook.exact / outlook.judged if outlook.judged else None
        cells = (
            f"{each.name}{rank}", f"{score.steps:,}", percent(outlook.median), percent(outlook.ninety_fifth),
            percent(exact), percent(outlook.coverage), percent(score.next.median), percent(score.next.coverage),
            percent(score.naive["last peak"].median), percent(score.naive["largest so far"].median), ended(score),
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def beaten(score: Backtest) -> bool:
    ours = score.outlook.median
    return ours is not None and any(n.median is not None and n.median < ours - 1e-5 for n in score.naive.values())


def ended(score: Backtest) -> str:
    parts = []
    for each in score.ended[:1]:
        said = "outlook did not say so" if each.by_shape is None else f"outlook {each.by_shape / 1e6:.2f} ms before"
        found = "" if each.steps_ahead is None else f", finding {each.steps_ahead} steps before"
        parts.append(f"step {each.step}: {said}{found}")
    errors = sorted(score.steps_to_oom_errors())
    if errors:
        within = sum(each <= 0.1 for each in errors) / len(errors)
        parts.append(f"steps to OOM {percent(score.steps_to_oom_error())} off, within 10 % at {within:.0%} of steps")
    if not score.ended and score.false_outlooks + score.false_findings:
        parts.append(f"false: {score.false_outlooks} outlooks, {score.false_findings} findings")
    return "; ".join(parts)


def summary(every: Rows) -> Iterator[str]:
    real = [(each, score) for each, score in every if each.kind != "clean" and not each.name.startswith(BLIND)]
    for name, varying, limit in (("same shapes", False, SAME), ("shapes that vary", True, VARYING)):
        together = Accuracy()
        here = [(each, score) for each, score in real if score.varying == varying and score.outlook.errors]
        for _, score in here:
            together.merge(score.outlook)
        if not here:
            continue
        within = sum(score.outlook.median is not None and score.outlook.median <= limit for _, score in here)
        yield (
            f"- {name}: outlooks of {len(together.errors):,} steps of {len(here)} runs, {percent(together.median)} off "
            f"in the median, {percent(together.ninety_fifth)} in the 95th percentile; {percent(limit)} or less in "
            f"{percent(together.share_below(limit))} of the steps, and in the median of {within} of {len(here)} runs;"
        )
        yield (
            f"  intervals held {percent(together.coverage)}, half of them no wider than {percent(together.width)} of "
            f"the peak; the peak was to the byte what was said in {together.exact:,} of {together.judged:,}, in the "
            f"others intervals held {percent(together.coverage_inexact)};"
        )
    behind = [(each, score) for each, score in real if score.varying and beaten(score)]
    worse = [f"{each.name} ({percent(score.outlook.median)})" for each, score in behind]
    count = sum(score.varying and score.outlook.median is not None for _, score in real)
    named = ", ".join(worse) or "none"
    yield f"- of runs whose shapes vary a naive forecaster was better in {len(worse)} of {count}: {named};"
    for name, kinds in (("what forecasting was made with", ""), ("the others", "held ")):
        yield from _ends(name, kinds, every)
    for name, kind in (("the random ones again", "leak again"), ("on 8 GiB", "long leak")):
        ends = [score.ended[0] for each, score in every if each.kind == kind and score.ended]
        if ends:
            yield f"- by a leak, {name}: {sum(map(_ahead, ends))} of {len(ends)} at least 20 steps ahead;"
    clean = [(each, score) for each, score in every if each.kind == "clean"]
    fitted = [(each, score) for each, score in real if not score.ended]
    for rows, of in ((clean, "clean synthetic steps"), (fitted, "steps of the runs above that fitted")):
        steps = sum(score.clean_steps for _, score in rows)
        outlooks, findings = (sum(getattr(s, f"false_{what}") for _, s in rows) for what in ("outlooks", "findings"))
        yield f"- false alarms in {steps:,} {of}: {outlooks} outlooks, {findings} findings;"
    slope = [(score.slope_alarms, score.slope_readings) for _, score in real]
    alarms, readings = sum(a for a, _ in slope), sum(n for _, n in slope)
    yield f"- a line through the device's total, alarm at 1 MB/s: {alarms} alarms in {readings} readings."


def _ends(name: str, before: str, every: Rows) -> Iterator[str]:
    shape = [e for each, score in every if each.kind == f"{before}shape" for e in score.ended[:1]]
    if shape:
        said = sum(e.by_shape is not None for e in shape)
        yield f"- out of memory by shape, {name}: {said} of {len(shape)} said before the allocator's observer knew;"
    leaks = [score for each, score in every if each.kind == f"{before}leak" and score.ended]
    if leaks:
        ahead = sum(_ahead(score.ended[0]) for score in leaks)
        medians = [score.steps_to_oom_error() for score in leaks]
        near = sum(error is not None and error <= 0.1 for error in medians)
        errors = [error for score in leaks for error in score.steps_to_oom_errors()]
        within = sum(error <= 0.1 for error in errors) / len(errors) if errors else 0.0
        yield (
            f"- by a leak, {name}: {ahead} of {len(leaks)} at least 20 steps ahead; steps to OOM within 10 % in the "
            f"median of {near} runs, and at {within:.0%} of all steps from a quarter of the way on;"
        )


def _ahead(end: Ended) -> bool:
    return end.steps_ahead is not None and end.steps_ahead >= 20


def checked_row(each: Checked) -> tuple[str, ...]:
    span, needed = each.answer.peak, each.needed
    told, off, holds = f"not told: {each.answer.why_not}", "", ""
    if span is not None:
        told = f"{span.expected / MIB:,.0f} ({span.low / MIB:,.0f}–{span.high / MIB:,.0f})"
        off = f"{100 * (span.expected / needed - 1):+.1f} %"
        holds = "yes" if inside(each) else "no"
    return (
        each.pair.name, each.pair.change.name(), f"{each.before / MIB:,.0f}", told, f"{needed / MIB:,.0f}", off, holds
    )  # fmt: skip


def inside(each: Checked) -> bool:
    """Whether the span holds, half a percent let go for rounding."""
    span = each.answer.peak
    return span is not None and span.low * 0.995 <= each.needed <= span.high * 1.005


def _whatif(checked: Sequence[Checked]) -> Iterator[str]:
    told = [each for each in checked if each.answer.peak is not None]
    offs = sorted(abs(each.answer.peak.expected / each.needed - 1) for each in told if each.answer.peak is not None)
    yield f"""
## What if

By `--whatif`. Each run once as it was and once changed, the answer given from the first. MiB at the peak. The span held
what came in {sum(inside(each) for each in told)} of {len(told)}; the expected figure was
{percent(offs[len(offs) // 2])} off in the median, {percent(offs[int(0.9 * (len(offs) - 1))])} in the 90th percentile.

| run | change | before | said | needed | off | in the span |
|---|---|---|---|---|---|---|"""
    for each in checked:
        yield f"| {' | '.join(checked_row(each))} |"
