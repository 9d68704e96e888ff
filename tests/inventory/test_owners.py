"""What the owners hold is what PyTorch's own allocator, on a virtual GPU, was asked for: to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture
def looked_at(virtual_gpu: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The lines of one rank's `beside.py`."""

    def look(*words: str, ranks: int = 1) -> list[dict[str, Any]]:
        gpu = virtual_gpu(devices=ranks)
        environment = {
            **gpu.environment,
            "GPUMON_GOVERNOR": "off",
            "CUBLAS_WORKSPACE_CONFIG": ":0:0",  # before 2.15 torch keeps its workspaces, owned by nobody
        }
        ended = gpu.forks.run([str(HERE / "beside.py"), *words], environment, tmp_path, ranks=ranks)
        if "cannot import name 'fully_shard'" in ended.err[0]:
            pytest.skip("this torch has FSDP2 only in its private modules")
        assert not any(ended.codes), ended
        return [json.loads(line) for line in ended.out[0].splitlines() if line.startswith('{"rank"')]

    return look


def of_phase(lines, phase):
    return [line for line in lines if line["phase"] == phase]


@pytest.mark.parametrize("words", [["gpt.py"], ["mlp.py"], ["tied_embeddings.py"], ["lora.py"]])
def test_between_steps_only_the_batch_is_unnamed(looked_at, words):
    lines = looked_at(*words)
    inputs = of_phase(lines, "forward")[0]["inputs"]
    assert inputs > 0
    # inputs and targets are made before the forward that names them
    assert {line["rest"] for line in of_phase(lines, "between")} == {inputs}


@pytest.mark.parametrize("words", [["gpt.py"], ["sparse_embedding.py"], ["gan.py"], ["cnn.py"]])
def test_a_step_of_the_optimizer_adds_nothing_unnamed(looked_at, words):
    lines = looked_at(*words)
    for backward, optimizer in zip(of_phase(lines, "backward"), of_phase(lines, "optimizer"), strict=True):
        assert optimizer["rest"] == backward["rest"]
        assert optimizer["gradients"] == backward["gradients"] > 0


def test_adamw_keeps_twice_the_bytes_of_its_parameters(looked_at):
    last = looked_at("gpt.py")[-1]
    assert last["weights"] == last["gradients"] == last["optimizer"] // 2


@pytest.mark.parametrize("view", [False, True])
def test_ddp_buckets_hold_a_copy_of_the_gradients_or_the_gradients_themselves(looked_at, view):
    lines = looked_at("ddp.py", *(["--bucket-view"] if view else []), ranks=2)
    assert of_phase(lines, "load")[0]["rest"] == 0
    assert {line["buckets"] for line in lines} == {lines[0]["weights"]}
    assert {line["gradients"] for line in of_phase(lines, "backward")} == {0 if view else lines[0]["weights"]}
    inputs = of_phase(lines, "forward")[0]["inputs"]
    assert {line["rest"] for line in of_phase(lines, "between")} == {inputs}


def test_fsdp2_counts_shards_as_weights_and_what_it_gathers_as_buckets(looked_at):
    lines = looked_at("fsdp2.py", "--fake-world", "8")
    between, forward, optimizer = (of_phase(lines, phase)[-1] for phase in ("between", "forward", "optimizer"))
    assert between["weights"] == forward["weights"] == optimizer["gradients"] == optimizer["optimizer"] // 2
    assert (between["buckets"], optimizer["buckets"]) == (0, 0)
    assert forward["buckets"] > forward["weights"]  # the root stays gathered from its forward to its backward
    assert between["rest"] == forward["inputs"]
    assert of_phase(lines, "load")[0]["rest"] == 0


def test_a_block_is_rounded_as_the_allocator_rounds_it(virtual_gpu):
    def script():
        import torch

        from gpumon_agent.units import rounded

        for nbytes in (1, 512, 513, 5_000):
            kept = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            assert torch.cuda.memory_allocated() == rounded(nbytes)
            del kept

    virtual_gpu().run(script)
