"""The optimizer formulas against PyTorch's own optimizers and allocator, on the virtual GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from scenarios.catalogue import OLDER_TORCH

from gpumon.analysis.estimate.optimizers import state_bytes, temporary_bytes
from gpumon_agent import wire

CASES = [
    (kind, settings)
    for kind, variants in {
        "SGD": [{}, {"weight_decay": 0.1}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"maximize": True},
                {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
        "Adam": [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True}],
        "AdamW": [{}, {"amsgrad": True}, {"maximize": True}],
        "NAdam": [{}, {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True},
                  {"maximize": True}],
        "RAdam": [{}, {"weight_decay": 0.1}, {"maximize": True}],
        "Adamax": [{}, {"weight_decay": 0.1}, {"maximize": True}],
        "Adadelta": [{}, {"weight_decay": 0.1}, {"maximize": True}],
        "Adagrad": [{}, {"weight_decay": 0.1}, {"maximize": True}],
        "ASGD": [{}, {"weight_decay": 0.1}, {"maximize": True}],
        "Rprop": [{}, {"maximize": True}],
        "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}, {"centered": True, "momentum": 0.9},
                    {"weight_decay": 0.1}, {"maximize": True}],
    }.items()
    for settings in variants
]  # fmt: skip
TENSORS, SIDE = 16, 1024
FUSED = [("Adam", {}), ("AdamW", {}), ("SGD", {"momentum": 0.9})]
if not OLDER_TORCH:  # there only on the CPU
    FUSED.append(("Adagrad", {}))


def measure(cases: str) -> None:
    """Prints, per case, state and temporaries in bytes as the allocator counts them."""
    import json

    import torch

    parameters = [torch.nn.Parameter(torch.empty(1024, 1024, device="cuda")) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    figures = []
    for kind, settings in json.loads(cases):
        before = torch.cuda.memory_allocated()
        optimizer = getattr(torch.optim, kind)(parameters, lr=0.1, **settings)
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
        end = torch.cuda.memory_allocated()
        figures.append((end - before, torch.cuda.max_memory_allocated() - end))
        del optimizer
    print(json.dumps(figures))


@pytest.fixture
def on_the_allocator(virtual_gpu: Callable[..., Any]) -> Callable[[list[Any]], list[tuple[int, int]]]:
    def run(cases: list[Any]) -> list[tuple[int, int]]:
        printed = virtual_gpu(profile="a100-40").run(measure, json.dumps(cases)).stdout
        return [(state, brief) for state, brief in json.loads(printed.splitlines()[-1])]

    return run


def described(kind: str, settings: dict[str, Any], *, foreach: bool, fused: bool = False) -> wire.Optimizer:
    size = TENSORS * SIDE * SIDE
    as_text = {name: str(value) for name, value in settings.items()}
    return wire.Optimizer(kind, size, 4 * size, None, foreach, fused, as_text)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
def test_state_and_temporaries_are_the_allocator_s(
    on_the_allocator: Callable[[list[Any]], list[tuple[int, int]]], foreach: bool
) -> None:
    measured = on_the_allocator([(kind, {**settings, "foreach": foreach}) for kind, settings in CASES])
    tensor = 4 * SIDE * SIDE
    wrong = []
    for (kind, settings), (state, brief) in zip(CASES, measured, strict=True):
        optimizer = described(kind, settings, foreach=foreach)
        stated, needed = state_bytes(optimizer), temporary_bytes(optimizer, tensor)
        assert stated is not None
        assert needed is not None
        masks = kind == "Rprop" and foreach
        by_value = kind == "ASGD" and not foreach  # one more once it averages, and values mean nothing on this device
        slack = 1.5 * tensor if masks or by_value else 0.01 * tensor + 1024 * TENSORS
        if abs(stated - state) > 3 * 512 * TENSORS or abs(needed - brief) > slack:
            wrong.append(f"{kind} {settings}: state {stated} for {state}, temporaries {needed} for {brief}")
    assert not wrong


def test_a_fused_step_needs_no_temporaries(
    on_the_allocator: Callable[[list[Any]], list[tuple[int, int]]],
) -> None:
    measured = on_the_allocator([(kind, {**settings, "fused": True}) for kind, settings in FUSED])
    for (kind, settings), (state, brief) in zip(FUSED, measured, strict=True):
        optimizer = described(kind, settings, foreach=False, fused=True)
        assert abs((state_bytes(optimizer) or 0) - state) <= 2 * 512 * TENSORS
        assert brief <= 512
        assert temporary_bytes(optimizer) == 0


def test_an_optimizer_nobody_knows_is_not_guessed_at() -> None:
    optimizer = described("Lion8bit", {}, foreach=True)
    assert state_bytes(optimizer) is temporary_bytes(optimizer) is None


def test_groups_that_differ_count_as_the_dearer_one() -> None:
    optimizer = wire.Optimizer("SGD", 10, 40, None, True, False, {"momentum": "0 | 0.9", "weight_decay": "0"})
    assert state_bytes(optimizer) == 40
