"""The runs that benchmarks/forecast.py scores: those used for tuning, held-out ones, and what-if pairs."""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis.changes import Change

Args = tuple[str, ...]


_ATTENTION = "--model attention"
_PICTURES = "--model convolutions --rows 8"

SHAPES: dict[str, Args] = {
    name: tuple(args.split())
    for name, args in {
        "perceptron, same": "--steps 80",
        "attention, random": f"{_ATTENTION} --sizes random --least 32 --most 320",
        "attention, buckets": f"{_ATTENTION} --sizes bucketed --least 32 --most 320",
        "attention, curriculum": f"{_ATTENTION} --sizes curriculum --least 32 --most 320",
        "attention, 3 micro-batches": f"{_ATTENTION} --sizes random --accumulate 3 --most 200",
        "attention, eval and saves": f"{_ATTENTION} --evaluate 10 --save 15",
        "convolutions, random": f"{_PICTURES} --sizes random --least 24 --most 96",
        "embedding bag, random": "--model bag --sizes random --rows 64",
        "perceptron, 4 micro-batches": "--sizes random --accumulate 4",
        "perceptron, two optimizers": "--alternate",
        "perceptron, unfrozen at 40": "--unfreeze 40",
    }.items()
}
"""Runs of run.py, used for tuning."""

OUTLIERS: dict[str, Args] = {
    f"{name}, one batch too large, seed {seed}": (*args.split(), *f"--sizes outlier --steps 60 --seed {seed}".split())
    for seed in (0, 1)
    for name, args in (
        ("attention", f"{_ATTENTION} --most 96"),
        ("convolutions", f"{_PICTURES} --most 32"),
        ("embedding bag", "--model bag --most 64 --rows 256"),
        ("perceptron", "--most 64 --rows 64"),
    )
}
LEAKS: dict[str, Args] = {
    name: tuple(args.split())
    for name, args in {
        "perceptron, leak 2 MiB": "--leak 2 --steps 400",
        "perceptron, leak 2 ± 2 MiB, random": "--leak 2 --noise 2 --sizes random --steps 400",
        "attention, leak 3 ± 2 MiB, random": f"{_ATTENTION} --leak 3 --noise 2 --sizes random --steps 300",
        "attention, leak 4 ± 1 MiB, buckets": f"{_ATTENTION} --leak 4 --noise 1 --sizes bucketed --steps 300",
        "convolutions, leak 5 ± 3 MiB": f"{_PICTURES} --leak 5 --noise 3 --steps 300",
    }.items()
}
"""On a small device, until OOM."""

HELD: dict[str, Args] = {
    name: tuple(args.split())
    for name, args in {
        "pairs, random": "--model pairs --least 8 --most 96",
        "pairs, sorted by length": "--model pairs --plan sorted --least 8 --most 96",
        "pairs, 2 micro-batches": "--model pairs --least 8 --most 96 --accumulate 2",
        "padded, budget of tokens": "--budget 2048 --least 8 --most 256",
        "padded, shuffled pools": "--plan pooled --least 16 --most 256",
        "padded, heavy tail": "--plan heavy-tail --least 16 --most 400",
        "padded, eval every 7, saves": "--evaluate 7 --save 13",
        "padded, same, eval every 9": "--plan same --evaluate 9",
        "padded, same, average from 60": "--plan same --average 60",
        "padded, same, unfrozen at 50": "--plan same --unfreeze 50",
        "padded, random, unfrozen at 50": "--unfreeze 50",
        "padded, same, histogram every 20": "--plan same --log 20",
        "hourglass, multiscale": "--model hourglass --plan multiscale --least 48 --most 160 --rows 4",
        "hourglass, resolution grows": "--model hourglass --plan resolution --least 48 --most 160 --rows 4",
        "hourglass, random": "--model hourglass --least 48 --most 160 --rows 4",
        "heavy, noisy batch": "--model heavy --plan noisy --least 200 --most 3000",
        "heavy, random batch": "--model heavy --least 200 --most 3000",
        "heavy, same": "--model heavy --plan same --most 64",
        "heavy, 3 micro-batches": "--model heavy --least 100 --most 2000 --accumulate 3",
        "patches, same": "--model patches --plan same --most 64",
        "patches, epoch's last batch smaller": "--model patches --plan last --least 32 --most 64",
        "patches, resolution grows": "--model patches --plan resolution --least 32 --most 96 --sgd",
        "boxes, as many as there are": "--model boxes --plan same --most 96",
    }.items()
}
"""Runs of held.py, held out. The shapes of `boxes` do not determine its memory."""

HELD_OUTLIERS: dict[str, Args] = {
    f"{name}, one batch too large, seed {seed}": (*args.split(), *f"--plan monster --steps 80 --seed {seed}".split())
    for seed in (5, 6, 7)
    for name, args in (
        ("pairs", "--model pairs --least 8 --most 48"),
        ("padded", "--least 8 --most 96"),
        ("hourglass", "--model hourglass --least 32 --most 64 --rows 4"),
        ("patches", "--model patches --least 32 --most 48"),
        ("heavy", "--model heavy --least 100 --most 600"),
    )
}
HELD_LEAKS: dict[str, Args] = {
    name: (*args.split(), "--steps", "700", "--sleep", "0.004", "--seed", "11")
    for name, args in {
        "padded, same, leak 1.5 MiB": "--plan same --leak 1.5",
        "padded, random, leak 3 ± 1 MiB": "--leak 3 --noise 1 --most 96",
        "heavy, noisy batch, leak 3 ± 2 MiB": "--model heavy --plan noisy --least 100 --most 1500 --leak 3 --noise 2",
        "hourglass, multiscale, leak 4 ± 2 MiB": (
            "--model hourglass --plan multiscale --least 48 --most 128 --rows 4 --leak 4 --noise 2"
        ),
        "patches, leak 2 ± 0.5 MiB from 40": (
            "--model patches --plan same --most 64 --leak 2 --noise 0.5 --leak-from 40"
        ),
        "pairs, sorted, leak 3 ± 1 MiB": "--model pairs --plan sorted --least 8 --most 64 --leak 3 --noise 1",
        "pairs, random, leak 6 ± 4 MiB": "--model pairs --least 8 --most 64 --leak 6 --noise 4",
    }.items()
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A run of changed.py, and the same with one change."""

    name: str
    before: Args
    change: Change
    after: Args
    ranks: tuple[int, int] = (1, 1)


def _pairs() -> tuple[Pair, ...]:
    made: list[Pair] = []

    def pair(name: str, before: str, change: Change, after: str, ranks: tuple[int, int] = (1, 1)) -> None:
        made.append(Pair(name, tuple(before.split()), change, (*before.split(), *after.split()), ranks))

    for model in ("blocks", "stages", "wide"):
        base = f"--model {model}"
        for factor in (2.0, 0.5, 4.0):
            pair(model, base, Change(batch=factor), f"--grow {factor}")
        for parts in (2, 4):
            pair(model, base, Change(accumulate=parts), f"--accumulate {parts}")
        pair(model, base, Change(checkpointing=True), "--checkpointing")
        pair(model, base, Change(bf16=True), "--bf16")
        pair(model, base, Change(fused=True), "--fused")
        pair(model, base, Change(batch=2, fused=True), "--grow 2 --fused")
        pair(f"{model}, rows or lengths vary", f"{base} --vary", Change(batch=2), "--grow 2")
    for model, size in (("blocks", "--rows 6 --length 200"), ("stages", "--rows 40"), ("wide", "--rows 1024")):
        base = f"--model {model} {size}"
        named = f"{model}, {size.replace('--', '')}"
        pair(named, base, Change(batch=3), "--grow 3")
        pair(named, base, Change(batch=0.5), "--grow 0.5")
        pair(named, base, Change(accumulate=2), "--accumulate 2")
        pair(named, base, Change(checkpointing=True), "--checkpointing")
        pair(named, base, Change(bf16=True), "--bf16")
        pair(named, base, Change(fused=True), "--fused")
    for factor in (2.0, 0.5, 4.0):
        pair("blocks", "--model blocks", Change(sequence=factor), f"--lengthen {factor}")
    pair("blocks, lengths vary", "--model blocks --vary", Change(sequence=2), "--lengthen 2")
    pair("blocks", "--model blocks", Change(bf16=True, checkpointing=True), "--bf16 --checkpointing")
    pair("stages", "--model stages", Change(bf16=True, batch=2), "--bf16 --grow 2")
    for model in ("blocks", "wide"):
        base = f"--model {model}"
        pair(f"{model}, DDP", f"{base} --ddp", Change(bucket_views=True), "--bucket-views", (2, 2))
        pair(f"{model}, DDP", f"{base} --ddp --bucket-views", Change(zero=1), "--zero 1", (2, 2))
        for stage in (2, 3):
            pair(model, base, Change(zero=stage, ranks=2), f"--zero {stage}", (1, 2))
    return tuple(made)


PAIRS = _pairs()
