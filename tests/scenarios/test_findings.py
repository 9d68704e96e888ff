"""What is wrong grows, or stands out, by the bytes the catalogue says, and its clean twin does not."""

from __future__ import annotations

import itertools

import pytest
from scenarios._gpt import GPTConfig
from scenarios.catalogue import BY_NAME, CONTEXT_MIB, SCENARIOS

MIB = 2**20
FLOAT = 4
PERCEPTRON = (256 * 1024 + 1024 + 1024 * 64 + 64) * FLOAT
GROWING = [scenario for scenario in SCENARIOS if scenario.bytes_per_step]
_STEADY = ("tensor-leak", "checkpoint-save", "retained", "zeroed", "host-leak")
LASTING = [name for name in BY_NAME if name.startswith(_STEADY) and name.endswith("-clean")]
"""Twins that train for 50 steps of one shape."""


def ends(run, figure="allocated"):
    """A figure at the end of each step, from the second on: the first makes gradients and state."""
    return [run.at(step, "optimizer")[figure] for step in range(2, len(run.steps()))]


@pytest.mark.parametrize("scenario", GROWING, ids=lambda scenario: scenario.name)
def test_a_leak_grows_by_the_same_bytes_each_step(run_scenario, scenario):
    sizes = ends(run_scenario(scenario), "requested" if scenario.bytes_per_step > 512 else "allocated")
    assert {later - earlier for earlier, later in itertools.pairwise(sizes)} == {scenario.bytes_per_step}


@pytest.mark.parametrize("name", LASTING)
def test_a_clean_twin_does_not_grow_at_all_in_50_steps(run_scenario, name):
    sizes = ends(run_scenario(BY_NAME[name]))
    assert len(sizes) == 49
    assert len(set(sizes)) == 1


def test_checkpoints_kept_on_the_device_cost_the_weights_each(run_scenario):
    sizes = ends(run_scenario(BY_NAME["checkpoint-save"]), "requested")
    assert sizes[-1] - sizes[0] == 4 * PERCEPTRON  # at steps 10, 20, 30 and 40


def test_a_checkpoint_still_held_is_one_more_copy_of_the_weights(run_scenario):
    held, let_go = (run_scenario(BY_NAME[f"retained-checkpoint{end}"]) for end in ("", "-clean"))
    assert held.at(9, "between")["requested"] - let_go.at(9, "between")["requested"] == PERCEPTRON


def test_evaluation_with_gradients_saves_what_inference_does_not(run_scenario):
    recorded, clean = (run_scenario(BY_NAME[f"grad-in-eval{end}"]) for end in ("", "-clean"))
    assert recorded.at(3, "eval")["requested"] - clean.at(3, "eval")["requested"] == 128 * 1024 * FLOAT


def test_one_long_batch_alone_makes_the_peak(run_scenario):
    run, clean = (run_scenario(BY_NAME[f"outlier-batch{end}"]) for end in ("", "-clean"))
    peaks = [run.at(step, "backward")["allocated_peak"] for step in range(2, 51)]
    usual = max(clean.at(step, "backward")["allocated_peak"] for step in range(2, 51))
    assert [step for step, peak in enumerate(peaks, 2) if peak > usual + 4 * MIB] == [16, 36]
    assert max(peaks) > 4 * usual


def test_a_large_vocabulary_owns_the_parameters(run_scenario):
    run = run_scenario(BY_NAME["dominant-embedding"])
    config = GPTConfig(vocabulary=120_000, layers=2, width=128, length=32)
    assert run.at(0, "load")["requested"] == config.parameters * FLOAT
    assert config.vocabulary * config.width > 0.97 * config.parameters


def test_foreach_needs_one_more_copy_of_the_weights_and_fused_none(run_scenario):
    foreach, fused = (run_scenario(BY_NAME[f"foreach-peak{end}"]).at(5, "optimizer") for end in ("", "-clean"))
    assert foreach["allocated_peak"] - foreach["allocated"] == 8 * 2048 * 2048 * FLOAT
    assert fused["allocated_peak"] == fused["allocated"]


def test_gradients_of_zeros_stay_through_forward(run_scenario):
    zeroed, none = (run_scenario(BY_NAME[f"zeroed-gradients{end}"]) for end in ("", "-clean"))
    assert zeroed.at(9, "forward")["requested"] - none.at(9, "forward")["requested"] == PERCEPTRON


def test_growing_batches_reserve_what_shrinking_ones_reuse(run_scenario):
    run, clean = (run_scenario(BY_NAME[f"fragmentation{end}"]) for end in ("", "-clean"))
    assert run.at(16, "optimizer")["reserved"] > 4 * clean.at(16, "optimizer")["reserved"]
    assert run.at(16, "optimizer")["reserved"] > 10 * run.at(16, "backward")["allocated"]


def test_near_the_edge_the_allocator_retries(run_scenario):
    run, clean = (run_scenario(BY_NAME[f"allocator-retries{end}"]) for end in ("", "-clean"))
    retries = ends(run, "retries")
    assert retries == sorted(retries)
    assert retries[-1] > 3
    assert set(ends(clean, "retries")) == {0}


def test_near_capacity_almost_fills_what_the_context_leaves(run_scenario):
    scenario = BY_NAME["near-capacity"]
    room = (scenario.memory_mib - CONTEXT_MIB) * MIB
    device = scenario.memory_mib * MIB
    assert room - run_scenario(scenario).at(9, "backward")["allocated_peak"] < 0.05 * device
    assert room - run_scenario(scenario.twin()).at(9, "backward")["allocated_peak"] > 0.10 * device


def test_memory_runs_out_after_growing_evenly(run_scenario):
    run, clean = (run_scenario(BY_NAME[f"oom-ahead{end}"]) for end in ("", "-clean"))
    peaks = [run.at(step, "backward")["allocated_peak"] for step in range(2, len(run.steps()))]
    growths = [later - earlier for earlier, later in itertools.pairwise(peaks)]
    assert len(peaks) > 8
    assert all(growth > 20 * MIB for growth in growths)
    assert len({clean.at(step, "backward")["allocated_peak"] for step in range(2, 61)}) == 1


@pytest.mark.parametrize(
    ("where", "line"),
    [("forward", "model(inputs)"), ("backward", "loss.backward()"), ("optimizer", "optimizer.step()")],
)
def test_memory_runs_out_in_that_phase(run_scenario, where, line):
    error = run_scenario(BY_NAME[f"oom-{where}"]).errors[0]
    assert line in error
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate" in error
    assert "GPU 0 has a total capacity of 1024.00 MiB" in error


def test_another_process_takes_its_allocation_and_a_context(run_scenario):
    run, alone = (run_scenario(BY_NAME[f"other-process{end}"]) for end in ("", "-clean"))
    own = run.at(9, "optimizer")["reserved"] + CONTEXT_MIB * MIB
    assert alone.note("device_used") == own
    assert run.note("device_used") == own + 2 * 2**30 + CONTEXT_MIB * MIB


@pytest.mark.parametrize("name", ["host-leak", "host-leak-worker"])
def test_host_memory_grows_by_a_mebibyte_or_two_a_step(run_scenario, name):
    def grown(run):
        lines = [line["workers"][0] if line["workers"] else line["rss"] for line in run.steps()[1:]]
        return lines[40] - lines[10]

    # never less; more where the C library takes a new arena meanwhile, which a clean run may do as well
    clean = grown(run_scenario(BY_NAME[f"{name}-clean"]))
    assert grown(run_scenario(BY_NAME[name])) > max(0.9 * 30 * MIB, clean + 20 * MIB)
    assert clean < 8 * MIB
