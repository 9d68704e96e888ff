"""What is told of the place at which an allocation failed: the innermost frames, and parameters of that size."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.utils._python_dispatch
from torch import nn

from gpumon_agent.oom import failure_site

MIB = 1 << 20


def a_model_of(mib: int, layers: int = 1) -> nn.Module:
    """Layers with a weight of so many MiB each, which take no memory."""
    return nn.Sequential(*(nn.Linear(256, mib * 1024, bias=False, device="meta") for _ in range(layers)))


@pytest.mark.parametrize(
    ("mib", "requested", "found"),
    [
        (22, 22, True),
        (21, 22, True),  # the allocator asks the driver for whole segments of 2 MiB
        (21, 24, False),
        (23, 22, False),
        (20, 20, False),  # small enough for a segment of many tensors, so its size says nothing
    ],
)
def test_a_parameter_has_the_size_if_the_allocator_would_ask_for_as_much(mib: int, requested: int, found: bool) -> None:
    same = failure_site.same_size([a_model_of(mib)], requested * MIB)
    assert [each.path for each in same] == ["0.weight"] * found


def test_of_many_equal_layers_eight_are_named() -> None:
    """They are shown in one line."""
    same = failure_site.same_size([a_model_of(22, layers=5), a_model_of(22, layers=5)], 22 * MIB)
    assert len(same) == 8


def test_of_a_deep_recursion_the_innermost_24_frames_are_told() -> None:
    def descends(levels: int) -> failure_site.FailureSite:
        return descends(levels - 1) if levels else failure_site.read([], threading.get_ident())

    stack = descends(100).stack
    assert len(stack) == 24
    assert all(frame.endswith(" in descends") for frame in stack)


class _AsksInBackward(torch.utils._python_dispatch.TorchDispatchMode):
    """What is told at each operation of a backward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.told: dict[str, set[str | None]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        told = failure_site.read([self.model], threading.get_ident()).module
        self.told.setdefault(str(operation), set()).add(told)
        return operation(*args, **kwargs or {})


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 4)
        self.left, self.right = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.up(self.norm(x))) * (self.left * self.right)


@pytest.mark.parametrize("autocast", [False, True])
def test_in_backward_the_module_is_told_whose_parameters_the_operator_took(autocast: bool) -> None:
    model = nn.Sequential(_Block(), nn.ModuleDict({"head": nn.Linear(4, 4)}))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model[1]["head"](model[0](torch.ones(2, 4))).sum()  # type: ignore[index]
    with _AsksInBackward(model) as asks:
        loss.backward()
    assert asks.told["aten.mm.default"] == {"1.head", "0.up"}
    assert asks.told["aten.native_layer_norm_backward.default"] == {"0.norm"}
    assert asks.told["aten.gelu_backward.default"] == {None}  # no parameter tells whose it is
    assert asks.told["aten.mul.Tensor"] == {"0", None}  # the block's own, and the product of two results


@pytest.mark.parametrize(("steps", "told"), [(3, "Linear"), (4, None)])
def test_a_parameter_is_the_operators_up_to_three_steps_before_it(steps: int, told: str | None) -> None:
    """autocast's copy, a transposition and a view; what is farther away may be another module's."""
    model = nn.Linear(4, 4, bias=False)
    weight: torch.Tensor = model.weight
    for _ in range(steps):
        weight = weight.neg()
    loss = torch.ones(2, 4, requires_grad=True).mm(weight).sum()
    with _AsksInBackward(model) as asks:
        loss.backward()
    assert asks.told["aten.mm.default"] == {told}


def test_outside_a_backward_no_module_is_told() -> None:
    assert failure_site.read([nn.Linear(4, 4)], threading.get_ident()).module is None
