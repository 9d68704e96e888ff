"""Explains one out-of-memory from its message and the model: verdict, tensor, moment, remedies."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from gpumon.analysis import units
from gpumon.analysis.diagnosis.cause import LeakEvidence, PredictedPeak, find_cause
from gpumon.analysis.diagnosis.context import FailureContext, Settings, available
from gpumon.analysis.diagnosis.log import Story
from gpumon.analysis.diagnosis.message_parser import OomMessage
from gpumon.analysis.diagnosis.oom_report import Candidate, OomReport
from gpumon.analysis.diagnosis.optimizer_step import RECIPES, WAYS_IN_WORDS, Recipe, recipe_of, step, stepped
from gpumon.analysis.diagnosis.remedies import remedies
from gpumon.analysis.diagnosis.tensor_match import ACTIVATION, explaining, of_batch, same_size
from gpumon.analysis.estimate.model import Tensor, per_row, vocabulary_of
from gpumon.analysis.types import Finding
from gpumon_agent import wire
from gpumon_agent.units import torch_size as shown

DEFAULT_OPTIMIZER = "adamw"
"""Assumed if a model is given without an optimizer; the report says so."""


class Known(msgspec.Struct, frozen=True):
    """Input beside the message."""

    tensors: Sequence[Tensor] = ()
    optimizer: str | None = None  # "adamw", "adamw:fused"
    batch: int | None = None
    sequence: int | None = None
    heads: int | None = None
    later: bool | None = None  # whether the optimizer had stepped before; None: unknown
    settings: Settings = msgspec.field(default_factory=Settings)
    growth: LeakEvidence | None = None
    foreseen: PredictedPeak | None = None
    kept: tuple[Finding, ...] = ()  # findings on memory kept for no use, most bytes first


def explain(story: Story, known: Known | None = None) -> OomReport:
    """Explains a text's last out-of-memory. Raises ValueError for an unknown optimizer."""
    known = known or Known()
    message = story.message
    settings = known.settings
    if message.expandable is not None:
        settings = replace(settings, expandable=message.expandable)
    weighed = find_cause(message, known.growth, known.foreseen)
    recipe, way = recipe_of(known.optimizer or DEFAULT_OPTIMIZER)
    suspects, way = _suspects(message, known, recipe, way, story.phase)
    best = suspects[0] if suspects and suspects[0].explains else None
    phase = story.phase or (best.phase if best is not None else None)
    case = FailureContext(
        message, weighed.verdict, phase, known.tensors,
        recipe if known.optimizer or (best is not None and best.phase == wire.OPTIMIZER) else None, way, settings,
        best.tensor if best is not None and best.what == ACTIVATION else None, known.kept,
    )  # fmt: skip
    return OomReport(
        verdict=weighed.verdict,
        sentence=weighed.sentence,
        message=message.text,
        reasons=weighed.reasons,
        requested=message.requested,
        tensor=message.tensor_sizes,
        missing=weighed.missing,
        device=message.device,
        step=None,
        phase=phase,
        where=story.where,
        code=story.code,
        suspects=tuple(suspects),
        assumptions=tuple(_assumptions(known, best, recipe)),
        notes=tuple(_notes(message, known, best, case, story)),
        remedies=remedies(case),
    )


def _suspects(
    message: OomMessage, known: Known, recipe: Recipe, way: str | None, phase: str | None
) -> tuple[list[Candidate], str | None]:
    if message.kind != "allocator" or message.requested is None:
        return [], way
    tensors = known.tensors
    table = vocabulary_of(tensors)
    found = explaining(message, tensors, recipe, way, phase, known.later)
    if phase not in (wire.OPTIMIZER, wire.LOAD):
        rows = table.shape[0] if table is not None else None
        found = of_batch(message, known.batch, known.sequence, rows, known.heads) + found
    if found:
        best = found[0]
        return [e for e in found if (e.phase, e.way, e.later) == (best.phase, best.way, best.later)], best.way or way
    return same_size(message, tensors), way


def _assumptions(known: Known, best: Candidate | None, recipe: Recipe) -> list[str]:
    """Assumptions behind the match, and the figures under the optimizer's other ways."""
    if best is None or best.phase != wire.OPTIMIZER or best.way is None or best.allocated_before is None:
        return []
    named = recipe.name if known.optimizer else f"{recipe.name} (none was given)"
    said = [f"The optimizer is {named} and {WAYS_IN_WORDS[best.way]}."]
    for way in recipe.ways:
        events = step(known.tensors, recipe, way, later=best.later)
        same = next((e for e in events if e.tensor == best.tensor and e.what == best.what), None)
        if same is not None and shown(same.allocated_before) != shown(best.allocated_before):
            more = "more" if same.allocated_before > best.allocated_before else "less"
            said.append(
                f"One that {WAYS_IN_WORDS[way]}, would request it at {shown(same.allocated_before)}: "
                f"{shown(abs(same.allocated_before - best.allocated_before))} {more}."
            )
    if all(tensor.width == 4 for tensor in known.tensors):
        groups = len(stepped(known.tensors))
        in_groups = "in one group" if groups == 1 else f"in {groups} groups"
        said.append(f"Parameters are in fp32, {in_groups}, in the order given.")
    return said


def _notes(message: OomMessage, known: Known, best: Candidate | None, case: FailureContext, story: Story) -> list[str]:
    said: list[str] = []
    optimizer = case.phase == wire.OPTIMIZER
    if best is not None and best.phase == wire.OPTIMIZER:
        said.append(
            "The batch does not matter: weights, gradients and states do not grow with it, and activations are freed "
            "before the optimizer step. Batch 1 fails at the same place."
        )
    elif optimizer and not known.tensors:
        said.append(
            "Activations are freed before optimizer.step: a smaller batch does not help. With --parameters, --config "
            "or --model gpumon can name the tensor."
        )
    if best is not None and best.phase in (wire.OPTIMIZER, wire.LOAD):
        said += _grows_with(known.tensors, best)
    space = available(message)
    if optimizer and best is not None and case.recipe is not None and space is not None and best.way is not None:
        events = step(known.tensors, RECIPES[case.recipe.name], best.way, later=best.later)
        total = max(e.allocated_before + e.bytes for e in events)
        which = "A later" if best.later else "The first"
        said.append(
            f"{which} step peaks at {shown(total)} allocated; {shown(space)} is all that PyTorch can have here."
        )
    if case.phase is None and message.kind == "allocator":
        said.append(
            "The text has no traceback, so the phase is not known: --log reads it from a traceback; --parameters, "
            "--config or --model can name the tensor from its size."
        )
    if story.times > 1:
        said.append(f"The text has {story.times} such messages; this is the last.")
    if story.progress is not None and story.progress[0] > 1 and case.verdict == "capacity" and not optimizer:
        done = story.progress[0]
        said.append(
            f"It ran {units.count(done)} steps before: this batch is longer than those, or something "
            "grows with every step."
        )
    return said


def _grows_with(tensors: Sequence[Tensor], best: Candidate) -> list[str]:
    table = vocabulary_of(tensors)
    if table is None or table.shape[0] not in best.tensor.shape:
        return []
    rows = table.shape[0]
    row = per_row(tensors, rows)
    total = sum(t.count for t in tensors)
    parts = " + ".join(f"{t.count // rows}" for t in sorted(tensors, key=lambda t: -t.count) if rows in t.shape)
    return [
        f"Each entry of the vocabulary has {row} parameters ({parts}), so its {rows:,} entries are "
        f"{units.percent(row * rows / total)} of the {total:,} parameters. {total - row * rows:,} remain without it."
    ]
