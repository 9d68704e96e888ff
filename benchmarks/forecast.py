"""How well forecasts hold: recorded runs and scenarios on the virtual GPU, long clean synthetic runs; what they cost.

    python benchmarks/forecast.py [--runs] [--scenarios] [--clean] [--cost] [--keep FOLDER [--kept]] [--write]

Without a choice: all of them. Recordings are made with `gpumon record` beside the training, one after the other, and
scored by gpumon.analysis.backtest, which plays them message by message. `--write` writes docs/forecast-accuracy.md.
Costs are CPU time of one thread, medians, beside one `time.perf_counter_ns()` call of the same loop.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "_shared")]

from scenarios.catalogue import CONTEXT_MIB, SCENARIOS  # noqa: E402
from synthetic import GIB, MIB, Run, rank_of  # noqa: E402

from gpumon import link  # noqa: E402
from gpumon import virtual_gpu as vgpu  # noqa: E402
from gpumon.analysis.backtest import Accuracy, Backtest, backtest  # noqa: E402
from gpumon.analysis.findings.capacity import oom_ahead  # noqa: E402
from gpumon.analysis.findings.look import Look  # noqa: E402
from gpumon.analysis.forecast import Forecaster, Room  # noqa: E402
from gpumon.analysis.foreseen import Foreseen  # noqa: E402
from gpumon.analysis.history import step_peaks  # noqa: E402
from gpumon.analysis.lines import Forecast  # noqa: E402
from gpumon.analysis.rules import OOM_AHEAD  # noqa: E402
from gpumon.session.frame import StepRecord  # noqa: E402
from gpumon_agent import wire  # noqa: E402
from gpumon_agent.forecast.outlook import Outlooks  # noqa: E402

ONLY_KEPT = "--kept" in sys.argv
PAGE = ROOT / "docs" / "forecast-accuracy.md"
RUN = ROOT / "benchmarks" / "forecast_run.py"
ATTENTION = ("--model", "attention")
PICTURES = ("--model", "convolutions", "--rows", "8")

SHAPES: dict[str, tuple[str, ...]] = {
    "perceptron, same": ("--steps", "80"),
    "attention, random": (*ATTENTION, "--sizes", "random", "--least", "32", "--most", "320"),
    "attention, buckets": (*ATTENTION, "--sizes", "bucketed", "--least", "32", "--most", "320"),
    "attention, curriculum": (*ATTENTION, "--sizes", "curriculum", "--least", "32", "--most", "320"),
    "attention, 3 micro-batches": (*ATTENTION, "--sizes", "random", "--accumulate", "3", "--most", "200"),
    "attention, eval and saves": (*ATTENTION, "--evaluate", "10", "--save", "15"),
    "convolutions, random": (*PICTURES, "--sizes", "random", "--least", "24", "--most", "96"),
    "embedding bag, random": ("--model", "bag", "--sizes", "random", "--rows", "64"),
    "perceptron, 4 micro-batches": ("--sizes", "random", "--accumulate", "4"),
    "perceptron, two optimizers": ("--alternate",),
    "perceptron, unfrozen at 40": ("--unfreeze", "40"),
}
OUTLIERS: dict[str, tuple[str, ...]] = {
    f"{name}, one batch too large, seed {seed}": (*args, "--sizes", "outlier", "--steps", "60", "--seed", str(seed))
    for seed in (0, 1)
    for name, args in (
        ("attention", (*ATTENTION, "--most", "96")),
        ("convolutions", (*PICTURES, "--most", "32")),
        ("embedding bag", ("--model", "bag", "--most", "64", "--rows", "256")),
        ("perceptron", ("--most", "64", "--rows", "64")),
    )
}
LEAKS: dict[str, tuple[str, ...]] = {
    "perceptron, leak 2 MiB": ("--leak", "2", "--steps", "400"),
    "perceptron, leak 2 ± 2 MiB, random": ("--leak", "2", "--noise", "2", "--sizes", "random", "--steps", "400"),
    "attention, leak 3 ± 2 MiB, random": (
        *ATTENTION,
        "--leak",
        "3",
        "--noise",
        "2",
        "--sizes",
        "random",
        "--steps",
        "300",
    ),
    "attention, leak 4 ± 1 MiB, buckets": (
        *ATTENTION,
        "--leak",
        "4",
        "--noise",
        "1",
        "--sizes",
        "bucketed",
        "--steps",
        "300",
    ),
    "convolutions, leak 5 ± 3 MiB": (*PICTURES, "--leak", "5", "--noise", "3", "--steps", "300"),
}


@dataclass
class Scored:
    name: str
    scores: list[Backtest]
    kind: str


@dataclass
class Result:
    scored: list[Scored] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    costs: list[tuple[str, str]] = field(default_factory=list)


def record(name: str, memory: str | None, command: Sequence[str], folder: Path) -> Path | None:
    """The recording of one run, its training begun with the agent; None where there is none."""
    file = folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.gpumon"
    if file.exists() or ONLY_KEPT:
        return file if file.exists() else None
    environment = vgpu.environment(devices=1, profile="a100-40", memory=memory, context=f"{CONTEXT_MIB}MiB")
    job = f"forecast-{os.getpid()}-{len(list(folder.iterdir()))}"
    environment |= {"GPUMON_NAME": job, "GPUMON_OOM_DIR": "off"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    try:
        training = subprocess.Popen(
            [sys.executable, "-m", "gpumon", "run", *command], env=environment, cwd=ROOT, **quiet
        )
        end = time.monotonic() + 240
        while training.poll() is None and time.monotonic() < end:
            done = subprocess.run(
                [sys.executable, "-m", "gpumon", "record", "--force", str(file), job],
                env=environment, cwd=ROOT, timeout=240, check=False, **quiet,
            )  # fmt: skip
            if not done.returncode:
                break
        training.wait(60)
    except subprocess.TimeoutExpired:
        return None
    finally:
        training.kill()
        vgpu.remove_session(environment["VGPU_SESSION"])
    return file if file.exists() else None


def runs(result: Result, folder: Path) -> None:
    for kind, chosen, memory in (("shapes", SHAPES, None), ("shape", OUTLIERS, "1024MiB"), ("leak", LEAKS, "1024MiB")):
        for name, args in chosen.items():
            score(result, name, kind, record(name, memory, [str(RUN), *args], folder))


def scenarios(result: Result, folder: Path, only: Sequence[str]) -> None:
    for scenario in SCENARIOS:
        if scenario.ranks > 1 or scenario.virtual_only or (only and scenario.name not in only):
            continue
        memory = f"{scenario.memory_mib}MiB" if scenario.memory_mib else None
        command = [str(scenario.path), *scenario.args, "--sleep", "0.05"]
        score(result, scenario.name, "scenario", record(scenario.name, memory, command, folder))


def score(result: Result, name: str, kind: str, file: Path | None) -> None:
    scores = backtest(link.replay(file)) if file is not None else []
    if not scores:
        result.failed.append(name)
    else:
        result.scored.append(Scored(name, scores, kind))
    print(f"{name:<44}", *(brief(each) for each in scores) if scores else ("no step could be scored",), flush=True)


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
    score, forecaster, foreseen, rank = Backtest("", None, 0), Forecaster(), Foreseen(), rank_of(run, 1)
    said: Forecast | None = None
    last = largest = held = 0
    for step in range(steps):
        events = run.step_events(step)
        closed = next(event for event in events if isinstance(event, wire.Step))
        phases = tuple(event for event in events if isinstance(event, wire.Phase))
        record = StepRecord(step, closed, phases)
        figures = step_peaks(record, 0)
        outlook = foreseen.outlook(record, 0, room)
        foreseen.observe(record, 0)
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
        forecaster.observe(figures)
        said = forecaster.forecast(Room(room, foreseen.fragments.bytes))
        found = oom_ahead(Look(rank, 0, record, figures, said, None, None, room))
        held = held + 1 if found is not None else 0
        score.false_findings += held == OOM_AHEAD.opens_after
    return score


def cost(result: Result) -> None:
    def phases(step: int, excess: float) -> list[wire.Phase]:
        ends = (("between", 0.0), ("forward", excess), ("backward", 1.2 * excess), ("optimizer", 100.0 * MIB))
        return [
            wire.Phase(step, name, 0, 0, 0, 1, 300 * MIB, 300 * MIB + round(peak), GIB, GIB, 0, 0, 0, 9, 0, 0)
            for name, peak in ends
        ]

    def measured(work: Callable[[], object]) -> float:
        began = time.thread_time_ns()
        work()
        return (time.thread_time_ns() - began) / 1e3

    for kind in ("same shapes", "random shapes"):
        spent = spend(kind, phases, measured)
        for name, each in spent.items():
            ordered = sorted(each[200:])
            text = f"{ordered[len(ordered) // 2]:.1f} µs median, {sum(ordered) / len(ordered):.1f} µs mean"
            result.costs.append((f"{name}, {kind}", text))
            print(f"{name + ', ' + kind:<44} {text}", flush=True)


def spend(
    kind: str, phases: Callable[[int, float], list[wire.Phase]], measured: Callable[[Callable[[], object]], float]
) -> dict[str, list[float]]:
    """Microseconds of each step, by what took them."""
    rng, outlooks, forecaster, foreseen = (
        random.Random(1),
        Outlooks(lambda e: None, {0: 8 * GIB}),
        Forecaster(),
        Foreseen(),
    )
    names = ("agent, a batch", "agent, learning (its thread)", "viewer", "nothing")
    spent: dict[str, list[float]] = {name: [] for name in names}

    def said(step: int, shape: tuple[int, int]) -> None:
        outlooks.batch(step, 0, [shape], 1, [(0, 300 * MIB, 0)])

    def learnt(events: Sequence[wire.NumberedEvent]) -> None:
        for event in events:
            outlooks.follow(event)

    def viewed(record: StepRecord) -> None:
        figures = step_peaks(record, 0)
        if figures is not None:
            forecaster.observe(figures)
        forecaster.forecast(Room(8 * GIB))
        foreseen.observe(record, 0)

    for step in range(4000):
        length = 512 if kind == "same shapes" else rng.randint(32, 900)
        told = phases(step, 2e4 * 8 * length + 900.0 * 8 * length**2)
        closed = wire.Step(step, 0, 1, 64 * length, ((8, length),), False, 4)
        works = (
            partial(said, step, (8, length)), partial(learnt, (*told, closed)),
            partial(viewed, StepRecord(step, closed, tuple(told))), int,
        )  # fmt: skip
        for name, work in zip(names, works, strict=True):
            spent[name].append(measured(work))
    return spent


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def page(result: Result) -> Iterator[str]:
    every = [(each, score) for each in result.scored for score in each.scores]
    yield """# How well forecasts hold

Written by `python benchmarks/forecast.py --write`; [forecast.md](forecast.md) says how forecasts are made. Recorded
on the virtual GPU, whose allocator is PyTorch's own, with `gpumon record` beside each run, and played back message by
message. *Outlook* is what was said as a batch entered forward, its shapes known; *next* what was said a step before,
its batch not known; errors are shares of the peak that then was, from step 3 on (same shapes) or 20 (shapes that
vary); *held* is how often the 95 % interval did.
"""
    for title, kinds in (
        ("Shapes", ("shapes",)), ("Out of memory by shape", ("shape",)), ("Out of memory by a leak", ("leak",)),
        ("Scenarios", ("scenario",)), ("Clean runs, synthetic, the largest batch with 3 % to spare", ("clean",)),
    ):  # fmt: skip
        rows = [(each, score) for each, score in every if each.kind in kinds]
        if not rows:
            continue
        yield f"## {title}\n"
        yield "| run | steps | outlook, median | 95th | held | next, median | held | last peak | largest | ended |"
        yield "|---|---|---|---|---|---|---|---|---|---|"
        for each, score in rows:
            cells = (
                each.name, f"{score.steps:,}", percent(score.outlook.median), percent(score.outlook.ninety_fifth),
                percent(score.outlook.coverage), percent(score.next.median), percent(score.next.coverage),
                percent(score.naive["last peak"].median), percent(score.naive["largest so far"].median), ended(score),
            )  # fmt: skip
            yield f"| {' | '.join(cells)} |"
        yield ""
    yield "## Together\n"
    yield from summary(every)
    if result.failed:
        yield f"\nNot scored (too short, no peaks, or not recorded this time): {', '.join(result.failed)}."
    if result.costs:
        yield "\n## Cost\n\nCPU time of one thread; `nothing` is what measuring itself shows."
        yield f"Load average of the last minute: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.\n"
        yield "| what | |\n|---|---|"
        yield from (f"| {name} | {text} |" for name, text in result.costs)


def beaten(score: Backtest) -> bool:
    ours = score.outlook.median
    return ours is not None and any(n.median is not None and n.median < ours - 1e-5 for n in score.naive.values())


def ended(score: Backtest) -> str:
    parts = []
    for each in score.ended[:1]:
        said = "outlook did not say so" if each.by_shape is None else f"outlook {each.by_shape / 1e6:.2f} ms before"
        found = "" if each.steps_ahead is None else f", finding {each.steps_ahead} steps before"
        parts.append(f"step {each.step}: {said}{found}")
    error = score.steps_to_oom_error()
    if error is not None:
        parts.append(f"steps to OOM {percent(error)} off")
    return "; ".join(parts)


def summary(every: list[tuple[Scored, Backtest]]) -> Iterator[str]:
    same, varying = Accuracy(), Accuracy()
    real = [(each, score) for each, score in every if each.kind != "clean"]
    for _, score in real:
        (varying if score.varying else same).merge(score.outlook)
    for name, each in (("same shapes", same), ("shapes that vary", varying)):
        yield (
            f"- {name}: outlooks of {len(each.errors):,} steps, {percent(each.median)} off in the median, "
            f"{percent(each.ninety_fifth)} in the 95th percentile, intervals held {percent(each.coverage)};"
        )
    worse = [each.name for each, score in real if beaten(score)]
    beaten_in = f"{len(worse)} of {len(real)} runs: {', '.join(worse) or 'none'}"
    yield f"- a naive forecaster was better in the median in {beaten_in};"
    shape = [e for each, score in every if each.kind == "shape" for e in score.ended[:1]]
    said = [e for e in shape if e.by_shape is not None or (e.steps_ahead is not None and e.steps_ahead >= 0)]
    yield f"- out of memory by shape: {len(said)} of {len(shape)} were said before the allocator's observer was called;"
    leak = [e for each, score in every if each.kind == "leak" for e in score.ended[:1]]
    ahead = [e for e in leak if e.steps_ahead is not None and e.steps_ahead >= 20]
    yield f"- by a leak: {len(ahead)} of {len(leak)} at least 20 steps ahead;"
    steps = sum(score.clean_steps for each, score in every if each.kind == "clean")
    outlooks = sum(score.false_outlooks for each, score in every if each.kind == "clean")
    findings = sum(score.false_findings for each, score in every if each.kind == "clean")
    yield f"- false alarms in {steps:,} clean synthetic steps: {outlooks} outlooks, {findings} findings;"
    slope = [(score.slope_alarms, score.slope_readings) for _, score in real]
    alarms, readings = sum(a for a, _ in slope), sum(n for _, n in slope)
    yield f"- a line through the device's total, alarm at 1 MB/s: {alarms} alarms in {readings} readings."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("runs", "scenarios", "clean", "cost", "write"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--steps", type=int, default=6000, help="of each clean synthetic run (6000)")
    parser.add_argument("--only", nargs="*", default=(), metavar="SCENARIO", help="of the scenarios these")
    parser.add_argument("--kept", action="store_true", help="make no recordings: only those in --keep")
    parser.add_argument("--keep", type=Path, help="where recordings stay, and are taken from")
    args = parser.parse_args()
    everything = not (args.runs or args.scenarios or args.clean or args.cost)
    result = Result()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if args.runs or everything:
            runs(result, folder)
        if args.scenarios or everything:
            scenarios(result, folder, args.only)
    if args.clean or everything:
        clean(result, args.steps)
    if args.cost or everything:
        cost(result)
    if args.write:
        PAGE.write_text("\n".join(page(result)) + "\n")


if __name__ == "__main__":
    main()
