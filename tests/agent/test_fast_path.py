"""In quiet steps torch calls a watched model's `forward` on its fast path: for that one call our dicts look empty."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.overrides import TorchFunctionMode

from gpumon_agent import frames
from gpumon_agent.hooks import torch_hooks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.callers: list[str] = []  # of `forward`: torch's `_call_impl` on the fast path, else its `inner`

    def forward(self, batch: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.callers.append(sys._getframe(1).f_code.co_name)
        return self.inner(batch) * scale


def train(model: Model, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4), scale=2.0).sum().backward()
    optimizer.step()


@pytest.fixture
def idle(resting: Any) -> tuple[Model, torch.optim.Optimizer, Any]:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters())
    resting(model, optimizer)
    while not resting.agent.phases.quiet_mark.idle:
        train(model, optimizer)
    train(model, optimizer)
    model.callers.clear()
    return model, optimizer, resting.agent.phases


def test_a_quiet_forward_is_called_on_torchs_fast_path(idle: Any) -> None:
    model, optimizer, phases = idle
    train(model, optimizer)
    assert model.callers == ["_call_impl"]
    phases.read_soon()
    train(model, optimizer)  # the last quiet one
    train(model, optimizer)
    assert model.callers == ["_call_impl", "_call_impl", "inner"]


def test_the_users_hooks_are_called_and_the_forward_counts_once(idle: Any) -> None:
    model, _, phases = idle
    seen: list[str] = []
    for register in (
        lambda: model.register_forward_pre_hook(lambda *_: seen.append("before")),
        lambda: model.register_forward_hook(lambda *_: seen.append("after")),
        lambda: modules.register_module_forward_pre_hook(lambda each, _: seen.append(type(each).__name__)),
    ):
        registered = register()
        passed = phases.quiet_mark.passed
        model(torch.ones(2, 4))
        registered.remove()
        assert phases.quiet_mark.passed == passed + 1
    assert seen == ["before", "after", "Model", "Linear"]


def test_a_shallow_copy_shares_the_hooks_and_is_no_forward_of_the_model(idle: Any) -> None:
    model, _, phases = idle
    other = copy.copy(model)
    assert other._forward_pre_hooks is model._forward_pre_hooks
    passed = phases.quiet_mark.passed
    other(torch.ones(2, 4))
    assert phases.quiet_mark.passed == passed


def test_a_batch_with_a_new_shape_is_seen_among_positional_and_named_arguments(idle: Any) -> None:
    model, _, phases = idle
    model(batch=torch.ones(2, 4))
    assert model.callers.pop() == "_call_impl"  # its shape is known
    for args, kwargs in (((torch.ones(3, 4),), {}), ((), {"batch": torch.ones(5, 4)})):
        phases._governor._wakes_ns = 0  # it would cost too much to read it: it is predicted only
        model(*args, **kwargs)
        assert model.callers.pop() == "inner"


def test_a_mode_of_the_user_does_not_see_us_read_the_shapes(idle: Any) -> None:
    model, _, phases = idle
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(function, "__name__", str(function)))
            return function(*args, **(kwargs or {}))

    batch = torch.ones(2, 4)
    passed = phases.quiet_mark.passed
    with Mode():
        model(batch)
    assert phases.quiet_mark.passed == passed + 1
    assert "__get__" not in seen


@pytest.mark.parametrize("hooks", ["in Python"], indirect=True)
def test_what_fails_in_the_look_at_a_call_does_not_reach_the_training(
    idle: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, _, phases = idle
    monkeypatch.setattr(torch_hooks, "_read_call", lambda frame: 1 / 0)
    passed = phases.quiet_mark.passed
    model(torch.ones(2, 4))
    assert phases.quiet_mark.passed == passed + 1  # the hook has done it
    model(torch.ones(2, 4))
    assert model.callers == ["inner", "inner"]
    assert torch_hooks.guard.failures.pop("forward") == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_arguments_of_a_running_call_are_read() -> None:
    read: list[Any] = []
    batch = torch.ones(2, 4)

    class Reads(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> None:
            frame = sys._getframe(1)
            assert torch_hooks._read_call is not None
            read.extend(torch_hooks._read_call(frame))

    model = Reads()
    model(batch, factor=2)
    assert (read[0], read[1][0], read[2]) == (model, batch, {"factor": 2})
    assert frames.call_reader(torch_hooks.CALL) is not None
