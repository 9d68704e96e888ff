"""Training with torch.func: the model is called with parameters that are not its own, often without an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import gpumon_agent
from gpumon_agent import shim, wire
from gpumon_agent.hooks import model_discovery

Parameters = dict[str, Tensor]


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


@pytest.fixture
def found(watch: Any) -> Iterator[Any]:
    """The agent of a process that `gpumon run` launched: it looks for models itself."""
    finder = model_discovery.install(shim._ToAgent())
    yield watch
    finder.stop()


def loss_of(model: nn.Module) -> Callable[[Parameters, Tensor], Tensor]:
    return lambda parameters, x: functional_call(model, parameters, (x,)).square().mean()


def own(model: nn.Module) -> Parameters:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def kinds(found: Any) -> list[str]:
    return [type(model).__name__ for _, model in found.agent._indexed()]


def each_sample(loss: Callable[[Parameters, Tensor], Tensor]) -> Callable[[Parameters, Tensor], Parameters]:
    gradients = vmap(grad(loss), in_dims=(None, 0))
    return lambda parameters, x: {name: each.mean(0) for name, each in gradients(parameters, x).items()}


@pytest.mark.parametrize("gradients_of", [grad, each_sample], ids=["grad", "vmap"])
@pytest.mark.parametrize("marked", [False, True], ids=["unmarked", "marked"])
def test_a_loop_without_an_optimizer_has_its_model(found: Any, gradients_of: Any, marked: bool) -> None:
    model, unused = Net(), nn.Linear(4, 4)
    parameters, gradients = own(model), gradients_of(loss_of(model))
    for _ in range(8):
        changes = gradients(parameters, torch.randn(3, 8))
        parameters = {name: each - 0.1 * changes[name] for name, each in parameters.items()}
        if marked:
            gpumon_agent.step()
    assert kinds(found) == ["Net"]
    assert not found.agent.hooks.entered(unused)
    if marked:
        assert len(found.steps()) == 8
        assert found.words()[-1] == ["between", "forward", "backward", "optimizer"]
        assert found.steps()[-1].input_shapes in (((3, 8),), ((8,),))
        assert not [text for text in found.notices() if "without an optimizer" in text]
    else:
        assert found.words()[0][-3:] == ["between", "forward", "backward"]
        assert [text for text in found.notices() if "without an optimizer" in text]
    assert not [text for text in found.notices() if text.startswith("Net of")]


@pytest.mark.parametrize("whose", ["the model's", "copies"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_an_optimizer_over_the_parameters_steps_as_usual(found: Any, whose: str, how: str) -> None:
    model = Net()
    leaves = dict(model.named_parameters())
    if whose == "copies":
        leaves = {name: each.detach().clone().requires_grad_() for name, each in leaves.items()}
    optimizer, loss = torch.optim.AdamW(leaves.values()), loss_of(model)
    for _ in range(8):
        if how == "grad":
            changes = grad(loss)({name: each.detach() for name, each in leaves.items()}, torch.randn(3, 8))
            for name, each in leaves.items():
                each.grad = changes[name]
        else:
            optimizer.zero_grad()
            loss(leaves, torch.randn(3, 8)).backward()
        optimizer.step()
    assert kinds(found) == ["Net"]
    assert len(found.steps()) == 8
    assert found.words()[-1] == ["between", "forward", "backward", "optimizer"]
    (told,) = [event for event in found.agent.picture() if isinstance(event, wire.Model)]
    assert [(each.kind, each.parameters) for each in told.optimizers] == [("AdamW", 8 * 16 + 16 + 16 * 8 + 8)]


def test_what_is_only_called_beside_it_is_let_go(found: Any) -> None:
    model, teacher = Net(), nn.Linear(8, 8)
    parameters = own(model)
    for _ in range(8):
        x = torch.randn(3, 8)
        with torch.no_grad():
            target = teacher(x)
        changes = grad(lambda p, x, y: (functional_call(model, p, (x,)) - y).square().mean())(parameters, x, target)
        parameters = {name: each - 0.1 * changes[name] for name, each in parameters.items()}
        gpumon_agent.step()
    assert kinds(found) == ["Net"]
    assert found.words()[-1] == ["between", "forward", "backward", "optimizer"]


def test_a_model_called_by_functions_of_one_that_is_called_by_hand_is_let_go(found: Any) -> None:
    """Between a model's forward and who calls the model by hand there are ten frames at most."""
    teacher = Net()

    class Student(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) - taught(input, 3)

    def taught(x: Tensor, levels: int) -> Tensor:
        return taught(x, levels - 1) if levels else teacher(x)

    model = Student(8, 8)
    parameters, gradients = own(model), grad(loss_of(model))
    for _ in range(8):
        changes = gradients(parameters, torch.randn(3, 8))
        parameters = {name: each - 0.1 * changes[name] for name, each in parameters.items()}
    assert kinds(found) == ["Student"]


@pytest.mark.parametrize("others", [20, 90])
def test_a_model_called_by_hand_is_looked_for_among_the_newest_64(found: Any, others: int) -> None:
    """Each of them is hooked meanwhile."""
    model = Net()
    beside = [nn.Linear(2, 2) for _ in range(others)]
    parameters, gradients = own(model), grad(loss_of(model))
    for _ in range(8):
        changes = gradients(parameters, torch.randn(3, 8))
        parameters = {name: each - 0.1 * changes[name] for name, each in parameters.items()}
    assert kinds(found) == ["Net"] * (others < 64)
    assert len(beside) == others


class Entered:
    """Notes what training may call. It must not start an agent, as models of tests before it may ask for."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []

    def adopt(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        pass

    def enter(self, module: nn.Module) -> None:
        self.modules.append(module)

    def let_go(self, module: nn.Module) -> None:
        pass

    def entered(self, module: nn.Module) -> bool:
        return False

    def evaluates(self, module: nn.Module) -> None:
        pass

    def homeless(self, optimizer: torch.optim.Optimizer) -> None:
        pass


@pytest.fixture
def entered() -> Iterator[Entered]:
    watcher = Entered()
    finder = model_discovery.install(watcher)
    yield watcher
    finder.stop()


@pytest.mark.parametrize(("parts", "called"), [(4, 4), (5, 0)])
def test_up_to_four_parts_of_a_container_are_models(entered: Entered, parts: int, called: int) -> None:
    """As an actor, two critics and an encoder; more are layers, called by a method of the container."""
    whole = nn.ModuleList([Net() for _ in range(parts)])
    torch.optim.SGD(whole.parameters())
    assert len(entered.modules) == called


def test_a_model_is_looked_for_six_containers_deep(entered: Entered) -> None:
    """Each level is a pass over all parameters."""
    whole: nn.Module = Net()
    for _ in range(20):
        whole = nn.ModuleList([whole])
    torch.optim.SGD(whole.parameters())
    assert len(entered.modules) == 6


def test_tensors_within_a_transform_count_by_the_storage_they_stand_for() -> None:
    from gpumon_agent.storages import storages

    x, seen = torch.randn(3), []

    def looked_at(each: Tensor) -> Tensor:
        seen.append(list(storages(each)))
        return each.sum()

    grad(looked_at)(x)
    vmap(looked_at)(torch.stack((x, x)))
    assert seen[0] == list(storages(x))
    assert [nbytes for _, nbytes, _ in seen[1]] == [24]
