"""The catalogue of findings that present data can prove: where each rule's evidence comes from.

Model. A rule looks at one device of one rank at one step and returns evidence or None; thresholds are data
(gpumon.analysis.rules), and gpumon.analysis.tracker makes findings of evidence that stays.
Source. The catalogue of the design, section 7.
Cost. A few comparisons a rule; statements about the model walk its modules.
Known limitations. `rank-skew` does not know of pipeline stages, whose peaks differ by design.
"""

from __future__ import annotations

from gpumon.analysis.findings.capacity import allocator_retries, near_capacity, oom_ahead, other_process, retries
from gpumon.analysis.findings.look import Evidence as Evidence
from gpumon.analysis.findings.look import Find
from gpumon.analysis.findings.look import Found as Found
from gpumon.analysis.findings.look import Look as Look
from gpumon.analysis.findings.model import bucket_copy, dominant_embedding, foreach_peak
from gpumon.analysis.findings.ranks import rank_skew, stray_context
from gpumon.analysis.rules import (
    ALLOCATOR_RETRIES,
    BUCKET_COPY,
    DOMINANT_EMBEDDING,
    FOREACH_PEAK,
    NEAR_CAPACITY,
    OOM_AHEAD,
    OTHER_PROCESS,
    RANK_SKEW,
    STRAY_CONTEXT,
    Rule,
)

__all__ = ["CATALOGUE", "Evidence", "Found", "Look", "retries"]

CATALOGUE: tuple[tuple[Rule, Find], ...] = (
    (OOM_AHEAD, oom_ahead),
    (NEAR_CAPACITY, near_capacity),
    (ALLOCATOR_RETRIES, allocator_retries),
    (OTHER_PROCESS, other_process),
    (STRAY_CONTEXT, stray_context),
    (RANK_SKEW, rank_skew),
    (FOREACH_PEAK, foreach_peak),
    (BUCKET_COPY, bucket_copy),
    (DOMINANT_EMBEDDING, dominant_embedding),
)
"""Every rule and where its evidence comes from, most urgent first: the order findings are shown in."""
