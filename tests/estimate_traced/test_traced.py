"""A traced iteration against the same scenario on the virtual GPU, and what a trace refuses."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from factories import CASES, UNSAID, Case
from msgspec.structs import replace
from scenarios.catalogue import BY_NAME

from gpumon.analysis.estimate.from_module import FromModule, describe, on_meta, shared
from gpumon.analysis.estimate.kernels import Hardware, reduction
from gpumon.analysis.estimate.on_meta import VERSION, Shapes
from gpumon.analysis.estimate.simulator import MIB, OutOfMemory, SimulatedAllocator
from gpumon.analysis.estimate.traced import AllocatorRequests, Untraceable, trace
from gpumon.analysis.estimate.workload import PRECISIONS, OptimizerChoice, Workload

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""What torchrun says to a rank. DDP takes the same with nobody else there."""


def workload(case: Case) -> Workload:
    return Workload(
        batch=case.batch,
        precision=PRECISIONS[case.precision],
        optimizer=OptimizerChoice.parse(case.optimizer),
        accumulation=case.accumulation,
        set_to_none=case.set_to_none,
    )


def traced(case: Case, **more):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers has its own to say
        return trace(
            case.factory,
            case.batches,
            workload(case),
            case.loss,
            built_on_device=case.built_on_device,
            iterations=case.iterations,
            **more,
        )


def measured(virtual_gpu, name):
    """(phase, index in its step) → figures, of each step."""
    scenario = BY_NAME[name]
    device = virtual_gpu(**{**scenario.options, "memory": None})
    run = device.run(scenario.path, *scenario.args, "--report", env=ALONE)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"')]
    return [phase for line in lines if "phases" in line and line["step"] for phase in line["phases"]]


def test_every_scenario_is_a_case_or_says_why_it_is_none():
    assert sorted([*CASES, *UNSAID]) == sorted(BY_NAME)


ONE_RANK = (
    "mlp", "gpt-fp32", "gpt-bf16", "gpt-fp16", "cnn", "checkpointing-reentrant", "sparse-embedding", "hf-trainer-all",
    "double-backward",
)  # fmt: skip


@pytest.mark.parametrize("name", ONE_RANK)
def test_peak_and_reserved_are_those_of_the_real_allocator(virtual_gpu, name):
    truth = measured(virtual_gpu, name)
    phases = traced(CASES[name])
    peak = max(phase["allocated_peak"] for phase in truth)
    reserved = max(phase["reserved_peak"] for phase in truth)
    assert max(phase.peak for phase in phases) == pytest.approx(peak, rel=0.005)
    assert max(phase.reserved for phase in phases) == pytest.approx(reserved, rel=0.01)


@pytest.mark.parametrize("name", ["ddp-clean", "fsdp2-rank-0-of-8", "fsdp1-rank-0-of-8"])
@pytest.mark.skipif(VERSION < (2, 13), reason="this torch's code for ranks does not run in a trace")
def test_a_rank_takes_and_reserves_what_it_does_on_a_device(virtual_gpu, name):
    case = CASES[name]
    truth = measured(virtual_gpu, name)
    work = replace(
        workload(case), world_size=case.ranks, zero=case.zero, bucket_views=case.bucket_views, flat=case.flat
    )
    made = on_meta(case.factory)
    subject = FromModule(made, case.factory, case.batches, case.loss)
    done = subject.traced(work, built_on_device=case.built_on_device)
    phases = done.phases
    assert done.as_rank
    steps = [phase for phase in phases if phase.iteration]
    assert max(phase.peak for phase in steps) == pytest.approx(max(p["allocated_peak"] for p in truth), rel=0.001)
    assert max(phase.reserved for phase in steps) == pytest.approx(max(p["reserved_peak"] for p in truth), rel=0.02)
    for phase in phases:
        assert sum(value for name, value in phase.at_peak.known() if name != "allocated") == phase.peak
    assert not torch.distributed.is_initialized()


def test_what_ranks_share_is_exchanged_where_their_code_cannot_be_run():
    case = CASES["fsdp2-rank-0-of-8"]
    work = replace(workload(case), world_size=8, zero=3)
    plain = replace(work, world_size=1, zero=0)
    alone = traced(case, keeps_workspaces=False)  # as the torch with which the figure below was read
    phases = shared(alone, describe(on_meta(case.factory)), plain, work)
    assert max(phase.peak for phase in phases) == pytest.approx(67.65 * MIB, rel=0.01)  # as PyTorch's allocator has it
    for phase in phases:
        assert sum(value for name, value in phase.at_peak.known() if name != "allocated") == phase.peak


def test_a_module_that_fsdp_cannot_wrap_is_estimated_all_the_same():
    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False)])

        def forward(self, x):  # no forward of the layer's, so FSDP gathers nothing for it
            return x @ self.layers[0].weight

    work = Workload(batch=4, world_size=2, zero=3)
    made = on_meta(Alone)
    played = FromModule(made, Alone, lambda size: torch.empty(size, 64)).play(work)
    assert played.phases[0].at_end.weights == 64 * 64 * 4 // 2
    assert played.gathered == "assumed"


def normed() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.RMSNorm(1000), torch.nn.Linear(1000, 1))


def test_an_rms_norm_keeps_what_it_keeps_on_a_device(virtual_gpu):
    """From torch 2.15 on its input and a number for each row; before, what its parts keep."""

    def measure() -> None:
        import torch

        model = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.RMSNorm(1000), torch.nn.Linear(1000, 1))
        before = torch.cuda.memory_allocated()
        output = model.cuda()(torch.empty(4096, 1000, device="cuda"))
        print(torch.cuda.memory_allocated() - before, output.shape)

    allocated = int(virtual_gpu().run(measure).stdout.split()[0])
    phases = trace(normed, lambda batch: torch.empty(batch, 1000), Workload(4096), lambda output: output.sum())
    forward = next(phase for phase in phases if phase.phase == "forward")
    assert forward.end == pytest.approx(allocated, rel=0.005)


def test_each_phase_ends_where_it_does_on_a_device(virtual_gpu):
    truth = measured(virtual_gpu, "cnn")
    second = [phase for phase in traced(CASES["cnn"]) if phase.iteration == 2]
    real = truth[len(second) : 2 * len(second)]
    assert [phase.phase for phase in second] == [phase["phase"] for phase in real]
    for mine, its in zip(second, real, strict=True):
        assert mine.end == pytest.approx(its["allocated"], abs=4096), mine.phase


@pytest.mark.parametrize("name", ["gpt-bf16", "zeroed-gradients", "lora", "foreach-peak-clean"])
def test_lines_add_up_to_every_figure(name):
    for phase in traced(CASES[name]):
        for lines, total in ((phase.at_peak, phase.peak), (phase.at_end, phase.end)):
            named = dict(lines.known())
            assert named.pop("allocated") == total
            assert sum(named.values()) == total, phase


def test_the_lines_are_the_models():
    case = CASES["zeroed-gradients"]
    module = case.factory()
    weights = sum(p.nbytes for p in module.parameters())
    end = traced(case)[-1].at_end
    assert (end.weights, end.gradients, end.optimizer) == (weights, weights, 2 * weights)


def test_a_device_too_small_runs_out():
    with pytest.raises(OutOfMemory):
        traced(CASES["gpt-fp32"], allocator=SimulatedAllocator(capacity=100 * 2**20))


def test_a_factory_that_reads_its_values_is_built_as_it_is():
    def reading():
        module = torch.nn.Linear(64, 64)
        assert float(module.weight[0, 0]) < 1
        return module

    phases = trace(reading, lambda size: torch.randn(size, 64), Workload(batch=4))
    assert phases[0].at_end.weights == 64 * 65 * 4


@pytest.mark.parametrize("name", ["gpt-bf16", "cnn", "sparse-embedding", "checkpointing-reentrant", "scaler-skips"])
def test_looking_shapes_up_changes_nothing(name):
    class Run(Shapes):
        def run(self, func, args, kwargs):
            return func(*args, **kwargs)

    looked_up, ran = AllocatorRequests(), AllocatorRequests()
    assert traced(CASES[name], requests=looked_up) == traced(CASES[name], requests=ran, shapes=Run())
    assert looked_up == ran


def test_replayed_requests_need_what_the_trace_reserved():
    requests = AllocatorRequests()
    reserved = max(phase.reserved for phase in traced(CASES["gpt-fp32"], requests=requests))
    allocated = max(phase.peak for phase in traced(CASES["gpt-fp32"]))
    assert requests.fit(reserved)
    assert not requests.fit(allocated - 2 * MIB)


def test_what_the_users_functions_raise_is_theirs():
    def broken():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(broken, lambda size: torch.randn(size, 4), Workload())


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (Workload(world_size=8, zero=1), "one rank"),
        (Workload(optimizer=OptimizerChoice.parse("adamw8bit")), "without a GPU"),
        (Workload(precision=PRECISIONS["bf16-master"]), "master weights"),
    ],
)
def test_what_cannot_be_traced_is_said(work, reason):
    with pytest.raises(Untraceable, match=reason):
        trace(CASES["mlp"].factory, CASES["mlp"].batches, work)


def test_torch_is_left_as_it_was():
    layer, inputs = torch.nn.Linear(8, 8), torch.randn(2, 8)
    traced(CASES["ema-clean"])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.dropout(layer(inputs), 0.5).dtype is torch.bfloat16
        assert torch.nn.functional.cross_entropy(layer(inputs), torch.zeros(2, dtype=torch.long)).dtype is torch.float32
    assert torch.empty(1, device="meta").is_meta


@pytest.mark.parametrize(
    ("outputs", "inputs", "sizes"),
    [
        (256, 1024, (2097152, 8)),
        (1024, 1024, (8388608, 32)),
        (256, 1576, (3276800, 8)),
        (30522, 4096, (15627264, 1908)),
    ],
)
def test_a_sum_over_rows_takes_what_the_allocator_was_asked_for(outputs, inputs, sizes):
    """As measured on the virtual GPU's A100, gradients of biases."""
    assert sizes == tuple(
        reduction(outputs, inputs, along_fastest=False, one_dimension=True, output_row=outputs, hardware=Hardware())
    )
