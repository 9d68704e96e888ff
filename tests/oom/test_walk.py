"""The optimizer's walk against PyTorch's own allocator: each request of a first step, and what stood by then."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gpumon.analysis.diagnosis.optimizer_step import (
    FOREACH,
    FUSED,
    LOOP,
    REACH,
    counted,
    gradients,
    loading,
    peak,
    recipe_of,
    step,
)
from gpumon.analysis.estimate.model import Tensor

SHAPES = ((4096, 1024), (9000, 1024), (3000, 1024), (6001, 1000))
"""Large enough for segments of their own; the second and the last leave a remainder."""
GROUPS = (0, 1, 0, 1)
TENSORS = tuple(Tensor(f"p{n}", shape) for n, shape in enumerate(SHAPES))
IN_GROUPS = tuple(replace(tensor, group=group) for tensor, group in zip(TENSORS, GROUPS, strict=True))
LEAST = 3 << 20
"""Of requests that are compared: what is smaller (a mask of 2.9 MiB, a norm, a counter) is left out on both sides."""
WORKSPACE = 8_519_680


def steps(shapes: tuple[tuple[int, int], ...], groups: tuple[int, ...], workspace: int) -> None:
    """Of each optimizer and way, of the first and the third step: the requests with what stood at each, and the peak.

    "name/groups": the parameters in two groups.
    """
    import gc
    import json

    import torch
    from torch import nn

    class Reaching(torch.optim.Optimizer):
        """Creates each parameter's state on reaching it, as many an optimizer written by hand does."""

        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(p)
                        state["exp_avg_sq"] = torch.zeros_like(p)
                    state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                    state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                    root = state["exp_avg_sq"].sqrt().add_(1e-8)
                    p.addcdiv_(state["exp_avg"], root, value=-0.1)

    made = {
        "adamw:loop": lambda p: torch.optim.AdamW(p, foreach=False),
        "adamw:foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "adamw:fused": lambda p: torch.optim.AdamW(p, fused=True),
        "adamw:reach": Reaching,
        "momentum:reach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        "momentum:foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        "sgd:foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        "rmsprop:loop": lambda p: torch.optim.RMSprop(p, foreach=False),
        "rmsprop:foreach": lambda p: torch.optim.RMSprop(p, foreach=True),
        "adagrad:loop": lambda p: torch.optim.Adagrad(p, foreach=False),
        "nadam:loop": lambda p: torch.optim.NAdam(p, foreach=False),
        "nadam:foreach": lambda p: torch.optim.NAdam(p, foreach=True),
        "radam:foreach": lambda p: torch.optim.RAdam(p, foreach=True),
        "adamax:loop": lambda p: torch.optim.Adamax(p, foreach=False),
        "adamax:foreach": lambda p: torch.optim.Adamax(p, foreach=True),
        "adadelta:foreach": lambda p: torch.optim.Adadelta(p, foreach=True),
        "asgd:foreach": lambda p: torch.optim.ASGD(p, foreach=True),
        "adagrad:foreach": lambda p: torch.optim.Adagrad(p, foreach=True),
        "rprop:loop": lambda p: torch.optim.Rprop(p, foreach=False),
        "rprop:foreach": lambda p: torch.optim.Rprop(p, foreach=True),
        "adamw:loop/groups": lambda p: torch.optim.AdamW(p, foreach=False),
        "adamw:foreach/groups": lambda p: torch.optim.AdamW(p, foreach=True),
        "adamw:reach/groups": Reaching,
        "rmsprop:foreach/groups": lambda p: torch.optim.RMSprop(p, foreach=True),
    }
    if hasattr(torch.optim, "Muon"):  # since 2.9
        made["muon:loop"] = torch.optim.Muon
    if hasattr(torch.optim, "Adafactor"):  # since 2.5
        made["adafactor:loop"] = lambda p: torch.optim.Adafactor(p, foreach=False)
        made["adafactor:foreach"] = lambda p: torch.optim.Adafactor(p, foreach=True)
    found = {}
    for name, make in made.items():
        params = [nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        both = [{"params": [p for p, at in zip(params, groups, strict=True) if at == group]} for group in (0, 1)]
        optimizer = make(both if name.endswith("/groups") else params)
        told = []
        for _ in range(3):
            for each in params:
                each.grad = torch.empty_like(each)
            blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
            # without cuBLAS's own: older torch keeps it from optimizer to optimizer, newer gives it back
            begins = sum(b["size"] for b in blocks if b["state"] == "active_allocated" and b["size"] != workspace)
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.memory._record_memory_history(context=None, max_entries=100_000)
            optimizer.step()
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(None)
            allocated_before, requests = begins, []
            for entry in trace:
                if entry["size"] == workspace:
                    continue
                if entry["action"] == "alloc":
                    requests.append([entry["size"], allocated_before])
                    allocated_before += entry["size"]
                elif entry["action"] == "free_completed":
                    allocated_before -= entry["size"]
            told.append({"requests": requests, "peak": torch.cuda.max_memory_allocated()})
        found[name] = told[0], told[2]
        del params, both, optimizer, trace, each
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(found))


def test_every_request_of_a_first_step_and_of_a_later_one(virtual_gpu: Callable[..., Any]) -> None:
    done = virtual_gpu(profile="a100-40", memory="4GiB").run(steps, SHAPES, GROUPS, WORKSPACE)
    measured = json.loads(done.stdout.splitlines()[-1])
    for name, both in measured.items():
        text, _, groups = name.partition("/")
        recipe, way = recipe_of(text)
        assert way is not None
        tensors = IN_GROUPS if groups else TENSORS
        for later, told in enumerate(both):
            events = [event for event in step(tensors, recipe, way, later=bool(later)) if event.bytes > LEAST]
            requests = [(size, stood) for size, stood in told["requests"] if size > LEAST]
            assert [event.bytes for event in events] == [size for size, _ in requests], (name, later)
            for event, (_, stood) in zip(events, requests, strict=True):
                # blocks that served before leave other remainders, up to a MiB each; what is left out stands too
                assert abs(event.allocated_before - stood) <= 2 * len(TENSORS) << 20, (
                    name,
                    later,
                    event.what,
                    event.tensor.name,
                )
            assert all(event.later == bool(later) for event in events)
        highest = both[0]["peak"]
        assert abs(peak(tensors, recipe, way) - highest) <= (2 * len(TENSORS) << 20) + WORKSPACE, name


def test_a_loop_of_asgd_takes_nothing_before_it_averages() -> None:
    """Its average is a copy until step t0. The virtual GPU knows no `mu`, and goes the other way."""
    recipe, way = recipe_of("asgd:loop")
    assert way is not None
    assert [event.what for event in step(TENSORS, recipe, way)] == ["average (ax)"] * len(TENSORS)
    assert not list(step(TENSORS, recipe, way, later=True))


def test_counted_is_what_the_allocator_counts(virtual_gpu: Callable[..., Any]) -> None:
    sizes = [1, 512, 513, 5 << 20, 10 << 20, (10 << 20) + 1, (11 << 20) + 7, (12 << 20) - 512, 2_888_081_664]

    def grown(sizes: list[int]) -> None:
        import torch

        for size in sizes:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            held = torch.empty(size, dtype=torch.uint8, device="cuda")
            print(torch.cuda.memory_allocated() - before)
            del held

    done = virtual_gpu(profile="a100-40").run(grown, sizes)
    assert [counted(size) for size in sizes] == [int(line) for line in done.stdout.split()]


def test_loading_and_gradients_stand_on_what_came_before() -> None:
    assert [event.allocated_before for event in loading(TENSORS)][:2] == [0, counted(TENSORS[0].bytes)]
    weights = sum(counted(t.bytes) for t in TENSORS)
    last, before = list(gradients(TENSORS))[:2]
    assert (last.tensor.name, last.allocated_before) == ("p3", weights)
    assert before.allocated_before == weights + counted(TENSORS[3].bytes)


@pytest.mark.parametrize(
    ("text", "name", "way"),
    [
        ("adamw", "adamw", None), ("AdamW:fused", "adamw", FUSED), ("adamw:reach", "adamw", REACH),
        ("sgd", "sgd", None), ("sgd,momentum=0.9", "momentum", None), ("sgd, momentum=0", "sgd", None),
        ("sgd:foreach,momentum=.9", "momentum", FOREACH), ("rmsprop:loop", "rmsprop", LOOP),
        ("adam8bit", "adamw8bit", None),
    ],
)  # fmt: skip
def test_an_optimizer_by_its_name(text: str, name: str, way: str | None) -> None:
    recipe, said = recipe_of(text)
    assert (recipe.name, said) == (name, way)
