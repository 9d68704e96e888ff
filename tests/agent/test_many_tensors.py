"""A model of very many tensors: no step looks at all of them, and its ledger is exact when it comes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from gpumon_agent import agent as agents
from gpumon_agent import shim, wire
from gpumon_agent.agent import Agent
from gpumon_agent.allocator.devices import Devices
from gpumon_agent.attribution.rolling import Rolling
from gpumon_agent.attribution.unwatched_models import UnwatchedModels
from gpumon_agent.hooks import model_discovery
from gpumon_agent.storages import Pieces

CALLS_MAX = 45_000
"""that the agent makes in one step; to look at each tensor of 20,000, or each of 40,000 modules, takes more"""


class Many(nn.Module):
    """Thousands of parameters, some tied and some views of one storage, all of them used."""

    def __init__(self, count: int = 6_000) -> None:
        super().__init__()
        flat = torch.ones(64)
        self.one = nn.ParameterList(nn.Parameter(torch.ones(1 + at % 3)) for at in range(count // 2))
        self.two = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.ones(2))]) for _ in range(count // 8))
        self.flat = nn.ParameterList(nn.Parameter(flat[4 * at : 4 * at + 4]) for at in range(16))
        self.three = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count - count // 2 - count // 8 - 16))
        self.tied = nn.ParameterList(self.one[:500])
        table = torch.ones(7)
        for module in self.two[:50]:
            module.register_buffer("table", table)

    def forward(self, used: slice) -> Any:
        every = [*self.one, *(each[0] for each in self.two), *self.flat, *self.three]
        return torch.cat(every[used]).sum()


@pytest.fixture
def agent() -> Iterator[Agent]:
    """As in a run with its governor on."""
    made = agents.REGISTRY.agent = Agent("test", publish=False)
    yield made
    made.leave("stopped")
    assert not [failed for failed in made.guard.failures.items() if failed[1]]


def bytes_of(tensors: Any) -> int:
    return sum({each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}.values())


def counted(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """By a plain walk over everything."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return {
        "weights": bytes_of(model.parameters()),
        "buffers": bytes_of(model.buffers()),
        "gradients": bytes_of(p.grad for p in model.parameters() if p.grad is not None),
        "optimizer": bytes_of(value for value in states if isinstance(value, torch.Tensor)),
    }


def ledgers(agent: Agent) -> list[wire.Ledger]:
    return [event for _, event in agent.recorder.drain() if isinstance(event, wire.Ledger)]


def told(ledger: wire.Ledger) -> dict[str, int | None]:
    return {name: getattr(ledger, name) for name in ("weights", "buffers", "gradients", "optimizer")}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, used: slice = slice(None)) -> dict[str, int]:
    """One step; what a walk finds as its optimizer has ended."""
    model(used).backward()
    optimizer.step()
    found = counted(model, optimizer)
    optimizer.zero_grad()
    return found


def test_a_ledger_comes_and_is_exact(agent: Agent) -> None:
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    agent.adopt(model, optimizer)
    seen = 0
    for _ in range(400):
        expected = train(model, optimizer)
        for ledger in ledgers(agent):
            seen += 1
            assert told(ledger) == expected
            assert ledger.phase == wire.OPTIMIZER
        if seen:
            break
    assert seen


def test_a_state_that_all_parameters_share_counts_once(agent: Agent) -> None:
    model = Many(4_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    count = torch.zeros(3)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"count": count, "own": torch.zeros(5), "weight": parameter}
    agent.adopt(model, optimizer)
    for _ in range(400):
        expected = train(model, optimizer)
        expected["optimizer"] -= expected["weights"]  # those are the weights'
        if found := ledgers(agent):
            assert told(found[-1]) == expected
            return
    raise AssertionError("no ledger came")


def test_what_differs_from_step_to_step_is_never_mixed(agent: Agent) -> None:
    """As of experts that are not chosen in every step."""
    model = Many(4_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent.adopt(model, optimizer)
    for step in range(60):
        expected = train(model, optimizer, slice(37 * (step % 7), None, 2 + step % 5))
        assert all(told(ledger) == expected for ledger in ledgers(agent))


def test_state_that_appears_withdraws_the_ledger(agent: Agent) -> None:
    model = Many(4_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent.adopt(model, optimizer)
    first = None
    for step in range(1000):
        expected = train(model, optimizer)
        for ledger in ledgers(agent):
            assert told(ledger) == expected
            if first is not None and step > first + 1:
                return
            if first is None:
                first = step
                optimizer.param_groups[0]["momentum"] = 0.9
    raise AssertionError(f"no ledger came after that of step {first}")


@pytest.mark.parametrize("kind", ["parameters", "modules"])
def test_no_step_looks_at_everything(agent: Agent, kind: str) -> None:
    model: nn.Module
    if kind == "parameters":
        model = Many()
    else:
        model = nn.Sequential(*(nn.Sequential(*(nn.Identity() for _ in range(100))) for _ in range(400)), Last())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    agent.adopt(model, optimizer)
    calls = [0]
    gc.collect()  # models of other tests, whose ends the agent would be told of here

    def count(frame: Any, event: str, _: object) -> None:
        if event in ("call", "c_call") and "gpumon_agent" in frame.f_code.co_filename:
            calls[0] += 1

    most = 0
    for _ in range(30):
        loss = model(slice(None))
        calls[0] = 0
        sys.setprofile(count)
        loss.backward()
        optimizer.step()
        sys.setprofile(None)
        most = max(most, calls[0])
        sys.setprofile(count)
        calls[0] = 0
        model(slice(None))
        sys.setprofile(None)
        most = max(most, calls[0])
        optimizer.zero_grad()
    assert 0 < most < CALLS_MAX


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, _: object) -> torch.Tensor:
        return self.linear(torch.ones(4)).sum()


def test_it_is_described_whole_in_the_end(agent: Agent) -> None:
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    agent.adopt(model, optimizer)
    for _ in range(200):
        train(model, optimizer)
        whole = next((event for event in agent.picture() if isinstance(event, wire.Model)), None)
        if whole is not None and whole.optimizers[0].state_bytes is not None:
            break
    assert whole is not None
    expected = counted(model, optimizer)
    assert (whole.parameter_bytes, whole.buffer_bytes) == (expected["weights"], expected["buffers"])
    assert whole.parameters == whole.optimizers[0].parameters == sum(each.numel() for each in model.parameters())
    assert whole.optimizers[0].state_bytes == expected["optimizer"]
    assert whole.optimizers[0].parameter_bytes == expected["weights"]


class Clock:
    """Of the thread and of the wall: each look at it takes so long."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look_ns: int) -> None:
        self.now = 0
        self.look_ns = look_ns
        for name in ("thread_time_ns", "monotonic_ns"):
            monkeypatch.setattr(f"gpumon_agent.thread_clock.{name}", self)

    def __call__(self) -> int:
        self.now += self.look_ns
        return self.now


def rolling(model: nn.Module, optimizer: torch.optim.Optimizer) -> Rolling:
    return Rolling(lambda: [model], lambda: [optimizer], lambda: None)


@pytest.mark.parametrize(("look_us", "most"), [(10_000, 208), (50, 22 * 208)])
def test_a_slice_ends_within_208_tensors_of_its_millisecond(
    monkeypatch: pytest.MonkeyPatch, look_us: int, most: int
) -> None:
    """A chunk is 64 parameters, each with gradient and state, and two modules that count as 8: then comes the clock."""
    Clock(monkeypatch, look_us * 1000)
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(slice(None)).backward()
    optimizer.step()
    read = rolling(model, optimizer)
    looked = []
    while sum(looked) < 8_000:
        read.look()
        looked.append(read.looked)
    assert most / 2 < max(looked) <= most


@pytest.mark.parametrize("apart", [1, 16, 512])
def test_very_many_entries_are_freed_a_hundredth_at_a_time(apart: int) -> None:
    """A slice of a step frees no more; and not much less, or most slices would only look at the clock."""
    entries: Pieces[bool] = Pieces()
    keys = [at * apart for at in range(12_700)]
    for key in keys:
        entries[key] = True
    left = [len(keys), *(sum(key in entries for key in keys) for _ in entries.clear())]
    assert left[-1] == 0
    assert {before - after for before, after in pairwise(left)} == {100}


@pytest.mark.parametrize("kind", ["modules", "tensors"])
def test_unwatched_models_are_looked_at_in_slices_of_256(kind: str) -> None:
    """Between two of them the clock is asked: a slice is half a millisecond of a training step."""
    finder = model_discovery.install(shim._ToAgent())
    watched = nn.Linear(1, 1)

    def rests() -> int:
        gc.collect()
        slices = UnwatchedModels(lambda: [(0, watched)], lambda _: None).in_slices()
        assert slices is not None
        return list(slices).count(None)

    try:
        before = rests()  # models of other tests
        many = nn.Sequential(*(nn.Identity() for _ in range(2_559))) if kind == "modules" else nn.Module()
        for at in range(2_560 if kind == "tensors" else 1):
            many.register_parameter(f"p{at}", nn.Parameter(torch.ones(1)))
        assert rests() - before == 10
    finally:
        finder.stop()


def test_three_passes_hurry_and_then_sampled_steps_must_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients come and go no two passes agree."""
    Clock(monkeypatch, 0)  # a slice is a whole pass
    model = Many(4_000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    read = rolling(model, optimizer)
    passes = 0
    while read.hurries:
        for parameter in model.parameters():
            parameter.grad = None if passes % 2 else torch.zeros_like(parameter)
        read.look()
        passes += 1
    assert passes == 3


@pytest.mark.parametrize(
    ("model", "whole"),
    [
        (nn.Sequential(*(nn.Identity() for _ in range(500))), True),
        (nn.Sequential(*(nn.Identity() for _ in range(1_000))), False),
        (nn.ParameterList(torch.ones(1) for _ in range(3_000)), True),
        (nn.ParameterList(torch.ones(1) for _ in range(6_000)), False),
    ],
    ids=["500 modules", "1,000 modules", "3,000 tensors", "6,000 tensors"],
)
def test_devices_of_up_to_512_modules_or_4096_tensors_are_known_at_once(model: nn.Module, whole: bool) -> None:
    devices = Devices(lambda: [model], print, bounds=True, tracker=None, tell=print)
    devices.readers()
    assert devices.looking == (not whole)
    devices.stop()


def test_a_description_takes_30_ms_at_once_and_2_ms_of_each_step(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, 1_000_000)
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent.adopt(model, optimizer)
    took = [clock.now // 10**6]
    for _ in range(20):
        before = clock.now
        train(model, optimizer)
        took.append((clock.now - before) // 10**6)
    assert 30 <= took[0] < 40
    assert max(took[1:]) < 12  # with the ledger's slice; each ends with the look that finds it over
