"""What a traced iteration holds when: by formulas from papers and documentation, setting by setting."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from msgspec.structs import replace
from transformers_configs import bert

from gpumon.analysis.estimate import from_config
from gpumon.analysis.estimate.from_module import FromTensors
from gpumon.analysis.estimate.kernels import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER
from gpumon.analysis.estimate.model import ModelTensors, Tensor
from gpumon.analysis.estimate.traced import PhaseBytes
from gpumon.analysis.estimate.workload import PRECISIONS, OptimizerChoice, Workload
from gpumon_agent import wire

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers builds the models")

MIB = 2**20
BASE = Workload(batch=2, sequence=64, optimizer=OptimizerChoice.parse("adamw:fused"))


def config(layers: int = 2, **changes: Any) -> from_config.FromConfig:
    return from_config.of({**bert("MaskedLM", 256, layers, 4, 1024), "vocab_size": 2000, **changes})


def played(work: Workload, model: from_config.FromConfig | None = None) -> tuple[PhaseBytes, ...]:
    return (model or config()).play(work).phases


def tensors(model: ModelTensors, work: Workload) -> tuple[PhaseBytes, ...]:
    return FromTensors.of(model).play(work).phases


def at(phases: Sequence[PhaseBytes], name: str, iteration: int = 2) -> PhaseBytes:
    return next(phase for phase in phases if (phase.phase, phase.iteration) == (name, iteration))


def weights() -> int:
    return config().model.bytes


def test_a_layer_keeps_34sbh_and_5as2b_bytes_as_in_the_paper() -> None:
    """arXiv 2205.05198, equation 2: a layer in half precision, with dropout and attention written out."""
    work = replace(BASE, batch=3, precision=PRECISIONS["bf16"], attention="eager")
    s, b, h, a = work.sequence, work.batch, 256, 4
    kept = [at(played(work, config(layers)), wire.FORWARD).at_end.activations or 0 for layers in (2, 3)]
    statistics = 2 * 2 * 4 * s * b  # of the layer norms, which the paper leaves out
    assert kept[1] - kept[0] == 34 * s * b * h + 5 * a * s * s * b + statistics


def test_checkpointing_keeps_one_input_a_layer() -> None:
    work = replace(BASE, checkpointing=True)
    kept = [at(played(work, config(layers)), wire.FORWARD).at_end.activations or 0 for layers in (2, 3)]
    assert kept[1] - kept[0] == 4 * work.sequence * work.batch * 256


def test_attention_by_a_kernel_keeps_no_scores() -> None:
    def kept(attention: str, sequence: int) -> int:
        work = replace(BASE, attention=attention, sequence=sequence)
        return at(played(work), wire.FORWARD).at_end.activations or 0

    assert kept("sdpa", 512) < 2.1 * kept("sdpa", 256)
    assert kept("eager", 512) > 2.5 * kept("eager", 256)


def test_accumulated_gradients_stand_in_the_second_forward() -> None:
    once, twice = played(BASE), played(replace(BASE, accumulation=4))
    first = at(once, wire.FORWARD).peak
    second = max(phase.peak for phase in twice if (phase.phase, phase.iteration) == (wire.FORWARD, 2))
    assert second - first == pytest.approx(weights(), rel=0.01)


def test_gradients_that_are_zeroed_and_not_dropped_stand_everywhere() -> None:
    dropped, kept = played(BASE), played(replace(BASE, set_to_none=False))
    assert at(dropped, wire.FORWARD).at_end.gradients is None
    assert at(kept, wire.FORWARD).at_end.gradients == weights()
    assert at(kept, wire.OPTIMIZER).end == pytest.approx(at(dropped, wire.OPTIMIZER).end, rel=0.01)


def test_buckets_are_a_copy_of_the_gradients_unless_those_are_views() -> None:
    """A 312.5 MiB model under DDP and AdamW: 1567.6 and 1251.2 MiB after backward, as measured with PyTorch."""
    model = ModelTensors("gpt", tuple(Tensor(str(number), (5 * 2**19,)) for number in range(32)))  # like it, of 320 MiB
    copied, viewed = (
        at(tensors(model, replace(BASE, world_size=2, bucket_views=views)), wire.BACKWARD) for views in (False, True)
    )
    assert (copied.at_end.buckets, copied.at_end.gradients) == (model.bytes, model.bytes)
    assert (viewed.at_end.buckets, viewed.at_end.gradients) == (model.bytes, 0)
    assert copied.end / model.bytes == pytest.approx(1567.6 / 312.5, rel=0.005)
    assert viewed.end / model.bytes == pytest.approx(1251.2 / 312.5, rel=0.005)


@pytest.mark.parametrize(("stage", "divided"), [(1, ("optimizer",)), (2, ("optimizer", "gradients")),
                                                (3, ("optimizer", "gradients", "weights"))])  # fmt: skip
def test_a_stage_of_zero_leaves_an_eighth(stage: int, divided: tuple[str, ...]) -> None:
    whole, shared = played(BASE), played(replace(BASE, world_size=8, zero=stage))
    for line in ("weights", "gradients", "optimizer"):
        one, eighth = (getattr(at(phases, wire.OPTIMIZER).at_end, line) for phases in (whole, shared))
        assert eighth == pytest.approx(one / 8 if line in divided else one, rel=0.01)


def test_master_weights_make_sixteen_bytes_and_eight_bit_adam_ten() -> None:
    count = config().model.count

    def standing(**changes: Any) -> float:
        end = at(played(replace(BASE, **changes)), wire.OPTIMIZER).at_end
        return sum(getattr(end, line) or 0 for line in ("weights", "gradients", "optimizer")) / count

    assert standing() == pytest.approx(16, rel=0.001)
    assert standing(precision=PRECISIONS["bf16-master"]) == pytest.approx(16, rel=0.001)
    assert standing(precision=PRECISIONS["bf16"]) == pytest.approx(8, rel=0.001)
    assert standing(optimizer=OptimizerChoice.parse("adamw8bit")) == pytest.approx(10.03, rel=0.005)


def test_autocast_keeps_a_cast_of_every_weight_it_multiplies_until_backward_used_it() -> None:
    work = replace(BASE, precision=PRECISIONS["bf16-autocast"], batch=1, sequence=1)
    cast = at(played(work), wire.FORWARD).at_end.activations or 0
    multiplied = sum(t.count for t in config().model.own if t.name.endswith("weight") and "Norm" not in t.name)
    looked_up_only = (512 + 2) * 256
    assert cast == pytest.approx(2 * (multiplied - looked_up_only), rel=0.02)


def test_frozen_and_tied_parameters_have_no_gradient_of_their_own() -> None:
    adapters = (Tensor("a", (8, 1024)), Tensor("b", (1024, 8)))
    model = ModelTensors(
        "lora",
        (Tensor("base", (1024, 1024), trainable=False), *adapters, Tensor("head", (1024, 1024), 4, True, "base")),
    )
    end = at(tensors(model, BASE), wire.OPTIMIZER).at_end
    adapted = 2 * 8 * 1024 * 4
    assert (end.weights, end.gradients) == (1024 * 1024 * 4 + adapted, adapted)
    assert end.optimizer == 2 * adapted + 2 * 4  # and each step's number


def test_an_embedding_on_the_cpu_takes_its_weights_gradients_and_states_along() -> None:
    classifier = from_config.of({**bert("SequenceClassification", 256, 2, 4, 1024), "vocab_size": 20_000})
    here, there = (played(replace(BASE, embedding_on_cpu=off), classifier) for off in (False, True))
    saved = at(here, wire.OPTIMIZER).end - at(there, wire.OPTIMIZER).end
    assert saved == pytest.approx(4 * 20_000 * 256 * 4, rel=0.03)


def test_inference_holds_weights_and_what_runs() -> None:
    phases = played(replace(BASE, inference=True, optimizer=OptimizerChoice.parse("none")))
    assert [phase.phase for phase in phases] == [wire.LOAD, wire.BETWEEN, wire.FORWARD]
    end = phases[-1].at_end
    assert (end.gradients, end.optimizer) == (None, None)
    assert phases[-1].peak < weights() + 10 * MIB + 2 * 64 * 2 * 2000 * 4


def test_cublas_workspaces_are_torch_s_defaults() -> None:
    """aten/src/ATen/cuda/CublasHandlePool.cpp: `:4096:2:16:8`, on compute capability 9.0 `:4096:8`; KiB and count."""
    assert CUBLAS_WORKSPACE == (4096 * 2 + 16 * 8) * 1024
    assert CUBLAS_WORKSPACE_HOPPER == 4096 * 8 * 1024
