"""Findings on a single batch or evaluation: outlier-batch, grad-in-eval."""

from __future__ import annotations

from gpumon.analysis import units
from gpumon.analysis.findings.look import Evidence, Look
from gpumon.analysis.rules import OUTLIER_BATCH


def outlier_batch(look: Look) -> Evidence | None:
    rule, found = OUTLIER_BATCH, look.outlier
    if found is None or look.record.step - found.step > rule.kept_steps:
        return None
    shapes = ", ".join(str(list(shape)) for shape in found.shapes[:2])
    crowded = bool(look.capacity) and found.peak >= rule.warning_share_of_device * (look.capacity or 0)
    return Evidence(
        f"the batch of step {units.count(found.step)}{f' {shapes}' if shapes else ''} makes the peak{look.where}: "
        f"{found.times_usual:.1f} times the usual bytes, larger than {units.percent(found.quantile)} of the batches, "
        f"{units.size(found.peak)} against {units.size(found.cut_peak)} without it",
        found.saved,
        f"cut samples to the {100 * found.cut:.0f}th percentile of their length: saves {units.size(found.saved)}; or "
        "batch by tokens, so that long samples come in smaller batches",
        since=found.step,
        severity="warning" if crowded else None,
    )


def grad_in_eval(look: Look) -> Evidence | None:
    found = look.standing.recorded
    if found is None:
        return None
    cost = f", {units.size(found.bytes)} above its start" if found.bytes else ""
    by = f": {found.by}" if found.by else ""
    return Evidence(
        f"a forward in eval mode recorded a graph that no backward used{look.where}{cost}{by}",
        found.bytes,
        "with torch.inference_mode(): (or torch.no_grad()) around the evaluation; model.eval() alone records gradients",
        since=found.step,
    )
