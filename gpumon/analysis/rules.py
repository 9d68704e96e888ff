"""The rules of the catalogue as data: code, severity, how steady the evidence must be, thresholds with their units.

Thresholds are meant to be silent on a healthy run: each asks for a share of the device or of the peak and for a least
number of bytes. True statements about a model or a setting are info; what will fail is warning or critical.
"""

from __future__ import annotations

import msgspec

MIB = 1 << 20


class Rule(msgspec.Struct, frozen=True):
    """What all rules state; thresholds are the fields of each, units in their names."""

    code: str
    severity: str
    opens_after: int = 1  # looks in a row
    closes_after: int = 1


class NearCapacity(Rule, frozen=True):
    code: str = "near-capacity"
    severity: str = "warning"
    opens_after: int = 5
    closes_after: int = 10
    headroom_share_of_device: float = 0.05
    least_steps_learnt: int = 5


class OomAhead(Rule, frozen=True):
    code: str = "oom-ahead"
    severity: str = "critical"
    opens_after: int = 2
    closes_after: int = 10
    p_oom: float = 0.2
    steps_to_oom: int = 500  # where what is kept from step to step grows
    as_before: float = 1.01  # of a peak that there was room for
    least_steps_learnt: int = 3


class AllocatorRetries(Rule, frozen=True):
    code: str = "allocator-retries"
    severity: str = "warning"
    closes_after: int = 200


class BucketCopy(Rule, frozen=True):
    code: str = "bucket-copy"
    severity: str = "info"
    least_bytes: int = MIB


class DominantEmbedding(Rule, frozen=True):
    code: str = "dominant-embedding"
    severity: str = "info"
    share_of_parameters: float = 0.5
    least_bytes: int = 8 * MIB


class ForeachPeak(Rule, frozen=True):
    code: str = "foreach-peak"
    severity: str = "info"
    opens_after: int = 5
    closes_after: int = 10
    saving_share_of_peak: float = 0.05
    least_bytes: int = 64 * MIB


class RankSkew(Rule, frozen=True):
    code: str = "rank-skew"
    severity: str = "warning"
    opens_after: int = 10
    closes_after: int = 20
    excess_share_of_median: float = 0.10
    least_bytes: int = 64 * MIB


class StrayContext(Rule, frozen=True):
    code: str = "stray-context"
    severity: str = "warning"
    opens_after: int = 3
    closes_after: int = 3


class OtherProcess(Rule, frozen=True):
    code: str = "other-process"
    severity: str = "warning"
    opens_after: int = 3
    closes_after: int = 3
    least_bytes: int = 64 * MIB


class TensorLeak(Rule, frozen=True):
    code: str = "tensor-leak"
    severity: str = "warning"
    alone_steps: int = 45  # of growth, before it is stated without a holder
    critical_steps_to_oom: int = 500
    least_share_of_growth: float = 0.01  # below, another suspect is the leak, and this one is information


class RetainedGraph(Rule, frozen=True):
    code: str = "retained-graph"
    severity: str = "warning"


class RetainedCheckpoint(Rule, frozen=True):
    code: str = "retained-checkpoint"
    severity: str = "warning"
    steps_after_use: int = 2
    share_of_loaded: float = 0.1
    least_bytes: int = 4 << 10


class CheckpointDevice(Rule, frozen=True):
    code: str = "checkpoint-device"
    severity: str = "warning"
    least_bytes: int = 4 << 10


class GradInEval(Rule, frozen=True):
    code: str = "grad-in-eval"
    severity: str = "warning"


class OutlierBatch(Rule, frozen=True):
    code: str = "outlier-batch"
    severity: str = "info"  # a warning where the device is nearly full with it
    warning_share_of_device: float = 0.8
    kept_steps: int = 200  # since the newest one


class Fragmentation(Rule, frozen=True):
    code: str = "fragmentation"
    severity: str = "warning"
    opens_after: int = 6  # near the edge a retry empties the cache sooner
    unused_share_of_reserved: float = 0.4
    least_bytes: int = 128 * MIB


class ZeroedGradients(Rule, frozen=True):
    code: str = "zeroed-gradients"
    severity: str = "info"
    opens_after: int = 3
    closes_after: int = 3
    least_bytes: int = MIB
    least_share_of_peak: float = 0.02


class HostLeak(Rule, frozen=True):
    code: str = "host-leak"
    severity: str = "warning"
    critical_steps_to_oom: int = 500
    least_bytes: int = 64 * MIB  # so far; while the C library's heap settles it grows by less, for hundreds of steps


class AgentPartOff(Rule, frozen=True):
    code: str = "agent-part-off"
    severity: str = "warning"


NEAR_CAPACITY = NearCapacity()
OOM_AHEAD = OomAhead()
ALLOCATOR_RETRIES = AllocatorRetries()
BUCKET_COPY = BucketCopy()
DOMINANT_EMBEDDING = DominantEmbedding()
FOREACH_PEAK = ForeachPeak()
RANK_SKEW = RankSkew()
STRAY_CONTEXT = StrayContext()
OTHER_PROCESS = OtherProcess()
TENSOR_LEAK = TensorLeak()
RETAINED_GRAPH = RetainedGraph()
RETAINED_CHECKPOINT = RetainedCheckpoint()
CHECKPOINT_DEVICE = CheckpointDevice()
GRAD_IN_EVAL = GradInEval()
OUTLIER_BATCH = OutlierBatch()
FRAGMENTATION = Fragmentation()
ZEROED_GRADIENTS = ZeroedGradients()
HOST_LEAK = HostLeak()
AGENT_PART_OFF = AgentPartOff()
