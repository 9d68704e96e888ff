"""Findings on a model and its optimizer: bucket-copy, dominant-embedding, foreach-peak, zeroed-gradients."""

from __future__ import annotations

from collections.abc import Iterable

from gpumon.analysis import units
from gpumon.analysis.changes import BUCKET_VIEWS, FUSED, SET_TO_NONE, BytesByOwner, saves
from gpumon.analysis.findings.look import Evidence, Look, models
from gpumon.analysis.rules import BUCKET_COPY, DOMINANT_EMBEDDING, FOREACH_PEAK, ZEROED_GRADIENTS
from gpumon.session.frame import ModelRecord
from gpumon_agent import wire

FUSED_STEP = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch.optim that take fused=True."""


def bucket_copy(look: Look) -> Evidence | None:
    for record in models(look):
        parallel = record.model.parallel
        if parallel is None or parallel.gradient_as_bucket_view is not False:
            continue
        held = saves(BUCKET_VIEWS, BytesByOwner(gradients=sum(parallel.bucket_bytes)))
        if parallel.kind == "ddp" and held >= BUCKET_COPY.least_bytes:
            ranks = parallel.world_size or 1
            together = f", up to {units.size(held * ranks)} on {ranks} ranks" if ranks > 1 else ""
            return Evidence(
                f"DDP's buckets hold one more copy of the gradients of {record.model.name}{look.where}{together}",
                held,
                f"DistributedDataParallel(..., gradient_as_bucket_view=True) saves {units.size(held)} a rank",
                subject=record.model.name,
            )
    return None


def dominant_embedding(look: Look) -> Evidence | None:
    for record, found in tables(look.rank.models) if look.tables is None else look.tables:
        if record.model.devices and look.device not in record.model.devices:
            continue
        total = record.model.parameter_bytes
        for module in found:
            if _has_sparse_gradients(look, module):
                continue  # sparse: gradients only for the rows looked up
            share = module.parameter_bytes / total if total else 0.0
            if share < DOMINANT_EMBEDDING.share_of_parameters:
                continue
            tied = [other.path for other in record.modules if other.shared_with == module.path]
            shared = f"shared with {tied[0]}" if tied else "not shared with another layer"
            return Evidence(
                f"{module.path} holds {units.percent(share)} of the parameters ({units.count(module.parameters)}), "
                f"{shared}",
                module.parameter_bytes,
                "a smaller vocabulary reduces weights, gradients and optimizer state; a smaller batch does not",
                subject=module.path,
            )
    return None


def tables(described: Iterable[ModelRecord]) -> tuple[tuple[ModelRecord, tuple[wire.Module, ...]], ...]:
    """Models with large embeddings. Walks all modules, so callers cache the result."""
    least = DOMINANT_EMBEDDING.least_bytes
    found = (
        (record, tuple([m for m in record.modules if "Embedding" in m.kind and m.parameter_bytes >= least]))
        for record in described
    )
    return tuple([each for each in found if each[1]])


def _has_sparse_gradients(look: Look, module: wire.Module) -> bool:
    """Whether all gradients at the step's end take less than half the bytes of this module's dense gradient."""
    lines = look.lines() if callable(look.lines) else look.lines
    if lines is None or lines.gradients is None:
        return False
    return 2 * (lines.gradients + (lines.buckets or 0)) < module.trainable_bytes


def foreach_peak(look: Look) -> Evidence | None:
    rule, figures = FOREACH_PEAK, look.figures
    if figures is None or figures.peak_phase != wire.OPTIMIZER or figures.skipped:
        return None
    kinds = {o.kind for r in models(look) for o in r.model.optimizers if o.foreach and not o.fused}
    if not kinds:
        return None
    others = max((p.peak for p in figures.phases if p.phase != wire.OPTIMIZER), default=0)
    temporaries = figures.peak - figures.end
    saving = min(figures.peak - others, saves(FUSED, BytesByOwner(temporaries=temporaries)))
    if saving < max(rule.least_bytes, rule.saving_share_of_peak * figures.peak):
        return None
    fused = kinds <= FUSED_STEP
    return Evidence(
        f"the foreach step of {', '.join(sorted(kinds))} makes the peak{look.where}: lists of temporaries as large as "
        "the parameters",
        saving,
        "fused=True needs no temporaries" if fused else "foreach=False needs one parameter's temporaries at a time",
    )


def zeroed_gradients(look: Look) -> Evidence | None:
    rule, held = ZEROED_GRADIENTS, look.standing.gradients
    peak = look.figures.peak if look.figures is not None else 0
    if held is None or held < max(rule.least_bytes, rule.least_share_of_peak * peak):
        return None
    return Evidence(
        f"{units.size(held)} of gradients are allocated in the forward{look.where}: kept as zeros, or freed after it",
        saves(SET_TO_NONE, BytesByOwner(gradients=held)),
        "optimizer.zero_grad() before the forward, with set_to_none=True (the default): backward makes them again",
    )
