"""One call of C++ says the same of owners, inputs and activations as Python."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumon_agent.attribution.activations import Activations
from gpumon_agent.attribution.graph import Places
from gpumon_agent.attribution.inventory import Inventory

CPU = torch.device("cpu")


class Reader:
    """What reads the same model in one of two ways."""

    def __init__(self, native: str, monkeypatch: pytest.MonkeyPatch, model: nn.Module, optimizer: Any) -> None:
        monkeypatch.setenv("GPUMON_NATIVE", native)
        self.inventory = Inventory()
        self.inventory.watch(model, [optimizer])
        self.activations = Activations(Places, pytest.fail, limited=False)
        self.in_one_call = 0

    def note(self, tensors: list[Tensor]) -> None:
        self.activations._note([(each, (0, f"{each.numel()}")) for each in tensors], ())

    def look(self, *, fresh: bool, beside: list[int]) -> tuple[object, ...]:
        """`beside`: identities of storages that something else claims in between."""
        owners = self.inventory.owners(CPU, fresh=fresh, living=self.activations.storages)
        claimed = self.inventory.claimed
        self.in_one_call += claimed.seen >= 0
        claimed.others.update(each for each in beside if each not in claimed)
        saved = self.activations.alive(-1, claimed)
        found = sorted(saved), {each for each in self.known if each in claimed}
        return owners, saved.nbytes, *found

    known: list[int]


class Wrapper(Tensor):  # type: ignore[misc]
    """Its memory is that of another tensor."""

    inner: Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


def identity(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


@pytest.mark.parametrize("seed", range(6))
def test_c_says_the_same_as_python(native_reader: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chosen = random.Random(seed)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(30)])
    model[1].register_buffer("scale", torch.ones(100))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = list(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    native, python = (Reader(each, monkeypatch, model, optimizer) for each in ("on", "off"))
    tensors: list[Tensor] = []
    for _ in range(60):
        for parameter in chosen.sample(parameters, 3):
            parameter.grad = chosen.choice((None, torch.ones_like(parameter)))
        tensors += [torch.ones(chosen.choice((0, 1, 5, 90))) for _ in range(chosen.choice((0, 2, 30)))]
        chosen.shuffle(tensors)
        del tensors[: chosen.choice((0, 5, 30))]
        some = chosen.choice((model[2].weight, model[3].weight.data, model[4].weight.grad, model[1].scale))
        given: list[Tensor | None] = [*chosen.choices([*tensors, torch.ones(2)], k=chosen.choice((0, 3))), some]
        if chosen.random() < 0.2:
            given.append(wrapper := torch.ones(7).as_subclass(Wrapper))
            wrapper.inner = torch.ones(9)
        if chosen.random() < 0.2:
            given.append(torch.ones(3, requires_grad=True))
            given[-1].grad = torch.ones(3)  # type: ignore[union-attr]
        if chosen.random() < 0.1:
            given += [torch.ones(1) for _ in range(70)]
        saved = chosen.sample([*tensors, *given[:1], model[5].weight.detach()], len(tensors) // 2 + 1)
        if chosen.random() < 0.1:
            model[6].weight = nn.Parameter(torch.ones(4, chosen.choice((4, 8))))
        for each in (native, python):
            each.known = [identity(tensor) for tensor in (*tensors, *parameters)]
            each.inventory.inputs(tuple(given), {})
            each.note([tensor for tensor in saved if tensor is not None])
        if chosen.random() < 0.3:
            given[0] = None
        beside = chosen.sample([identity(tensor) for tensor in tensors], min(len(tensors), chosen.choice((0, 0, 2))))
        for fresh in (False, chosen.random() < 0.2):
            assert native.look(fresh=fresh, beside=beside) == python.look(fresh=fresh, beside=beside)
    assert native.in_one_call > 20
    assert python.in_one_call == 0


def test_a_tensor_that_is_input_and_activation_counts_once(
    native_reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(4, 4)
    reader = Reader("on", monkeypatch, model, torch.optim.SGD(model.parameters(), lr=0.1))
    reader.known = []
    batch, saved = torch.ones(10), torch.ones(20)
    reader.inventory.inputs((batch, batch), {})
    reader.note([batch, saved, model.weight.detach()])
    for _ in range(3):
        owners, activations, *_ = reader.look(fresh=True, beside=[])
    assert (owners.inputs, activations) == (40, 80)  # type: ignore[attr-defined]
    assert reader.in_one_call == 2


def test_when_the_only_activation_is_gone_there_is_none(native_reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 4)
    reader = Reader("on", monkeypatch, model, torch.optim.SGD(model.parameters(), lr=0.1))
    reader.known = []
    saved = torch.ones(20)
    reader.note([saved])
    assert reader.look(fresh=True, beside=[])[1] == 80
    del saved
    assert [reader.look(fresh=False, beside=[])[1] for _ in range(3)] == [0, 0, 0]
    assert reader.in_one_call == 3
