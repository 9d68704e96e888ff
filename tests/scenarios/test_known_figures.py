"""What ordinary training holds at its phases' ends, derived by hand from shapes alone and compared to the byte.

Compared is `requested`: the bytes asked of the allocator, before it rounds. W is the weights' bytes, AdamW's state 2 W.
"""

from __future__ import annotations

import pytest
from scenarios._gpt import GPTConfig
from scenarios.catalogue import BY_NAME, OLDER_TORCH

MIB = 2**20
INT64, FLOAT = 8, 4
GPT = GPTConfig()
W_GPT = GPT.parameters * FLOAT
PERCEPTRON = (256 * 1024 + 1024 + 1024 * 64 + 64) * FLOAT
"""Weights of the perceptron of _mlp.py."""
BATCH = (128 * 256 + 128 * 64) * FLOAT
"""Its inputs and targets."""
HIDDEN, OUTPUTS = 128 * 1024 * FLOAT, 128 * 64 * FLOAT
"""Its activations."""


def tokens_and_targets(batch: int, length: int = GPT.length) -> int:
    return 2 * batch * length * INT64


def test_a_perceptron_holds_exactly_its_tensors_at_each_phase_end(run_scenario):
    weights = (1024 * 4096 + 4096 + 4096 * 1024 + 1024) * FLOAT
    hidden, side = 32 * 4096 * FLOAT, 32 * 1024 * FLOAT  # activations; inputs, targets and outputs are a `side` each
    run = run_scenario(BY_NAME["mlp"])
    assert weights == 33_574_912
    assert run.at(0, "load")["allocated"] == weights
    for step, state in ((1, 0), (2, 2 * weights), (5, 2 * weights)):
        assert run.at(step, "between")["allocated"] == weights + state + 2 * side
        assert run.at(step, "forward")["allocated"] == weights + state + 3 * side + hidden
        # mse_loss reduces in place: the scalar it returns keeps storage for every element
        assert run.at(step, "backward")["allocated"] == 2 * weights + state + 4 * side
        assert run.at(step, "optimizer")["allocated"] == 4 * weights + 4 * side


@pytest.mark.parametrize(
    ("name", "logit", "scaler", "inf"), [("gpt-fp32", 4, 0, 0), ("gpt-bf16", 2, 0, 0), ("gpt-fp16", 2, 8, 4)]
)
def test_mixed_precision_halves_the_logits_and_nothing_that_stays(run_scenario, name, logit, scaler, inf):
    run = run_scenario(BY_NAME[name])
    batch = tokens_and_targets(8)
    logits = 8 * GPT.length * GPT.vocabulary * logit
    assert run.at(0, "load")["requested"] == W_GPT
    assert run.at(3, "between")["requested"] == 3 * W_GPT + batch + scaler
    assert run.at(3, "optimizer")["requested"] == 4 * W_GPT + batch + logits + FLOAT + scaler + inf


def test_bert_large_costs_the_device_1288_mib_to_load(run_scenario):
    embeddings = (30522 + 512 + 2 + 2) * 1024
    layer = 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    heads = (1024 * 1024 + 1024) + (1024 * 2 + 2)
    weights = (embeddings + 24 * layer + heads) * FLOAT
    buffers = 2 * 512 * INT64  # position_ids, token_type_ids
    inputs = (2 * 4 * 512 + 4) * INT64
    run = run_scenario(BY_NAME["bert-large"])
    assert weights / MIB == pytest.approx(1278.47, abs=0.005)
    assert run.at(0, "load")["requested"] == weights + buffers
    assert run.note("device_used_after") - run.note("device_used_before") == 1288 * MIB
    assert run.at(3, "between")["requested"] == 3 * weights + buffers + inputs


def test_convolutions_and_norms_hold_weights_momentum_and_buffers(run_scenario):
    residual = 2 * (64 * 64 * 9) + 2 * 2 * 64
    weights = (64 * 3 * 9 + 64 + 4 * residual + 64 * 10 + 10) * FLOAT
    buffers = 8 * (2 * 64 * FLOAT + INT64)  # running mean and variance, batches seen
    inputs = 16 * 3 * 32 * 32 * FLOAT + 16 * INT64
    run = run_scenario(BY_NAME["cnn"])
    assert run.at(0, "load")["requested"] == weights + buffers
    assert run.at(3, "between")["requested"] == 2 * weights + buffers + inputs


def test_accumulated_gradients_stay_from_the_second_micro_batch_on(run_scenario):
    run = run_scenario(BY_NAME["accumulation"])
    batch = tokens_and_targets(2)
    assert run.at(3, "between", 0)["requested"] == 3 * W_GPT + batch
    assert [run.at(3, "between", n)["requested"] for n in (1, 2, 3)] == [4 * W_GPT + batch] * 3
    assert run.at(3, "optimizer")["requested"] == 4 * W_GPT


@pytest.mark.parametrize("form", ["reentrant", "non-reentrant"])
def test_checkpointing_keeps_the_blocks_inputs_and_little_more(run_scenario, form):
    run = run_scenario(BY_NAME[f"checkpointing-{form}"])
    without = run_scenario(BY_NAME["checkpointing-none"])
    positions, width = 8 * GPT.length, GPT.width * FLOAT
    states = (6 + 1 + 1) * positions * width  # each block's input, the last output, the norm's
    logits = positions * GPT.vocabulary * FLOAT
    norm = 2 * positions * FLOAT  # mean and inverse deviation
    indices = GPT.length * INT64
    kept = run.at(3, "forward")["requested"] - run.at(3, "between")["requested"]
    assert kept == states + logits + norm + indices
    assert without.at(3, "forward")["requested"] > run.at(3, "forward")["requested"]
    assert without.at(3, "optimizer")["requested"] == run.at(3, "optimizer")["requested"]


def test_a_gan_closes_two_steps_and_holds_both_models(run_scenario):
    run = run_scenario(BY_NAME["gan"])

    def perceptron(inputs, hidden, outputs):
        return (inputs * hidden + hidden + hidden * hidden + hidden + hidden * outputs + outputs) * FLOAT

    weights = perceptron(128, 1024, 3072) + perceptron(3072, 1024, 1)
    truth = 2 * 64 * FLOAT
    assert len(run.steps()) == 1 + 2 * 5
    assert run.at(0, "load")["requested"] == weights + truth
    assert run.at(5, "between")["requested"] == 3 * weights + truth + 64 * 3072 * FLOAT


@pytest.mark.parametrize("name", ["eval-between", "generate-between"])
def test_evaluation_leaves_nothing_behind(run_scenario, name):
    run = run_scenario(BY_NAME[name])
    assert run.at(3, "eval")["requested"] == 3 * W_GPT
    assert run.at(3, "between")["requested"] == run.at(4, "between")["requested"] == 3 * W_GPT + tokens_and_targets(8)


def test_activations_follow_the_length(run_scenario):
    run = run_scenario(BY_NAME["variable-lengths"])

    def kept(step):
        return run.at(step, "forward")["requested"] - run.at(step, "between")["requested"]

    assert [kept(step) for step in range(1, 7)] == [kept(step) for step in range(7, 13)]
    # lengths 96, 64, 128, 32 (48 is padded by attention): all but each layer's seed and offset of its dropout is linear
    fixed = 2 * kept(5) - kept(3)
    assert fixed == (0 if OLDER_TORCH else GPT.layers * 2 * INT64)
    assert kept(2) == 3 * kept(5) - 2 * fixed
    assert kept(4) == 4 * kept(5) - 3 * fixed


def test_a_tied_embedding_is_counted_once(run_scenario):
    tied, untied = run_scenario(BY_NAME["tied-embeddings"]), run_scenario(BY_NAME["untied-embeddings"])
    head = GPT.vocabulary * GPT.width * FLOAT
    assert untied.at(0, "load")["requested"] - tied.at(0, "load")["requested"] == head
    assert untied.at(3, "between")["requested"] - tied.at(3, "between")["requested"] == 3 * head


def test_a_sparse_gradient_is_as_large_as_the_rows_looked_up(run_scenario):
    sparse, dense = run_scenario(BY_NAME["sparse-embedding"]), run_scenario(BY_NAME["dense-embedding"])
    rows, table, head = 256 * 8 * 64 * FLOAT, 50_000 * 64 * FLOAT, 65 * FLOAT
    scores = 256 * FLOAT

    def grown(run):
        return run.at(3, "backward")["requested"] - run.at(3, "between")["requested"]

    assert grown(sparse) == rows + head + scores + FLOAT
    assert grown(dense) == table + head + scores + FLOAT


def test_lora_has_gradients_and_state_for_its_adapters_only(run_scenario):
    run = run_scenario(BY_NAME["lora"])
    adapters = GPT.layers * (8 * GPT.width + 3 * GPT.width * 8) * FLOAT
    batch, logits = tokens_and_targets(4), 4 * GPT.length * GPT.vocabulary * FLOAT
    assert run.at(0, "load")["requested"] == W_GPT + adapters
    assert run.at(3, "between")["requested"] == W_GPT + 3 * adapters + batch
    assert run.at(3, "backward")["requested"] == W_GPT + 4 * adapters + batch + logits + FLOAT


def test_an_average_of_the_weights_is_exactly_one_more_copy(run_scenario):
    run, without = run_scenario(BY_NAME["ema"]), run_scenario(BY_NAME["ema-clean"])
    assert without.at(0, "load")["requested"] == PERCEPTRON
    for step, phase in ((0, "load"), (1, "between"), (3, "forward"), (3, "backward"), (5, "optimizer")):
        assert run.at(step, phase)["requested"] - without.at(step, phase)["requested"] == PERCEPTRON


def test_a_gradient_penalty_leaves_weights_gradients_and_state(run_scenario):
    run = run_scenario(BY_NAME["double-backward"])
    weights = (512 * 1024 + 1024 + 1024 + 1) * FLOAT
    assert run.at(3, "between")["requested"] == 3 * weights + 64 * 512 * FLOAT
    assert [entry["phase"] for entry in run.steps()[3]["phases"]].count("backward") == 2


def test_a_loss_from_the_weights_alone_needs_no_forward(run_scenario):
    run = run_scenario(BY_NAME["loss-without-root"])
    assert [entry["phase"] for entry in run.steps()[2]["phases"]] == ["backward", "optimizer"]
    # only the head's weight gets a gradient in an even step, the rest keep none
    head = GPT.vocabulary * GPT.width * FLOAT
    assert run.at(4, "optimizer")["requested"] == 3 * W_GPT + head + tokens_and_targets(4) + FLOAT


@pytest.mark.parametrize("name", ["compile-module", "compile-inplace", "compile-fullgraph", "compile-inductor"])
def test_a_compiled_model_is_one_graph_and_holds_the_same_bytes(run_scenario, name):
    run = run_scenario(BY_NAME[name])
    config = GPTConfig(layers=1, width=128, vocabulary=1024)
    assert (run.note("graphs"), run.note("breaks")) == (1, 0)
    assert run.at(4, "between")["requested"] == 3 * config.parameters * FLOAT + tokens_and_targets(4)


@pytest.mark.parametrize(("name", "logits"), [("hf-trainer", 0), ("hf-trainer-compile", 4 * 64 * 512 * FLOAT)])
def test_hugging_faces_trainer_holds_weights_gradients_and_state(run_scenario, name, logits):
    """Compiled by newer torch, it also holds the logits of the batch, until the next; before transformers 5 masks."""
    run = run_scenario(BY_NAME[name])
    weights = GPTConfig(vocabulary=512, length=64, layers=2, width=128).parameters * FLOAT
    buffers = run.note("buffers")
    assert run.at(0, "load")["requested"] == weights + buffers
    assert len(run.steps()) == 1 + 5
    rest = run.at(3, "optimizer")["requested"] - 4 * weights - buffers
    assert 0 <= rest - logits < 64 * 1024 or (OLDER_TORCH and 0 <= rest < 64 * 1024)


def test_a_skipped_step_is_told_and_changes_nothing(run_scenario):
    run = run_scenario(BY_NAME["scaler-skips"])
    assert [line["step"] for line in run.steps() if line.get("skipped")] == [3, 6]
    assert run.at(3, "between")["requested"] == run.at(4, "between")["requested"] == 3 * PERCEPTRON + BATCH + 8


def test_bytes_after_an_exception_are_those_of_a_step_without_one(run_scenario):
    for where in ("forward", "backward"):
        run = run_scenario(BY_NAME[f"exception-{where}"])
        assert len(run.steps()) == 1 + 4
        assert run.at(3, "optimizer")["requested"] == run.at(4, "optimizer")["requested"]
