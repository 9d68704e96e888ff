"""What a watched run would need with another batch, length, precision or optimizer: from its own measurements.

Model. The step with the highest peak is split into measured parts: S, allocated when forward begins (weights, buffers,
optimizer state, buckets, inputs, and whatever else is held); f, added by forward; d, added by backward on top; the
optimizer's gradients, temporaries and rest. A change scales or removes parts, and the new peak is the largest of

    forward = S + f        backward = S + f + d        optimizer = S + gradients + temporaries + rest

Batch and sequence scale f and d with the shape model if the run's batches differed; otherwise f scales in proportion (a
length up to its square; up to `FIXED_SHARE` of f may stay fixed). The part of d that does not scale is at most the
parameter gradients plus one extra copy of the largest. Checkpointing saves the repeated blocks' activations and
recomputes one block at a time. Each figure is a span: low, expected, high. Figures that were neither measured nor
derivable are reported as unknown.
Source. The phases of a step as in gpumon.analysis.estimate.closed_form; ZeRO: Rajbhandari et al. 2020.
Cost. O(1) per change; checkpointing walks the model's modules.

Known limitations. Spans of bf16 and checkpointing are wide: the figures do not show which operators autocast changes,
or a block's input. Combined changes are treated as independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

import msgspec
from msgspec.structs import replace

from gpumon.analysis.changes import (
    BUCKET_VIEWS,
    FUSED,
    USUAL,
    BytesByOwner,
    Change,
    ChangeResult,
    Span,
    exactly,
    saves,
    sharded,
)  # fmt: skip
from gpumon.analysis.findings.model import FUSED_STEP
from gpumon.analysis.forecast.forecaster import NEW_BATCHES, shared_out
from gpumon.analysis.history import StepPeaks, step_peaks
from gpumon.analysis.layers import LayerNode, trees
from gpumon.analysis.reports import DeviceReport
from gpumon.analysis.types import KEPT, Forecast
from gpumon.session.frame import RankFrame, StepRecord
from gpumon_agent import wire
from gpumon_agent.shape_model.model import ShapeModel
from gpumon_agent.shape_model.shape_regression import Features, features

STEPS = 256
SETTLED = 2  # the first step has no optimizer state, the second new buckets
FIXED_SHARE = 0.2
"""Share of forward's increase that may not depend on the batch: workspaces, rounding of blocks."""


class Untold(Exception):
    """The reason why a change cannot be answered."""


class Parts(msgspec.Struct, frozen=True):
    start: float
    weights: float
    state: float
    gradients: float
    buckets: float
    inputs: float
    temporaries: float
    rest: float  # of the optimizer's peak
    forward: Span
    more: Span  # added by backward on top
    measured: float  # forward, before any change
    gathered: float = 0.0  # weights that may be freed before the optimizer steps
    notes: tuple[str, ...] = ()


def answer(
    rank: RankFrame, report: DeviceReport, shape_model: ShapeModel, changes: Sequence[Change] = USUAL
) -> list[ChangeResult]:
    """One answer per change, from the highest of the newest `STEPS` steps."""
    figures = _highest(rank, report.device)
    if figures is None:
        return [ChangeResult(change, why_not="no step was read yet") for change in changes]
    return [_answer(rank, report, shape_model, figures, change) for change in changes]


def _highest(rank: RankFrame, device: int) -> StepPeaks | None:
    """Of the newest steps, the one with the highest peak: it decides if batches differ."""
    found: StepPeaks | None = None
    for most, record in sorted(_bounds(rank, device), key=itemgetter(0), reverse=True):
        if found is not None and most <= found.peak and found.step >= SETTLED:
            break
        figures = step_peaks(record, device)
        if figures is not None and (found is None or _decides(figures) > _decides(found)):
            found = figures
    return found


def _bounds(rank: RankFrame, device: int) -> Iterator[tuple[int, StepRecord]]:
    """The newest steps, each with a bound of its peak. Their figures take four times as long."""
    for record in rank.steps[-STEPS:]:
        yield max([phase.allocated_peak or 0 for phase in record.on(device)], default=0), record


def _decides(figures: StepPeaks) -> tuple[bool, int]:
    return figures.step >= SETTLED, figures.peak


def _answer(
    rank: RankFrame, report: DeviceReport, shape_model: ShapeModel, figures: StepPeaks, change: Change
) -> ChangeResult:
    try:
        parts = _taken_apart(report, figures)
        parts = _other_batch(rank, report, shape_model, figures, parts, change)
        for apply in (_checkpointed, _bf16, _fused, _bucket_views, _zero, _accumulated):
            parts = apply(rank, report, parts, change)
    except Untold as why:
        return ChangeResult(change, why_not=str(why))
    optimizer = parts.start + parts.gradients + parts.temporaries + parts.rest
    phases = {
        wire.FORWARD: parts.forward + parts.start,
        wire.BACKWARD: parts.forward + parts.more + parts.start,
        wire.OPTIMIZER: Span(optimizer - parts.gathered, optimizer, optimizer),
    }
    phase = max(phases, key=lambda name: phases[name].expected)
    peak = Span(
        max(span.low for span in phases.values()),
        phases[phase].expected,
        max(span.high for span in phases.values()),
    )
    forecast = report.forecast
    if forecast is None or forecast.headroom is None:
        return ChangeResult(change, peak, phase, notes=parts.notes)
    usable = forecast.headroom + forecast.next_peak
    headroom = round(usable - peak.expected)
    fits = True if peak.high <= usable else False if peak.low > usable else None
    return ChangeResult(change, peak, phase, None, headroom, fits, parts.notes, _full_in(forecast, headroom))


def _full_in(forecast: Forecast, headroom: int) -> int | None:
    """Steps until the leak fills this headroom: the current time to full, shifted by the change's headroom."""
    if forecast.growth != KEPT or not forecast.bytes_per_step or forecast.steps_to_oom is None:
        return None
    more = headroom - (forecast.headroom or 0)
    return max(0, forecast.steps_to_oom + round(more / forecast.bytes_per_step))


def _taken_apart(report: DeviceReport, figures: StepPeaks) -> Parts:
    peaks = {phase.phase: phase.peak for phase in figures.phases}
    if wire.FORWARD not in peaks:
        raise Untold("no forward was seen")
    lines = report.read.lines if report.read is not None else report.ledger
    estimate = report.estimate.lines if report.estimate is not None else None

    def line(name: str) -> float:
        for source in (lines, estimate):
            value = getattr(source, name) if source is not None else None
            if value is not None:
                return float(value)
        return 0.0

    start = float(figures.start)
    forward = peaks[wire.FORWARD] - start
    backward = peaks.get(wire.BACKWARD, peaks[wire.FORWARD]) - start
    optimizer = peaks.get(wire.OPTIMIZER, figures.end)
    temporaries = max(0.0, float(optimizer - figures.end))
    gradients = line("gradients")
    return Parts(
        start=start,
        weights=line("weights"),
        state=line("optimizer"),
        gradients=gradients,
        buckets=line("buckets"),
        inputs=float(figures.input_bytes or 0),
        temporaries=temporaries,
        rest=optimizer - start - gradients - temporaries,
        forward=exactly(forward),
        more=exactly(backward - forward),
        measured=forward,
    )


def _other_batch(
    rank: RankFrame, report: DeviceReport, shape_model: ShapeModel, figures: StepPeaks, parts: Parts, change: Change
) -> Parts:
    """Scales by batch, sequence, and a micro-batch's share of the batch."""
    factor, length = change.batch / change.accumulate, change.sequence
    if factor == 1 and length == 1:
        return parts
    shapes = figures.input_shapes
    if not shapes:
        raise Untold("the shapes of its batches are not known")
    if length != 1 and not _has_length(rank, shapes):
        raise Untold("no dimension of its inputs is known to be a length")
    record = next(r for r in reversed(rank.steps) if r.step == figures.step)
    groups = shared_out(shapes, record.on(report.device))
    first = groups[0] if groups else shapes
    then = features([_scaled(shape, factor, length) for shape in first])
    notes = parts.notes
    grown = factor * length - 1
    start = parts.start + parts.inputs * grown
    learnt = shape_model.needs((False, tuple(map(len, first))), then) if then is not None else None
    if learnt is not None and then is not None and learnt[2].batches >= NEW_BATCHES:
        f, backward, forward = learnt
        d = parts.more.expected if backward is None else backward - f
        share = _doubt(then[0], forward.largest())
        notes = (*notes, f"from {forward.batches} different batches of this run")
        return replace(
            parts, start=start, inputs=parts.inputs * (1 + grown), notes=notes,
            forward=Span(f * (1 - share), f, f * (1 + share)), more=Span(d - abs(d) * share, d, d + abs(d) * share),
        )  # fmt: skip
    f, d = parts.forward.expected, parts.more.expected
    scale = factor * length
    highest = factor * length * length if length > 1 else scale
    fixed = scale + FIXED_SHARE * (1 - scale)
    notes = (*notes, "all batches were alike: activations scale with the batch, gradients of parameters stay")
    still = min(max(d, 0.0), parts.gradients + _largest(rank))  # the last gradient is created before it is added
    low, high = sorted((still + (d - still) * scale, d * scale))
    return replace(
        parts,
        start=start,
        inputs=parts.inputs * (1 + grown),
        notes=notes,
        forward=Span(f * min(scale, highest, fixed), f * scale, f * max(scale, highest, fixed)),
        more=Span(low, (low + high) / 2, high),
    )


def _largest(rank: RankFrame) -> float:
    """Gradient bytes of the module with the most."""
    return float(max((m.trainable_bytes for record in rank.models for m in record.modules), default=0))


def _has_length(rank: RankFrame, shapes: Sequence[Sequence[int]]) -> bool:
    """Whether dimension 1 is a length: the model has embeddings, or it differs between steps (features do not)."""
    if not any(len(shape) in (2, 3) for shape in shapes):
        return False
    if any("Embedding" in module.kind for record in rank.models for module in record.modules):
        return True
    seen = {
        record.closed.input_shapes[0][1]
        for record in rank.steps[-STEPS:]
        if record.closed is not None and record.closed.input_shapes and len(record.closed.input_shapes[0]) > 1
    }
    return len(seen) > 1


def _doubt(size: int, largest: Features | None) -> float:
    """Half-width of the span as a share: 1 % within the sizes seen, more beyond."""
    if largest is None or size <= largest[0]:
        return 0.01
    return min(0.5, 0.01 + 0.1 * (1 - largest[0] / size))


def _scaled(shape: Sequence[int], factor: float, length: float) -> tuple[int, ...]:
    if not shape:
        return ()
    out = [max(1, round(shape[0] * factor)), *shape[1:]]
    if length != 1 and len(shape) in (2, 3):
        out[1] = max(1, round(out[1] * length))
    return tuple(out)


def _accumulated(rank: RankFrame, report: DeviceReport, parts: Parts, change: Change) -> Parts:
    if change.accumulate <= 1:
        return parts
    grads = parts.gradients
    largest = _largest(rank)
    d = parts.more
    # later micro-batches find gradients allocated: their backward adds only one at a time
    expected = max(0.0, d.expected - grads) + grads + largest
    more = Span(max(0.0, d.low - grads) + grads, expected, max(expected, max(d.high, 0.0) + grads))
    note = "in later micro-batches the gradients of earlier ones are allocated"
    return replace(parts, more=more, notes=(*parts.notes, note))


def _checkpointed(rank: RankFrame, report: DeviceReport, parts: Parts, change: Change) -> Parts:
    if not change.checkpointing:
        return parts
    found = [tree for tree in trees(rank) if tree.device == report.device]
    blocks = max((_blocks(tree.root) for tree in found), key=lambda b: sum(b), default=[])
    saved = sum(blocks)
    if len(blocks) < 2 or not saved:
        raise Untold("activations by layer were not read, or no repeated blocks keep any")
    scale = parts.forward.expected / max(1.0, parts.measured)
    kept = max(blocks) * scale
    gone = (saved - max(blocks)) * scale
    f = parts.forward
    forward = Span(max(0.0, f.low - saved * scale), max(kept, f.expected - 0.9 * gone), max(kept, f.high - 0.6 * gone))
    note = f"{len(blocks)} blocks: one at a time is recomputed; each keeps its input"
    return replace(parts, forward=forward, notes=(*parts.notes, note))


def _blocks(layer: LayerNode) -> list[int]:
    """Activations of the like siblings that keep the most in the tree."""
    kinds: dict[str | None, list[int]] = {}
    for child in layer.children:
        if child.children:
            kinds.setdefault(child.kind or str(len(child.children)), []).append(child.whole.activations or 0)
    here = max((each for each in kinds.values() if len(each) > 1), key=sum, default=[])
    return max([here, *(_blocks(child) for child in layer.children)], key=sum)


def _bf16(rank: RankFrame, report: DeviceReport, parts: Parts, change: Change) -> Parts:
    if not change.bf16:
        return parts
    model = next((r.model for r in rank.models if not r.model.devices or report.device in r.model.devices), None)
    if model is None or not model.parameters:
        raise Untold("its model was not described")
    whole = model.parallel.whole_bytes if model.parallel is not None else None
    if (whole or model.parameter_bytes) < 3 * model.parameters:
        raise Untold("its parameters are not fp32 already")
    f, copies = parts.forward, parts.weights / 2
    forward = Span(f.low / 2, 0.55 * f.expected + copies, f.high + copies)
    note = (
        "activations of matrix products halve, norms and losses stay fp32; autocast keeps half-size copies of weights"
    )
    d = parts.more  # gradients of activations halve too, those of parameters do not
    more = Span(d.low - max(0.0, d.low) / 2, d.expected, d.high)
    return replace(parts, forward=forward, more=more, notes=(*parts.notes, note))


def _fused(rank: RankFrame, report: DeviceReport, parts: Parts, change: Change) -> Parts:
    if not change.fused:
        return parts
    optimizers = [o for record in rank.models for o in record.model.optimizers]
    if not optimizers:
        raise Untold("its optimizer was not described")
    if all(o.fused for o in optimizers):
        raise Untold("its optimizer is fused already")
    missing = sorted({o.kind for o in optimizers} - FUSED_STEP)
    if missing:
        raise Untold(f"{', '.join(missing)} has no fused step")
    return replace(parts, temporaries=parts.temporaries - saves(FUSED, _held(parts)))


def _bucket_views(rank: RankFrame, report: DeviceReport, parts: Parts, change: Change) -> Parts:
    if not change.bucket_views:
        return parts
    parallel = next((r.model.parallel for r in rank.models if r.model.parallel is not None), None)
    if parallel is None or parallel.kind != "ddp":
        raise Untold("it does not run under DistributedDataParallel")
    if parallel.gradient_as_bucket_view:
        raise Untold("its gradients are views of the buckets already")
    gone = saves(BUCKET_VIEWS, _held(parts))
    return replace(parts, gradients=parts.gradients - gone, more=parts.more + Span(-gone, -gone, 0.0))


def _held(parts: Parts) -> BytesByOwner:
    return BytesByOwner(parts.weights, parts.gradients, parts.state, parts.temporaries)


def _zero(rank: RankFrame, report: DeviceReport, parts: Parts, change: Change) -> Parts:
    if not change.zero:
        return parts
    ranks = change.ranks or rank.hello.world_size or 1
    if ranks < 2:
        raise Untold("it runs on one rank: give a number with --ranks")
    if any(r.model.parallel is not None and r.model.parallel.kind.startswith("fsdp") for r in rank.models):
        raise Untold("it is sharded already")
    gone = sharded(_held(parts), change.zero, ranks)
    start, gradients, more = parts.start - gone.state, parts.gradients - gone.gradients, parts.more
    temporaries = parts.temporaries - gone.temporaries
    notes = parts.notes
    if change.zero >= 2:
        more = more + Span(-gone.gradients, -gone.gradients / 2, 0.0)
        notes = (*notes, "gradients are reduced bucket by bucket, so some are allocated at backward's peak")
    forward = parts.forward
    unit = float(max((m.parameter_bytes for record in rank.models for m in record.modules), default=0))
    if change.zero == 2:  # some implementations keep their shard beside the full weights
        forward = forward + Span(0.0, 0.0, parts.weights / ranks + unit)
        parts = replace(parts, gathered=sharded(_held(parts), 3, ranks).weights)  # others free them after backward
    if change.zero >= 3:
        start -= gone.weights
        forward = forward + Span(unit, unit, 2 * unit)
    return replace(
        parts, start=start, gradients=gradients, more=more, temporaries=temporaries, forward=forward, notes=notes
    )
