"""The catalogue's rules as data: code, severity, how long the evidence must last, thresholds with their units.

Thresholds are chosen to be silent on a healthy run; most combine a share of the device or the peak with a minimum
number of bytes. Facts about a model or a setting are info; what will fail is warning or critical.
"""

from __future__ import annotations

import msgspec

MIB = 1 << 20


class Rule(msgspec.Struct, frozen=True):
    """One rule. A threshold that is 0 is not one of this rule's."""

    code: str
    severity: str
    opens_after: int = 1  # looks in a row
    closes_after: int = 1
    headroom_share_of_device: float = 0
    least_steps_learnt: int = 0
    p_oom: float = 0
    critical_steps_to_oom: int = 0
    steps_to_oom: int = 0  # if retained bytes grow
    steps_to_oom_by_batch: int = 0  # if the need of a step grows
    as_before: float = 0  # times a peak that fitted
    alone_steps: int = 0  # of growth, before it is reported without a holder
    least_share_of_growth: float = 0  # below it the suspect is info: another one is the leak
    share_of_parameters: float = 0
    saving_share_of_peak: float = 0
    excess_share_of_median: float = 0
    steps_after_use: int = 0
    share_of_loaded: float = 0
    warning_share_of_device: float = 0
    kept_steps: int = 0  # since the newest outlier
    unused_share_of_reserved: float = 0
    least_bytes: int = 0
    least_share_of_peak: float = 0


NEAR_CAPACITY = Rule(
    "near-capacity", "warning", opens_after=5, closes_after=10, headroom_share_of_device=0.05, least_steps_learnt=5
)
OOM_AHEAD = Rule(
    "oom-ahead", "critical", opens_after=2, closes_after=10, p_oom=0.2, steps_to_oom=500, steps_to_oom_by_batch=20,
    as_before=1.01, least_steps_learnt=3,
)  # fmt: skip
ALLOCATOR_RETRIES = Rule("allocator-retries", "warning", closes_after=200)
BUCKET_COPY = Rule("bucket-copy", "info", least_bytes=MIB)
DOMINANT_EMBEDDING = Rule("dominant-embedding", "info", share_of_parameters=0.5, least_bytes=8 * MIB)
FOREACH_PEAK = Rule(
    "foreach-peak", "info", opens_after=5, closes_after=10, saving_share_of_peak=0.05, least_bytes=64 * MIB
)
RANK_SKEW = Rule(
    "rank-skew", "warning", opens_after=10, closes_after=20, excess_share_of_median=0.10, least_bytes=64 * MIB
)
STRAY_CONTEXT = Rule("stray-context", "warning", opens_after=3, closes_after=3)
OTHER_PROCESS = Rule("other-process", "warning", opens_after=3, closes_after=3, least_bytes=64 * MIB)
TENSOR_LEAK = Rule("tensor-leak", "warning", alone_steps=45, critical_steps_to_oom=500, least_share_of_growth=0.01)
RETAINED_GRAPH = Rule("retained-graph", "warning")
RETAINED_CHECKPOINT = Rule(
    "retained-checkpoint", "warning", steps_after_use=2, share_of_loaded=0.1, least_bytes=4 << 10
)
CHECKPOINT_DEVICE = Rule("checkpoint-device", "warning", least_bytes=4 << 10)
GRAD_IN_EVAL = Rule("grad-in-eval", "warning")
# a warning if it nearly fills the device
OUTLIER_BATCH = Rule("outlier-batch", "info", warning_share_of_device=0.8, kept_steps=200)
# near the edge a retry empties the cache sooner
FRAGMENTATION = Rule("fragmentation", "warning", opens_after=6, unused_share_of_reserved=0.4, least_bytes=128 * MIB)
ZEROED_GRADIENTS = Rule(
    "zeroed-gradients", "info", opens_after=3, closes_after=3, least_bytes=MIB, least_share_of_peak=0.02
)
# total growth so far: a settling malloc heap grows by less, over hundreds of steps
HOST_LEAK = Rule("host-leak", "warning", critical_steps_to_oom=500, least_bytes=64 * MIB)
AGENT_PART_OFF = Rule("agent-part-off", "warning")
