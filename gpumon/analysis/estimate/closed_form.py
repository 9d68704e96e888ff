"""What a training step should need on a device, line by line, from the described model and its first iterations.

Model. Exact, from the description: weights, buffers, gradients (as many bytes as trainable parameters), optimizer state
(a formula per optimizer), DDP's buckets. Learnt, from the first complete iterations: the rise of forward and backward
above the bytes at forward's start (activations), and what else is alive then. The peak is the largest of

    forward, backward:  W + B + S + buckets + held + learnt excess
    optimizer:          W + B + G + S + buckets + held + foreach temporaries, or the measured ones, if larger

with `held` learnt at the start of each: workspaces, rounding, kept gradients, outputs that live on.

`Estimate.lines` are those at the end of the optimizer, where all owners are alive; activations and temporaries are what
the peak adds. If gradients are views of DDP's buckets, their bytes count as buckets only.

Source. The per-phase contents of a step in PyTorch's own memory documentation; formulas in estimate.optimizers.
Cost. O(modules) once per description (cached by the caller), O(learnt steps) otherwise.

Known limitations. A model on several devices is described as a whole, so there is no estimate for one device. If
gradients are fewer than trainable parameters (sparse, or none), the measured ones are used. Learnt figures hold for the
input sizes they were learnt from, or for the line through two of them. Workspaces and rounding are measured, not
derived. With several optimizers, which one stepped is not described: temporaries are learnt for each kind of step
(`rank_state.kind`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from gpumon.analysis.estimate.optimizers import needs, state_bytes, temporary_bytes
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.types import Breakdown, Estimate
from gpumon.session.frame import ModelRecord
from gpumon_agent import wire
from gpumon_agent.wire.thinning import ALIKE_STEPS

NEAR = 0.001
"""State that differs less from its formula has a step counter on the device: the formula is right."""


class Owned(msgspec.Struct, frozen=True):
    """Bytes that follow from the model's description alone."""

    weights: int
    buffers: int
    gradients: int
    optimizer: int | None
    buckets: int
    temporaries: int | None
    state_source: str
    temporaries_source: str
    gradients_source: str = "exact"


class Learnt(msgspec.Struct, frozen=True):
    """What the first iterations had beyond the owners, in bytes."""

    steps: int
    excess: tuple[tuple[str, int], ...]  # phase, peak − bytes at forward's start
    kept: int  # above the owners at forward's start: held outputs, rounding, workspaces
    at_optimizer: int  # above the owners at the optimizer's end
    temporaries: int  # peak of the optimizer − bytes at its end


def owned(models: Sequence[ModelRecord], device: int) -> Owned | None:
    """None unless a model is on this device alone."""
    here = [record for record in models if record.model.devices == (device,)]
    if not here or any(device in record.model.devices and record not in here for record in models):
        return None
    weights = buffers = gradients = buckets = 0
    state: int | None = 0
    temporaries: int | None = 0
    state_source = temporaries_source = "exact"
    several = sum(len(record.model.optimizers) for record in here) > 1
    for record in here:
        model = record.model
        weights += model.parameter_bytes
        buffers += model.buffer_bytes
        views = model.parallel is not None and bool(model.parallel.gradient_as_bucket_view)
        gradients += 0 if views else model.trainable_bytes
        buckets += sum(model.parallel.bucket_bytes) if model.parallel is not None else 0
        largest = max((m.trainable_bytes for m in record.modules), default=None)
        for optimizer in model.optimizers:
            known = state_bytes(optimizer)
            if known is None:
                known, state_source = optimizer.state_bytes, "measured"
            state = None if state is None or known is None else state + known
            brief = temporary_bytes(optimizer, largest)
            if brief is None or (not optimizer.foreach and not optimizer.fused and needs(optimizer).loop_tensors):
                temporaries_source = "learnt" if brief is None else "bound"
            temporaries = None if temporaries is None or brief is None else max(temporaries, brief)
    if several:
        temporaries_source = "learnt"
    return Owned(weights, buffers, gradients, state, buckets, temporaries, state_source, temporaries_source)


def calibrated(owners: Owned, measured: Breakdown | None) -> Owned:
    """Replaces derived figures by measured ones: gradients if fewer than the trainable parameters (sparse, or never
    computed), and optimizer state, which parameters without a gradient do not get. Temporaries shrink with the state.
    """
    if measured is None:
        return owners
    gradients, state, temporaries = measured.gradients, measured.optimizer, owners.temporaries
    if gradients is not None and gradients < owners.gradients:
        owners = replace(owners, gradients=gradients, gradients_source="measured")
    if state and owners.optimizer and abs(state - owners.optimizer) > NEAR * owners.optimizer:
        if temporaries is not None and state < owners.optimizer:
            temporaries = round(temporaries * state / owners.optimizer)
        owners = replace(owners, optimizer=state, state_source="measured", temporaries=temporaries)
    return owners


def learn(steps: Sequence[StepPeaks], owners: Owned, input_bytes: int | None = None) -> Learnt | None:
    """From the newest of the first `ALIKE_STEPS` complete iterations: an estimate that followed the whole run would
    explain nothing. The very first one is used alone if it must be: its optimizer state is missing until its own
    optimizer step, which is accounted for.

    `input_bytes`: of the iteration to estimate. The rise of forward and backward is assumed linear in the input bytes:
    through the learnt sizes if they differ (a later, different one counts too), else through that of an empty batch,
    which is backward's gradients. A peak is convex in the batch (the maximum of linear moments), so between known sizes
    it is not above that line.
    """
    usable = [step for step in steps if not step.skipped]
    if not usable:
        return None
    first = usable[0]
    chosen = usable[:ALIKE_STEPS][-1]
    state = owners.optimizer or 0
    standing = owners.weights + owners.buffers
    begun = chosen is not first or first.start >= standing + state + owners.buckets
    before = standing + (state + owners.buckets if begun else 0)
    excess: dict[str, list[tuple[int | None, int]]] = {}  # phase → (bytes of the input, peak above the start)
    for step in usable[1:] or usable:
        for phase in step.phases:
            if phase.phase not in (wire.OPTIMIZER, wire.BETWEEN):
                excess.setdefault(phase.phase, []).append((step.input_bytes, phase.peak - step.start))
    others = [step for step in usable[1:] if None not in (input_bytes, chosen.input_bytes, step.input_bytes)]
    alike = [step for step in (chosen, *others) if step is chosen or step.input_bytes != chosen.input_bytes]
    kept = _between(input_bytes, [(step.input_bytes, step.start - before) for step in alike])
    gradients = 0 if kept >= owners.gradients else owners.gradients
    at_end = standing + owners.gradients + state + owners.buckets
    optimizer_peak = next((p.peak for p in chosen.phases if p.phase == wire.OPTIMIZER), chosen.end)
    return Learnt(
        steps=len(usable),
        excess=tuple(
            (phase, _at(input_bytes, points, gradients if phase == wire.BACKWARD else 0))
            for phase, points in excess.items()
        ),
        kept=kept,
        at_optimizer=_between(input_bytes, [(step.input_bytes, step.end - at_end) for step in alike]),
        temporaries=max(0, optimizer_peak - chosen.end),
    )


def _at(size: int | None, points: Sequence[tuple[int | None, int]], empty: int) -> int:
    """The value at `size` on the line through the smallest and the largest, or through `empty` at size 0."""
    placed = sorted((at, value) for at, value in points if at is not None)
    if size is None or len(placed) < len(points) or not placed[-1][0]:
        return max(0, *(value for _, value in points))
    (least, low), (most, high) = placed[0], placed[-1]
    if least == most:
        least, low = 0, min(empty, high)
    return max(0, round(low + (high - low) * (size - least) / (most - least)))


def _between(size: int | None, points: Sequence[tuple[int | None, int]]) -> int:
    """As `_at`, but without extrapolation: little of what a batch finds depends on its own size.

    With a single size, the first of `points` counts.
    """
    sizes = [at for at, _ in points if at is not None]
    if size is None or len(points) == 1:
        return max(0, points[0][1])
    return _at(min(max(size, min(sizes)), max(sizes)), points, 0)


def estimate(owners: Owned, learnt: Learnt | None, measured: Breakdown | None) -> Estimate:
    """The estimate. `measured`: the ledger at a step's end, for the lines without a formula."""
    workspaces = measured.workspaces if measured is not None else None
    rounding = measured.rounding if measured is not None else None
    inputs = measured.inputs if measured is not None else None
    state = owners.optimizer
    temporaries = owners.temporaries
    sources = {"weights": "exact", "buffers": "exact", "gradients": owners.gradients_source}
    sources["optimizer"] = owners.state_source
    if owners.buckets:
        sources["buckets"] = "exact"
    exact = temporaries is not None and owners.temporaries_source == "exact"
    more = learnt is not None and learnt.steps > 1 and learnt.temporaries > (temporaries or 0)  # DeepSpeed's copies
    if learnt is not None and (more or not exact):
        temporaries, sources["temporaries"] = learnt.temporaries, "learnt"
    elif temporaries is not None:
        sources["temporaries"] = owners.temporaries_source
    for name, value in (("workspaces", workspaces), ("rounding", rounding), ("inputs", inputs)):
        if value is not None:
            sources[name] = "measured"
    activations = max((value for _, value in learnt.excess), default=None) if learnt is not None else None
    if activations is not None:
        sources["activations"] = "learnt"
    allocated = None
    if state is not None:
        allocated = owners.weights + owners.buffers + owners.gradients + state + owners.buckets
        allocated += learnt.at_optimizer if learnt is not None else (workspaces or 0) + (rounding or 0)
    peaks = _peaks(owners, learnt, temporaries)
    phase, peak = max(peaks, key=lambda each: each[1], default=(None, None))
    if peak is not None:
        sources["peak"] = "exact and learnt"
    return Estimate(
        lines=Breakdown(
            weights=owners.weights,
            buffers=owners.buffers,
            gradients=owners.gradients,
            optimizer=state,
            buckets=owners.buckets,
            inputs=inputs,
            activations=activations,
            temporaries=temporaries,
            workspaces=workspaces,
            rounding=rounding,
            allocated=allocated,
        ),
        peak=peak,
        peak_phase=phase,
        sources=tuple(sources.items()),
        phases=peaks,
    )


def _peaks(owners: Owned, learnt: Learnt | None, temporaries: int | None) -> tuple[tuple[str, int], ...]:
    if learnt is None or owners.optimizer is None:
        return ()
    lasting = owners.weights + owners.buffers + owners.optimizer + owners.buckets
    optimizer = lasting + owners.gradients + learnt.at_optimizer + (temporaries or 0)
    return (*((name, lasting + learnt.kept + value) for name, value in learnt.excess), (wire.OPTIMIZER, optimizer))
