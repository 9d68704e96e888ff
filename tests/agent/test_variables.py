"""What only variables hold is counted once, by the variable's name; no code of the user's runs, nothing is kept."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from gpumon_agent.attribution.kept import Claimed
from gpumon_agent.attribution.variables import ENTRIES_MAX, HeldByVariables, Variables

CPU = -1


def look(
    claimed: Claimed, variables: Variables | None = None, *, fresh: bool = True, graphs: bool = True
) -> HeldByVariables:
    """As a module of torch's would stand between."""
    variables = variables or Variables()
    if fresh:
        variables.forget()
    names = {"__name__": "torch.nn", "v": variables, "claimed": claimed, "graphs": graphs}
    held: HeldByVariables = eval(f"v.held(claimed, {CPU}, graphs=graphs)", names)
    return held


def of(held: HeldByVariables, function: str) -> dict[str, int]:
    """Names of variables of one function → tensors."""
    return {each.name: each.count for each in held.holders if each.function == function}


class Average:
    """As diffusers' EMAModel."""

    def __init__(self) -> None:
        self.shadow_params = [torch.ones(1_000) for _ in range(50)]


class Refuses:
    """Whatever it is asked, it notes."""

    asked: list[str] = []  # noqa: RUF012 - read by name

    def __init__(self) -> None:
        self.__dict__["kept"] = torch.ones(8_000)

    def __getattribute__(self, name: str) -> Any:
        if name != "__dict__":
            Refuses.asked.append(name)
        return object.__getattribute__(self, name)

    def __len__(self) -> int:
        Refuses.asked.append("len")
        return 0

    def __iter__(self) -> Any:
        Refuses.asked.append("iter")
        return iter(())

    def __bool__(self) -> bool:
        Refuses.asked.append("bool")
        return True

    def __eq__(self, other: object) -> bool:
        Refuses.asked.append("eq")
        return False

    __hash__ = None  # type: ignore[assignment]

    @property
    def large(self) -> Tensor:
        Refuses.asked.append("large")
        return torch.ones(9_000)


def test_a_variable_an_entry_and_an_attribute_are_counted_once_and_named() -> None:
    def train() -> HeldByVariables:
        average, alias = Average(), torch.ones(70_000)
        data = [(torch.ones(40_000), torch.ones(20_000)), {"again": alias}]
        batch = OrderedDict(pixels=torch.ones(30_000))
        held = look(Claimed())
        del average, alias, data, batch
        return held

    held = train()
    assert of(held, "train") == {"alias": 1, "data": 3, "average.shadow_params": 50, "batch": 1}
    at = {each.name: each.where for each in held.holders}
    line = train.__code__.co_firstlineno
    assert at["data"] == f"test_variables.py:{line + 2}"
    assert {each.kind for each in held.holders} == {"local"}


def test_what_another_line_has_is_not_counted() -> None:
    def train(claimed: Claimed) -> dict[str, int]:
        weights, other = torch.ones(50_000), torch.ones(40_000)
        claimed.others.add(weights.untyped_storage()._cdata)
        held = of(look(claimed), "train")
        del other
        return held

    assert train(Claimed()).keys() == {"other"}


def test_what_has_a_graph_is_counted_as_soon_as_the_graph_was_walked() -> None:
    """Before, nobody knows what of it is an activation."""

    def train(*, graphs: bool, many: int = 2) -> dict[str, int]:
        weights = {f"{i}": torch.ones(5_000, requires_grad=True) for i in range(many)}
        gradients = torch.autograd.grad(
            sum(w.square().sum() for w in weights.values()), weights.values(), create_graph=True
        )
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        assert all(not each.is_leaf for each in (*gradients, *fast.values()))
        variables = Variables()
        look(Claimed(), variables, graphs=not graphs)
        held = of(look(Claimed(), variables, fresh=False, graphs=graphs), "train")
        del fast, gradients
        return held

    assert train(graphs=True) == {"weights": 2, "gradients": 2, "fast": 2}
    assert train(graphs=True, many=40) == {"weights": 40, "gradients": 40, "fast": 40}
    assert train(graphs=False) == {"weights": 2}
    assert train(graphs=False, many=40) == {"weights": 40}


def test_what_an_optimizer_keeps_while_it_calls_the_model_is_counted() -> None:
    model = nn.Linear(100, 100)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    looks: list[dict[str, int]] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 100)).square().mean()
        loss.backward()
        looks.append(of(look(Claimed()), "step"))
        return loss

    optimizer.step(closure)
    assert looks[0] == {}
    assert looks[-1]["flat_grad"] == 1


def test_no_code_of_the_users_runs() -> None:
    def train() -> HeldByVariables:
        refuses, within = Refuses(), [Refuses()]
        Refuses.asked.clear()
        held = look(Claimed())
        assert not Refuses.asked
        del refuses, within
        return held

    assert of(train(), "train") == {"refuses.kept": 1}


def test_a_look_keeps_nothing_alive() -> None:
    def dropped() -> list[bool]:
        average = Average()
        tensor, owner = weakref.ref(average.shadow_params[7]), weakref.ref(average)
        variables = Variables()
        look(Claimed(), variables)
        look(Claimed(), variables, fresh=False)
        del average
        return [tensor() is None, owner() is None]

    gc.disable()
    try:
        assert dropped() == [True, True]
    finally:
        gc.enable()


def test_what_many_hold_is_summed_again_as_soon_as_they_are_others() -> None:
    def train() -> list[int]:
        variables, kept = Variables(), [torch.ones(100) for _ in range(40)]
        found = [look(Claimed(), variables).nbytes]
        for _ in range(2):
            kept.append(torch.ones(100))
            found.append(look(Claimed(), variables, fresh=False).nbytes)
        kept[:] = [torch.ones(200) for _ in kept]
        return [*found, look(Claimed(), variables, fresh=False).nbytes]

    first, *more = train()
    assert [each - first for each in more] == [400, 800, 42 * 800 - 40 * 400]


def test_a_look_is_bounded_and_a_log_of_numbers_takes_nothing_of_it() -> None:
    def train() -> dict[str, int]:
        log = [0.5] * 10 * ENTRIES_MAX
        many = [torch.ones(1)] * 10 * ENTRIES_MAX
        model = nn.Linear(100, 100)
        kept = [torch.ones(60_000)]
        held = look(Claimed())
        del log, many, model, kept
        return of(held, "train")

    found = train()
    assert found.keys() == {"kept", "model"}


def test_the_eight_innermost_functions_are_read() -> None:
    def called(depth: int) -> int:
        kept = torch.ones(1_000)
        held = called(depth - 1) if depth else look(Claimed()).nbytes
        del kept
        return held

    assert called(20) == 7 * 4_000  # `look` is the eighth


def test_the_four_largest_are_named_and_all_are_counted() -> None:
    def train() -> HeldByVariables:
        a, b, c, d, e, f = (torch.ones(n * 10_000) for n in (1, 6, 2, 5, 3, 4))
        held = look(Claimed())
        del a, b, c, d, e, f
        return held

    held = train()
    assert [each.name for each in held.holders] == ["b", "d", "f", "e"]
    assert held.nbytes == 21 * 40_000


def test_a_list_in_a_list_is_read_and_a_third_within_is_not() -> None:
    def train() -> dict[str, int]:
        near, far = [[torch.ones(1_000)]], [[[torch.ones(2_000)]]]
        held = of(look(Claimed()), "train")
        del near, far
        return held

    assert train() == {"near": 1}


def test_about_four_thousand_entries_are_read_and_no_longer_list() -> None:
    def train(entries: int) -> dict[str, int]:
        kept = [torch.ones(1)] * entries
        held = of(look(Claimed()), "train")
        del kept
        return held

    assert train(3_900) == {"kept": 3_900}  # `look` has 160 others, most of them builtins
    assert train(5_000) == {}


def test_a_few_tensors_are_summed_at_each_boundary_and_forty_once_a_step() -> None:
    def train(many: int) -> list[int]:
        variables, kept = Variables(), [torch.ones(100) for _ in range(many)]
        before = look(Claimed(), variables).nbytes
        kept[many // 2] = torch.ones(200)
        found = [look(Claimed(), variables, fresh=fresh).nbytes - before for fresh in (False, True)]
        del kept
        return found

    assert train(31) == [400, 400]
    assert train(40) == [0, 400]
