"""How well forecasts hold: runs on the virtual GPU, every scenario, long clean synthetic runs, what-if; what they cost.

    python benchmarks/forecast.py [--scores] [--scarce] [--whatif] [--cost] [--memory] [--write]
                                  [--runs] [--held] [--leaks] [--scenarios] [--clean]
                                  [--keep FOLDER [--kept] [--older FOLDER]]

Without a choice: all of them; `--scores` are the five of the second line. Runs that end out of memory are recorded with
`gpumon record` beside the training, the others by forks (forecasting/recording.py); all are scored by
forecasting/backtest.py, which plays them message by message. `--write` writes docs/forecast-accuracy.md, of a choice
its sections. Costs are CPU time of one thread, beside what measuring nothing takes in the same loop: the agent's batch
and its learning in turns, as in a training process; the viewer's in a loop of its own, for it is another process.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "_shared")]

from forecasting.backtest import Backtest, backtest, outlook_of  # noqa: E402
from forecasting.cost import costs  # noqa: E402
from forecasting.memory import keeping  # noqa: E402
from forecasting.page import Checked, Result, Scored, checked_row, page, percent, replaced  # noqa: E402
from forecasting.recording import SMALL, Recordings  # noqa: E402
from forecasting.runs import (  # noqa: E402
    HELD,
    HELD_LEAKS,
    HELD_OUTLIERS,
    LARGE,
    LARGE_SEED,
    LEAKS,
    NOISY,
    OUTLIERS,
    PAIRS,
    SEEDS,
    SHAPES,
    seeded,
)
from forecasting.scarce import EVERY, scarce  # noqa: E402
from scenarios.catalogue import SCENARIOS  # noqa: E402
from synthetic import MIB, Run, rank_of  # noqa: E402

from gpumon import link  # noqa: E402
from gpumon.analysis.findings.capacity import oom_ahead  # noqa: E402
from gpumon.analysis.findings.look import Look  # noqa: E402
from gpumon.analysis.forecast import Forecaster, Room  # noqa: E402
from gpumon.analysis.history import step_peaks  # noqa: E402
from gpumon.analysis.lines import Forecast  # noqa: E402
from gpumon.analysis.rules import OOM_AHEAD  # noqa: E402
from gpumon.cli.whatif import asked_of  # noqa: E402
from gpumon.session.frame import StepRecord  # noqa: E402
from gpumon_agent import wire  # noqa: E402

PAGE = ROOT / "docs" / "forecast-accuracy.md"
RUN, HELD_RUN, WHATIF_RUN = (
    str(ROOT / "benchmarks" / "forecasting" / f"{name}.py") for name in ("run", "held", "changed")
)
SCENARIO_STEPS = 60
SCORES = ("runs", "held", "leaks", "scenarios", "clean")


def runs(result: Result, recordings: Recordings) -> None:
    for name, args in SHAPES.items():
        score(result, name, "shapes", recordings.told(name, None, [RUN, *args]), recordings.older)
    for kind, chosen in (("shape", OUTLIERS), ("leak", LEAKS)):
        for name, args in chosen.items():
            recorded = recordings.beside(name, SMALL, [RUN, *args], governed=kind == "shape")
            score(result, name, kind, recorded, recordings.older)


def held(result: Result, recordings: Recordings) -> None:
    for kind, chosen, memory in (
        ("held", HELD, None), ("held shape", HELD_OUTLIERS, SMALL), ("held leak", HELD_LEAKS, SMALL)
    ):  # fmt: skip
        for name, args in chosen.items():
            score(result, name, kind, recordings.told(name, memory, [HELD_RUN, *args]), recordings.older)


def leaks(result: Result, recordings: Recordings) -> None:
    """Random leaks again: with other seeds, and on a large device."""
    for name in NOISY:
        script = RUN if name in LEAKS else HELD_RUN
        for seed in SEEDS:
            files = recordings.told(f"{name}, seed {seed}", SMALL, [script, *seeded(name, seed, 700, "0.004")])
            score(result, f"{name}, seed {seed}", "leak again", files, recordings.older)
        files = recordings.told(f"{name}, 8 GiB", LARGE, [script, *seeded(name, LARGE_SEED, 8000, "0")])
        score(result, f"{name}, 8 GiB", "long leak", files, recordings.older)


def scarcely(result: Result, recordings: Recordings) -> None:
    """Runs of varying shapes, and those that end out of memory by shape, with fewer steps read whole."""
    files: list[Path] = []
    for script, chosen in ((RUN, OUTLIERS), (HELD_RUN, HELD_OUTLIERS)):
        for name, args in chosen.items():
            files += recordings.beside(name, SMALL, [script, *args], governed=True)
    for script, shapes in ((RUN, SHAPES), (HELD_RUN, HELD)):
        for name, args in shapes.items():
            if "random" in name or "pool" in name or "tail" in name:
                files += recordings.told(name, None, [script, *args])
    for every in EVERY:
        result.scarce.append(scarce(files, every))
        print(result.scarce[-1].row(), flush=True)


def scenarios(result: Result, recordings: Recordings, only: Sequence[str]) -> None:
    for scenario in SCENARIOS:
        if only and scenario.name not in only:
            continue
        memory = f"{scenario.memory_mib}MiB" if scenario.memory_mib else None
        command = [str(scenario.path), *scenario.args, "--steps", str(SCENARIO_STEPS), "--sleep", "0.01"]
        files = recordings.told(scenario.name, memory, command, scenario.ranks)
        score(result, scenario.name, "scenario", files, recordings.older)


def score(result: Result, name: str, kind: str, files: Sequence[Path], older: Path | None) -> None:
    """Several files are those of several ranks. Those from `older` by outlooks made now, not by what was said then."""
    again = bool(files) and files[0].parent == older
    told = heapq.merge(*(link.replay(file) for file in files), key=lambda received: received.unix_ns)
    scores = backtest(told, again=again) if files else []
    if not scores:
        result.failed.append(name)
    else:
        result.scored.append(Scored(name, scores, kind, again))
    print(f"{name:<44}", *(brief(each) for each in scores) if scores else ("no step could be scored",), flush=True)


def whatif(result: Result, recordings: Recordings) -> None:
    """Each pair's first run is asked, its second one answers."""
    for pair in PAIRS:
        found = []
        for args, ranks in zip((pair.before, pair.after), pair.ranks, strict=True):
            files = recordings.told(f"whatif {ranks} {' '.join(args)}", None, [WHATIF_RUN, *args], ranks)
            found.append(asked_of(link.replay(files[0]), (pair.change,)) if files else None)
            found.append(_highest(files[0]) if files else None)
        asked, before, _, needed = found
        if asked is None or not isinstance(before, int) or not isinstance(needed, int):
            result.failed.append(f"what if {pair.change.name()} ({pair.name})")
            continue
        assert isinstance(asked, tuple)
        result.checked.append(Checked(pair, asked[1][0], before, needed))
        print(" | ".join(checked_row(result.checked[-1])), flush=True)


def _highest(file: Path) -> int | None:
    """The highest peak of a recording's settled steps."""
    phases = [r.event for r in link.replay(file) if isinstance(r.event, wire.Phase)]
    return max((p.allocated_peak or 0 for p in phases if p.step >= 2), default=None)


def brief(score: Backtest) -> str:
    return (
        f"outlook {percent(score.outlook.median)} held {percent(score.outlook.coverage)} "
        f"next {percent(score.next.median)} "
        f"ooms {[(e.by_shape, e.steps_ahead) for e in score.ended]} false {score.false_outlooks}+{score.false_findings}"
    )


def clean(result: Result, steps: int) -> None:
    """Long runs that fit, the largest batch with 3 % to spare: every warning is false."""
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
        result.scored.append(Scored(f"clean, {name}", [played(run, steps, room)], "clean"))
        print(f"{'clean, ' + name:<44}", brief(result.scored[-1].scores[0]), flush=True)


def played(run: Run, steps: int, room: int) -> Backtest:
    """As backtest does, without a session between: what it costs for tens of thousands of steps."""
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


def cost(result: Result) -> None:
    for name, text in costs():
        result.costs.append((name, text))
        print(f"{name:<56} {text}", flush=True)


def memory(result: Result, steps: int) -> None:
    for step, blocks, kib in keeping(steps):
        result.memory.append((step, blocks, kib))
        print(f"after {step:>12,} steps {blocks:>10,} blocks {kib / 1024:>8.1f} MiB resident", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = (*SCORES, "scarce", "whatif", "cost", "memory")
    for name in (*names, "scores", "write"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--steps", type=int, default=6000, help="of each clean synthetic run (6000)")
    parser.add_argument("--memory-steps", type=int, default=1_000_000, help="that memory is watched over (10^6)")
    parser.add_argument("--only", nargs="*", default=(), metavar="SCENARIO", help="of the scenarios these")
    parser.add_argument(
        "--older", type=Path, help="recordings by an older state: what is not in --keep, scored by now's"
    )
    parser.add_argument("--kept", action="store_true", help="make no recordings: only those in --keep")
    parser.add_argument("--keep", type=Path, help="where recordings stay, and are taken from")
    args = parser.parse_args()
    chosen = {name for name in names if getattr(args, name)} | (set(SCORES) if args.scores else set())
    if args.write and chosen & set(SCORES) and not chosen.issuperset(SCORES):
        parser.error("--write: the page sums up all --scores")
    result = Result()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        recordings = Recordings(folder, args.older, only_kept=args.kept)
        parts: dict[str, Callable[[], None]] = {
            "runs": lambda: runs(result, recordings),
            "held": lambda: held(result, recordings),
            "leaks": lambda: leaks(result, recordings),
            "scarce": lambda: scarcely(result, recordings),
            "scenarios": lambda: scenarios(result, recordings, args.only),
            "whatif": lambda: whatif(result, recordings),
            "clean": lambda: clean(result, args.steps),
            "cost": lambda: cost(result),
            "memory": lambda: memory(result, args.memory_steps),
        }
        try:
            for name, part in parts.items():
                if not chosen or name in chosen:
                    part()
        finally:
            recordings.close()
    if args.write:
        text = "\n".join(page(result))
        PAGE.write_text(replaced(PAGE.read_text(), text) if chosen else f"{text}\n")


if __name__ == "__main__":
    main()
