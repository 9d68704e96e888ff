"""The catalogue of findings: each rule, and the function that looks for its evidence.

Model. A rule looks at one device of one rank at one step and returns evidence or None. Thresholds are data
(gpumon.analysis.rules). gpumon.analysis.tracker turns evidence that lasts into findings.
Source. The catalogue of the design, section 7.
Cost. A few comparisons per rule; a model's modules are walked once per description.
Known limitations. `rank-skew` does not know pipeline stages, whose peaks differ by design.
"""

from __future__ import annotations

from gpumon.analysis.findings.batch import grad_in_eval, outlier_batch
from gpumon.analysis.findings.capacity import (
    allocator_retries,
    fragmentation,
    near_capacity,
    oom_ahead,
    other_process,
    retries,
)
from gpumon.analysis.findings.checkpoints import checkpoint_device, retained_checkpoint
from gpumon.analysis.findings.leaks import host_leak, retained_graph, tensor_leak
from gpumon.analysis.findings.look import Evidence as Evidence
from gpumon.analysis.findings.look import Find
from gpumon.analysis.findings.look import Found as Found
from gpumon.analysis.findings.look import Look as Look
from gpumon.analysis.findings.model import bucket_copy, dominant_embedding, foreach_peak, zeroed_gradients
from gpumon.analysis.findings.model import tables as tables
from gpumon.analysis.findings.ranks import rank_skew, stray_context
from gpumon.analysis.rules import (
    AGENT_PART_OFF,
    ALLOCATOR_RETRIES,
    BUCKET_COPY,
    CHECKPOINT_DEVICE,
    DOMINANT_EMBEDDING,
    FOREACH_PEAK,
    FRAGMENTATION,
    GRAD_IN_EVAL,
    HOST_LEAK,
    NEAR_CAPACITY,
    OOM_AHEAD,
    OTHER_PROCESS,
    OUTLIER_BATCH,
    RANK_SKEW,
    RETAINED_CHECKPOINT,
    RETAINED_GRAPH,
    STRAY_CONTEXT,
    TENSOR_LEAK,
    ZEROED_GRADIENTS,
    Rule,
)

__all__ = ["CATALOGUE", "RULES", "Evidence", "Found", "Look", "retries"]

CATALOGUE: tuple[tuple[Rule, Find], ...] = (
    (OOM_AHEAD, oom_ahead),
    (NEAR_CAPACITY, near_capacity),
    (RETAINED_GRAPH, retained_graph),
    (TENSOR_LEAK, tensor_leak),
    (HOST_LEAK, host_leak),
    (RETAINED_CHECKPOINT, retained_checkpoint),
    (CHECKPOINT_DEVICE, checkpoint_device),
    (ALLOCATOR_RETRIES, allocator_retries),
    (FRAGMENTATION, fragmentation),
    (GRAD_IN_EVAL, grad_in_eval),
    (OTHER_PROCESS, other_process),
    (STRAY_CONTEXT, stray_context),
    (RANK_SKEW, rank_skew),
    (OUTLIER_BATCH, outlier_batch),
    (FOREACH_PEAK, foreach_peak),
    (ZEROED_GRADIENTS, zeroed_gradients),
    (BUCKET_COPY, bucket_copy),
    (DOMINANT_EMBEDDING, dominant_embedding),
)
"""Every rule and its function, most urgent first: the order in which findings are shown."""

RULES: tuple[Rule, ...] = (*(rule for rule, _ in CATALOGUE), AGENT_PART_OFF)
"""The catalogue's rules, and `agent-part-off`, which needs no look (`agent.parts_off`)."""
