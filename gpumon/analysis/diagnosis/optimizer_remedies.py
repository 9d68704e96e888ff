"""Remedies for the optimizer step, each with the recomputed peak of the first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpumon.analysis.diagnosis.context import FailureContext, available
from gpumon.analysis.diagnosis.oom_report import Remedy
from gpumon.analysis.diagnosis.optimizer_step import FOREACH, FUSED, LOOP, REACH, RECIPES, Recipe, peak
from gpumon.analysis.estimate.model import Tensor, per_row, vocabulary_of


def stepping(case: FailureContext) -> Iterator[Remedy]:
    """Remedies for the optimizer step. Without a model they have no figures."""
    tensors, recipe, way = case.tensors, case.recipe, case.way or LOOP
    if recipe is None or not tensors:
        if not case.settings.fused:
            yield Remedy("fused", "fused=True: an optimizer step without temporaries (AdamW, Adam, SGD, Adagrad)")
            yield Remedy("foreach", "foreach=False: temporaries of one parameter at a time instead of all")
        yield Remedy("8-bit", "an 8-bit optimizer (bitsandbytes): 2 bytes of state a parameter instead of 8")
        return
    now = peak(tensors, recipe, way)
    space = available(case.message)

    def walked(code: str, text: str, least: int) -> Iterator[Remedy]:
        if least < now:
            yield Remedy(code, text, now - least, None if space is None else least <= space)

    if FUSED in recipe.ways and way != FUSED and not case.settings.fused:
        yield from walked(
            "fused", f"{TORCH[recipe.name]}(..., fused=True): no temporaries", peak(tensors, recipe, FUSED)
        )
    if way == FOREACH:
        text = "foreach=False: the temporaries of one parameter at a time"
        yield from walked("foreach", text, peak(tensors, recipe, LOOP))
    if recipe.name in ("adam", "adamw"):
        text = "an 8-bit optimizer (bitsandbytes' AdamW8bit): its state takes 2 bytes a parameter instead of 8"
        yield from walked("8-bit", text, peak(tensors, RECIPES["adamw8bit"], REACH))
    yield from _vocabulary(case, now, space, recipe, way)
    halves = [replace(tensor, width=2) for tensor in tensors]
    if all(tensor.width == 4 for tensor in tensors):
        text = "weights, gradients and state in bfloat16 (model.bfloat16()), if training tolerates it; not autocast"
        yield from walked("bf16", text, peak(halves, recipe, way))


TORCH = {"adam": "torch.optim.Adam", "adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD",
          "momentum": "torch.optim.SGD", "adagrad": "torch.optim.Adagrad"}  # fmt: skip


def _vocabulary(case: FailureContext, now: int, space: int | None, recipe: Recipe, way: str) -> Iterator[Remedy]:
    """Fewer rows for the largest table (by bisection), or the table on the CPU."""
    tensors = case.tensors
    table = vocabulary_of(tensors)
    if table is None or 2 * table.count < sum(t.count for t in tensors):
        return
    rows = table.shape[0]
    if space is not None:
        fits = _most_rows(tensors, rows, space, recipe, way)
        if 0 < fits < rows:
            saved = now - peak(with_rows(tensors, rows, fits), recipe, way)
            text = (
                f"a vocabulary of at most {fits:,} rows instead of {rows:,} ({rows - fits:,} fewer, at "
                f"{per_row(tensors, rows)} parameters a row): bin numbers, hash or split rare values"
            )
            yield Remedy("vocabulary", text, saved, True)
    text = f"{_short(table.name)} on the CPU (its weights, gradient and states too)"
    rest = peak([t for t in tensors if t is not table], recipe, way)
    yield Remedy("embedding-on-cpu", text, now - rest, None if space is None else rest <= space)


def with_rows(tensors: Sequence[Tensor], rows: int, instead: int) -> list[Tensor]:
    return [replace(t, shape=tuple(instead if size == rows else size for size in t.shape)) for t in tensors]


def _most_rows(tensors: Sequence[Tensor], rows: int, space: int, recipe: Recipe, way: str) -> int:
    low, high = 0, rows
    while low < high:
        middle = (low + high + 1) // 2
        if peak(with_rows(tensors, rows, middle), recipe, way) <= space:
            low = middle
        else:
            high = middle - 1
    return low


def _short(name: str) -> str:
    parts = name.removesuffix(".weight").split(".")
    return ".".join(parts[-1:])
