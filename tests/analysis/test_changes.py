"""The same change saves the same bytes, whoever says so: the estimate, what-if, an out-of-memory, a finding."""

from __future__ import annotations

import pytest
from synthetic import MIB, Run, rank_of

from gpumon.analysis import Reporter
from gpumon.analysis.changes import (
    BATCH,
    BF16,
    BUCKET_VIEWS,
    EXPANDABLE,
    FUSED,
    SET_TO_NONE,
    BytesByOwner,
    Change,
    saves,
    sharded,
)
from gpumon.analysis.diagnosis.context import FailureContext, Settings
from gpumon.analysis.diagnosis.figures import known
from gpumon.analysis.diagnosis.message_parser import OomMessage
from gpumon.analysis.diagnosis.optimizer_step import FOREACH, recipe_of
from gpumon.analysis.diagnosis.remedies import remedies as after_oom
from gpumon.analysis.estimate.from_module import FromTensors
from gpumon.analysis.estimate.model import ModelTensors, Tensor
from gpumon.analysis.estimate.plan import expect, remedies
from gpumon.analysis.estimate.workload import OptimizerChoice, Workload
from gpumon.analysis.whatif import answer
from gpumon.session.frame import RankFrame
from gpumon_agent import wire
from gpumon_agent.shape_model.model import ShapeModel

TENSORS = tuple(Tensor(f"layers.{at}.weight", (1024, 2048)) for at in range(16))
WEIGHTS = 16 * 1024 * 2048 * 4
RUN = Run(weights=WEIGHTS, activations=lambda step: MIB)


def estimated(**how: object) -> dict[str, int]:
    subject = FromTensors.of(ModelTensors("layers", TENSORS))
    expected = expect(subject, Workload(optimizer=OptimizerChoice.parse("adamw"), **how))  # type: ignore[arg-type]
    return {remedy.code: remedy.saves for remedy in remedies(subject, expected)}


def asked(rank: RankFrame, change: Change) -> float:
    now, then = answer(rank, Reporter().rank(rank).devices[0], ShapeModel(), (Change(), change))
    assert now.peak is not None
    assert then.peak is not None, then.why_not
    return now.peak.expected - then.peak.expected


def failed(phase: str, *, views: bool | None = None) -> dict[str, int | None]:
    """With 100 MiB of activations beside weights, gradients and state."""
    held = 4 * WEIGHTS + 100 * MIB
    message = OomMessage(
        "CUDA out of memory", "allocator", "cuda", requested=known(64 * MIB), total=known(2 * held),
        free=known(MIB), allocated=known(held), reserved=known(held),
    )  # fmt: skip
    case = FailureContext(
        message, "capacity", phase, TENSORS, recipe_of("adamw")[0], FOREACH, Settings(bucket_views=views)
    )
    return {remedy.code: remedy.saves for remedy in after_oom(case)}


def found(run: Run, code: str) -> int | None:
    reporter = Reporter()
    for steps in range(1, 20):
        report = reporter.rank(rank_of(run, steps))
    return next(finding.bytes for finding in report.findings if finding.code == code)


def test_a_fused_step_saves_the_temporaries() -> None:
    saved = saves(FUSED, BytesByOwner(WEIGHTS, WEIGHTS, 2 * WEIGHTS, temporaries=WEIGHTS))
    assert saved == WEIGHTS
    assert estimated()["fused"] == saved - 16 * 512  # counters of steps, on the device where it is fused
    assert failed(wire.OPTIMIZER)["fused"] == saved
    assert asked(rank_of(RUN, 20), Change(fused=True)) == saved
    assert found(RUN, "foreach-peak") == saved


def test_an_eight_bit_optimizer_saves_the_same_in_an_estimate_and_after_an_out_of_memory() -> None:
    later = failed(wire.OPTIMIZER)["8-bit"]
    assert later is not None
    assert estimated()["8-bit"] == pytest.approx(later, rel=0.01)


def test_bucket_views_save_the_gradients() -> None:
    saved = saves(BUCKET_VIEWS, BytesByOwner(gradients=WEIGHTS))
    parallel = wire.Parallel("ddp", world_size=2, bucket_bytes=(WEIGHTS,), gradient_as_bucket_view=False)
    run = Run(weights=WEIGHTS, activations=lambda step: MIB, buckets=WEIGHTS, parallel=parallel)
    assert saved == WEIGHTS
    assert estimated(world_size=2)["bucket-views"] == saved
    assert failed(wire.BACKWARD, views=False)["bucket-views"] == saved
    assert asked(rank_of(run, 20), Change(bucket_views=True)) == saved
    assert found(run, "bucket-copy") == saved


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_saves_each_owner_s_share_of_the_other_ranks(stage: int) -> None:
    """What stays of a bucket or a gathered unit is no owner's: an estimate may be off by as much as the weights."""
    gone = sharded(BytesByOwner(WEIGHTS, WEIGHTS, 2 * WEIGHTS, WEIGHTS), stage, 8)
    saved = gone.weights + gone.gradients + gone.state + gone.temporaries
    assert saved == 7 / 8 * WEIGHTS * (3, 4, 5)[stage - 1]
    assert abs(estimated(world_size=8)[f"zero-{stage}"] - saved) <= WEIGHTS * (0.13 if stage == 1 else 1.01)
    assert abs(asked(rank_of(RUN, 20), Change(zero=stage, ranks=8)) - saved) <= WEIGHTS * (0.01 if stage == 1 else 2)


def test_half_a_batch_saves_half_of_the_activations() -> None:
    assert saves(BATCH, BytesByOwner(activations=100 * MIB)) == failed(wire.BACKWARD)["batch"] == 50 * MIB
    run = Run(weights=MIB, activations=lambda step: 100 * MIB)
    assert asked(rank_of(run, 20), Change(batch=0.5)) == pytest.approx(50 * MIB, rel=0.01)


def test_what_is_unused_or_kept_as_zeros_is_saved_whole_and_bf16_saves_half() -> None:
    assert (
        saves(SET_TO_NONE, BytesByOwner(gradients=WEIGHTS)) == saves(EXPANDABLE, BytesByOwner(slack=WEIGHTS)) == WEIGHTS
    )
    assert saves(BF16, BytesByOwner(1, 1, 2, 2)) == 3
    assert failed(wire.LOAD)["bf16"] == saves(BF16, BytesByOwner(WEIGHTS)) == WEIGHTS // 2
