"""Accuracy of forecasts: runs on the virtual GPU, all scenarios, clean synthetic runs, what-if; and their cost.

    python benchmarks/forecast.py [--runs] [--held] [--scenarios] [--clean] [--whatif] [--cost] [--write]
                                  [--keep FOLDER [--kept]]

Without a choice: all of them. The tuning runs that end in an OOM are recorded with `gpumon record` next to the
training, the others by forks (forecasting/recording.py). forecasting/backtest.py scores all by replaying the messages.
`--write` updates the tables that were made in benchmarks/forecast-accuracy.md. Costs are CPU time of one thread.
"""

from __future__ import annotations

import argparse
import heapq
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "_shared")]

from forecasting.backtest import Backtest, backtest, outlook_of  # noqa: E402
from forecasting.cost import costs  # noqa: E402
from forecasting.recording import SMALL, Recordings  # noqa: E402
from forecasting.runs import HELD, HELD_LEAKS, HELD_OUTLIERS, LEAKS, OUTLIERS, PAIRS, SHAPES  # noqa: E402
from scenarios.catalogue import SCENARIOS  # noqa: E402
from synthetic import MIB, Run, rank_of  # noqa: E402

from gpumon import link  # noqa: E402
from gpumon.analysis.findings.capacity import oom_ahead  # noqa: E402
from gpumon.analysis.findings.look import Look  # noqa: E402
from gpumon.analysis.forecast import Forecaster, Room  # noqa: E402
from gpumon.analysis.history import step_peaks  # noqa: E402
from gpumon.analysis.rules import OOM_AHEAD  # noqa: E402
from gpumon.analysis.types import Forecast  # noqa: E402
from gpumon.cli.whatif import asked_of  # noqa: E402
from gpumon.session.frame import StepRecord  # noqa: E402
from gpumon_agent import wire  # noqa: E402

PAGE = ROOT / "benchmarks" / "forecast-accuracy.md"
RUN, HELD_RUN, WHATIF_RUN = (
    str(ROOT / "benchmarks" / "forecasting" / f"{name}.py") for name in ("run", "held", "changed")
)
SCENARIO_STEPS = 60
HEAD = """| run | steps | outlook, median | 95th | exact | held | next, median | held | last peak | largest | ended |
|---|---|---|---|---|---|---|---|---|---|---|"""


def runs(recordings: Recordings) -> Iterator[str]:
    yield f"\n## Shapes\n\nWhat forecasting was made with.\n\n{HEAD}"
    for name, args in SHAPES.items():
        yield from scored(name, recordings.told(name, None, [RUN, *args]))
    yield f"\n## Out of memory\n\nBy one batch forty times as large as the largest, half-way; by a leak.\n\n{HEAD}"
    for chosen in (OUTLIERS, LEAKS):
        for name, args in chosen.items():
            yield from scored(name, recordings.beside(name, SMALL, [RUN, *args], governed=chosen is OUTLIERS))


def held(recordings: Recordings) -> Iterator[str]:
    yield f"\n## Other models, other batches\n\nWritten when forecasting was done.\n\n{HEAD}"
    for chosen, memory in ((HELD, None), (HELD_OUTLIERS, SMALL), (HELD_LEAKS, SMALL)):
        for name, args in chosen.items():
            yield from scored(name, recordings.told(name, memory, [HELD_RUN, *args]))


def scenarios(recordings: Recordings) -> Iterator[str]:
    yield f"\n## Scenarios\n\nEvery one of the catalogue, {SCENARIO_STEPS} steps, each rank.\n\n{HEAD}"
    for scenario in SCENARIOS:
        memory = f"{scenario.memory_mib}MiB" if scenario.memory_mib else None
        command = [str(scenario.path), *scenario.args, "--steps", str(SCENARIO_STEPS), "--sleep", "0.01"]
        yield from scored(scenario.name, recordings.told(scenario.name, memory, command, scenario.ranks))


def scored(name: str, files: Sequence[Path]) -> Iterator[str]:
    """One file per rank."""
    told = heapq.merge(*(link.replay(file) for file in files), key=lambda received: received.unix_ns)
    found = backtest(told) if files else []
    for score in found:
        yield row(f"{name}, rank {score.rank}" if len(found) > 1 else name, score)


def row(name: str, score: Backtest) -> str:
    outlook, following, naive = score.outlook, score.next, score.naive
    exact = outlook.exact / outlook.judged if outlook.judged else None
    cells = (
        outlook.median, outlook.ninety_fifth, exact, outlook.coverage, following.median, following.coverage,
        naive["last peak"].median, naive["largest so far"].median,
    )  # fmt: skip
    return f"| {name} | {score.steps:,} | {' | '.join(map(percent, cells))} | {ended(score)} |"


def ended(score: Backtest) -> str:
    parts = []
    for each in score.ended[:1]:
        said = "outlook did not say so" if each.by_shape is None else f"outlook {each.by_shape / 1e6:.2f} ms before"
        found = "" if each.steps_ahead is None else f", finding {each.steps_ahead} steps before"
        parts.append(f"step {each.step}: {said}{found}")
    if errors := score.steps_to_oom_errors():
        within = sum(each <= 0.1 for each in errors) / len(errors)
        parts.append(
            f"steps to OOM {percent(score.steps_to_oom_error())} off, within 10 % at {within:.0%} of steps, "
            f"interval held {score.steps_to_oom_coverage():.0%}"
        )
    if not score.ended and score.false_outlooks + score.false_findings:
        parts.append(f"false: {score.false_outlooks} outlooks, {score.false_findings} findings")
    return "; ".join(parts)


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def whatif(recordings: Recordings) -> Iterator[str]:
    """Predicts from each first run, measures the second."""
    yield """
## What if

Each run once as it was and once changed, the answer given from the first. MiB at the peak.

| run | change | before | said | needed | off | in the span |
|---|---|---|---|---|---|---|"""
    for pair in PAIRS:
        before, after = (
            recordings.told(f"whatif {ranks} {' '.join(args)}", None, [WHATIF_RUN, *args], ranks)
            for args, ranks in zip((pair.before, pair.after), pair.ranks, strict=True)
        )
        asked = asked_of(link.replay(before[0]), (pair.change,)) if before else None
        if asked is None or not after:
            continue
        answer, needed = asked[1][0], highest(after[0])
        cells: tuple[str, ...] = (f"not told: {answer.why_not}", f"{needed / MIB:,.0f}", "", "")
        if (span := answer.peak) is not None:
            holds = span.low * 0.995 <= needed <= span.high * 1.005  # half a percent for rounding
            cells = (
                f"{span.expected / MIB:,.0f} ({span.low / MIB:,.0f}–{span.high / MIB:,.0f})", f"{needed / MIB:,.0f}",
                f"{100 * (span.expected / needed - 1):+.1f} %", "yes" if holds else "no",
            )  # fmt: skip
        yield f"| {pair.name} | {pair.change.name()} | {highest(before[0]) / MIB:,.0f} | {' | '.join(cells)} |"


def highest(file: Path) -> int:
    """The highest peak of a recording from step 2 on."""
    phases = [r.event for r in link.replay(file) if isinstance(r.event, wire.Phase)]
    return max((p.allocated_peak or 0 for p in phases if p.step >= 2), default=0)


def clean(steps: int) -> Iterator[str]:
    """Long runs that fit, the largest batch with 3 % to spare: every warning is false."""
    yield f"\n## Clean runs, synthetic\n\nThe largest batch with 3 % to spare.\n\n{HEAD}"
    rng = random.Random(8)
    kinds: dict[str, Callable[[], int]] = {
        "same": lambda: 256,
        "uniform": lambda: rng.randint(32, 512),
        "heavy tail": lambda: min(512, round(rng.lognormvariate(4.5, 0.7)) + 8),
        "buckets": lambda: rng.choice((64, 128, 192, 256, 384, 512)),
        "sorted by length, an epoch again and again": lambda: 0,
        "noisy": lambda: rng.randint(200, 256),
    }
    for name, draw in kinds.items():
        lengths = [draw() for _ in range(steps)]
        if name.startswith("sorted"):
            epoch = sorted(rng.randint(32, 512) for _ in range(400))
            lengths = [epoch[step % len(epoch)] for step in range(steps)]
        off = [rng.uniform(0.997, 1.003) if name == "noisy" else 1.0 for _ in range(steps)]

        def needs(step: int, lengths: list[int] = lengths, off: list[float] = off) -> int:
            length = lengths[min(step, steps - 1)]
            return round((2 * MIB * length + 4096 * length * length) * off[min(step, steps - 1)])

        highest = max(needs(step) for step in range(steps))
        run = Run(activations=needs, input_bytes=lambda step, lengths=lengths: 64 * lengths[min(step, steps - 1)])
        room = round(1.03 * (highest + 5 * run.weights))
        yield row(f"clean, {name}", played(run, steps, room))


def played(run: Run, steps: int, room: int) -> Backtest:
    """Like `backtest`, but without a session store, which would be slow for thousands of steps."""
    score, forecaster, rank = Backtest("", None, 0), Forecaster(), rank_of(run, 1)
    said: Forecast | None = None
    last = largest = held = 0
    for step in range(steps):
        events = run.step_events(step)
        closed = next(event for event in events if isinstance(event, wire.Step))
        phases = tuple(event for event in events if isinstance(event, wire.Phase))
        record = StepRecord(step, closed, phases)
        figures = step_peaks(record, 0)
        outlook = outlook_of(forecaster, record, 0, room)
        if figures is None:
            continue
        peak = figures.peak
        if step >= 20:
            if outlook is not None:
                score.outlook.add(outlook.next_peak, peak, outlook.low, outlook.high)
            if said is not None:
                score.next.add(said.next_peak, peak, said.low, said.high)
            score.naive["last peak"].add(last, peak)
            score.naive["largest so far"].add(largest, peak)
        score.steps += 1
        score.clean_steps += 1
        score.false_outlooks += outlook is not None and outlook.verdict == wire.OOM_AHEAD
        last, largest = peak, max(largest, peak)
        forecaster.observe(figures, record.on(0))
        said = forecaster.forecast(Room(room, forecaster.fragments.bytes))
        found = oom_ahead(Look(rank, 0, record, figures, said, None, None, room))
        held = held + 1 if found is not None else 0
        score.false_findings += held == OOM_AHEAD.opens_after
    return score


def cost() -> Iterator[str]:
    yield "\n## Cost\n\nCPU time of one thread, a batch or a step, in the quickest and slowest of three rounds.\n"
    yield "| what | |\n|---|---|"
    yield from (f"| {name} | {text} |" for name, text in costs())


def replaced(page: str, made: Sequence[str]) -> str:
    """The page with the newly made sections replaced."""

    def sections(text: str) -> dict[str, str]:
        parts = re.split(r"^(?=## )", text, flags=re.MULTILINE)
        return {part.partition("\n")[0]: part.strip() for part in parts if part.strip()}

    return "\n\n".join({**sections(page), **sections("\n".join(made))}.values()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = ("runs", "held", "scenarios", "clean", "whatif", "cost")
    for name in (*names, "write"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--steps", type=int, default=6000, help="of each clean synthetic run (6000)")
    parser.add_argument("--kept", action="store_true", help="make no recordings: only those in --keep")
    parser.add_argument("--keep", type=Path, help="where recordings stay, and are taken from")
    args = parser.parse_args()
    chosen = [name for name in names if getattr(args, name)] or list(names)
    made: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recordings = Recordings(folder, only_kept=args.kept)
        parts: dict[str, Callable[[], Iterator[str]]] = {
            "runs": lambda: runs(recordings),
            "held": lambda: held(recordings),
            "scenarios": lambda: scenarios(recordings),
            "clean": lambda: clean(args.steps),
            "whatif": lambda: whatif(recordings),
            "cost": cost,
        }
        try:
            for name in chosen:
                for line in parts[name]():
                    print(line, flush=True)
                    made.append(line)
        finally:
            recordings.close()
    if args.write:
        PAGE.write_text(replaced(PAGE.read_text(), made))


if __name__ == "__main__":
    main()
