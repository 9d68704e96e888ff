"""Activations are what autograd saved, counted by hand, by the module that saved it, and nothing is kept alive."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpumon_agent import agent as agents
from gpumon_agent import wire
from gpumon_agent.attribution import saving
from gpumon_agent.attribution.activations import Activations, Saved
from gpumon_agent.attribution.graph import GraphWalk, Places, TooLarge
from gpumon_agent.attribution.kept import Claimed, Storages
from gpumon_agent.attribution.saving import READABLE

pytestmark = pytest.mark.skipif(not READABLE, reason="this torch does not let its saved tensors be read")
ASKS = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "data"), reason="this torch cannot say whether a tensor was packed"
)
FLOAT = 4


def by_module(model: nn.Module, output: Any) -> dict[str | None, int]:
    """Bytes by path, the model's own parameters and the first linear's input left out as the ledger would."""
    places = Places()
    places.add(0, model)
    seen = {p.untyped_storage()._cdata for p in model.parameters()}
    found: Counter[str | None] = Counter()
    for tensor, place in GraphWalk([output], places).saved:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            found[place[1] if place else None] += storage.nbytes()
    return dict(found)


def test_a_perceptron_keeps_what_its_formula_says() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    x = torch.randn(5, 8)
    # linear: its input; GELU: its input, which is the first linear's output
    assert by_module(model, model(x)) == {"0": 5 * 8 * FLOAT, "1": 5 * 32 * FLOAT, "2": 5 * 32 * FLOAT}


def test_an_operator_belongs_to_the_module_around_what_feeds_it() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.gelu(self.up(x)))

    model = nn.Sequential(nn.Embedding(10, 8), Block(), Block())
    tokens = torch.randint(10, (3,))
    assert by_module(model, model(tokens)) == {
        "0": 3 * 8,  # int64 indices
        "1.up": 3 * 8 * FLOAT,
        "1": 3 * 16 * FLOAT,
        "1.down": 3 * 16 * FLOAT,
        "2.up": 3 * 8 * FLOAT,
        "2": 3 * 16 * FLOAT,
        "2.down": 3 * 16 * FLOAT,
    }


def test_of_a_tied_weight_each_use_belongs_to_the_module_that_uses_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.norm, self.head = nn.Embedding(10, 8), nn.LayerNorm(8), nn.Linear(8, 10, bias=False)
            self.head.weight = self.words.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.words(tokens)))

    model = Tied()
    found = by_module(model, model(torch.randint(10, (3,))))
    assert (found["words"], found["head"]) == (3 * 8, 3 * 8 * FLOAT)


def test_a_frozen_layer_owns_what_is_saved_through_it() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.Tanh())
    model[1].requires_grad_(False)
    assert by_module(model, model(torch.randn(3, 8))) == {"0": 3 * 8 * FLOAT, "2": 3 * 16 * FLOAT}


@ASKS
def test_arguments_of_a_checkpoint_without_reentry_are_found() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(nn.Linear(8, 8), layer)
    output = checkpoint(lambda t: torch.tanh(layer(t)).exp(), model[0](torch.randn(3, 8)), use_reentrant=False)
    assert sum(by_module(model, output).values()) == (3 * 8 + 3 * 8) * FLOAT  # the first's input, and the argument


class OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * 2)
        ctx.aside = [x * 3]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_what_a_custom_function_keeps_on_its_context_is_found() -> None:
    model = nn.Linear(8, 8)
    assert sum(by_module(model, OnContext.apply(model(torch.randn(3, 8)))).values()) == 3 * (3 * 8) * FLOAT


class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.near, ctx.far = [[[x * 3]]], [[[[x * 3]]]]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def test_of_a_context_lists_are_read_three_deep() -> None:
    model = nn.Linear(8, 8)
    assert sum(by_module(model, Nested.apply(model(torch.randn(3, 8)))).values()) == 2 * (3 * 8) * FLOAT


@ASKS
def test_who_packs_what_nobody_can_look_into_is_told_by_name() -> None:
    class Opaque:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

    def unpack_mine(opaque: Opaque) -> torch.Tensor:
        raise AssertionError("a walk unpacks nothing")

    model = nn.Linear(8, 8)
    with torch.autograd.graph.saved_tensors_hooks(Opaque, unpack_mine):
        output = model(torch.randn(3, 8))
    walk = GraphWalk([output], Places())
    assert walk.saved == []
    assert [name.rpartition(".")[2] for name in walk.hidden] == ["unpack_mine"]


def test_a_walk_that_takes_too_long_is_given_up() -> None:
    output = torch.ones(1, requires_grad=True)
    for _ in range(500):
        output = output * 2
    with pytest.raises(TooLarge):
        GraphWalk([output], Places(), budget_ns=0)
    GraphWalk([output], Places())


def test_what_is_known_of_a_graph_holds_for_the_next_of_its_structure() -> None:
    model = nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(4, 4), nn.GELU())))
    places = Places()
    places.add(0, model)
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    x = torch.randn(2, 4)

    def told(walk: GraphWalk) -> Counter[Any]:
        return Counter(
            (place, tensor.shape) for tensor, place in walk.saved if tensor.untyped_storage()._cdata not in weights
        )

    expected = told(GraphWalk([model(x)], places))
    assert len(places.plans) == 1
    again = GraphWalk([model(x)], places, weights=weights)  # follows the plan
    assert (len(places.plans), again.learns, told(again)) == (1, False, expected)
    places.plans.clear()
    first = GraphWalk([model(x)], places, weights=weights)
    followed = GraphWalk([model(x)], places, weights=weights)
    assert told(first) == told(followed) == expected
    assert len(followed.saved) < len(first.saved)  # weights were read once
    model[50].weight.data = torch.randn(4, 4)  # its place in the structure is its own
    assert told(GraphWalk([model(x)], places, weights=weights)) >= expected
    assert GraphWalk([model[:20](x)], places).saved
    assert len(places.plans) == 2


def test_a_walk_without_time_leaves_what_it_learnt_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(layer for _ in range(100) for layer in (nn.Linear(4, 4), nn.GELU())))
    places = Places()
    places.add(0, model)
    expected = Counter((place, tensor.shape) for tensor, place in GraphWalk([model(torch.randn(2, 4))], places).saved)
    places.plans.clear()
    clock = iter(range(10_000))
    monkeypatch.setattr("gpumon_agent.attribution.graph.thread_time_ns", lambda: next(clock))
    learnt: list[bool] = []
    for _ in range(10):
        try:
            walk = GraphWalk([model(torch.randn(2, 4))], places, budget_ns=6)  # looks at the clock
            break
        except TooLarge as reason:
            learnt.append(reason.learns)
    assert learnt
    assert all(learnt)
    assert Counter((place, tensor.shape) for tensor, place in walk.saved) == expected


def test_where_a_saved_tensor_must_be_unpacked_nothing_is_read_once_somebody_packs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(saving, "HAS_DATA", False)  # as before torch 2.9
    push = torch._C._autograd._push_saved_tensors_default_hooks
    told: list[str] = []
    activations = Activations(Places, told.append, limited=False)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
    output = model(torch.randn(3, 8))
    activations.begin_step(walks=True)
    activations.walk([output])
    assert sum(each.nbytes for each in activations.alive(-1, Claimed())) == (3 * 8 + 3 * 16) * FLOAT
    unpacked: list[str] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked.append):
        packed = model(torch.randn(3, 8))
    activations.walk([packed])
    activations.begin_step(walks=True)
    activations.walk([packed])
    assert (unpacked, activations.known, len(told)) == ([], False, 1)
    activations.stop()
    assert torch._C._autograd._push_saved_tensors_default_hooks is push


def recorded(native: str, monkeypatch: pytest.MonkeyPatch) -> Activations:
    monkeypatch.setenv("GPUMON_NATIVE", native)
    activations = Activations(Places, pytest.fail, limited=False)
    assert (activations._living is not None) is (native == "on")
    return activations


def note(activations: Activations, tensors: list[torch.Tensor]) -> None:
    activations._note([(each, (0, f"{each.numel()}")) for each in tensors], ())


@pytest.mark.parametrize("seed", range(6))
def test_c_says_the_same_of_what_lives_as_python(
    native_reader: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen = random.Random(seed)
    both = recorded("on", monkeypatch), recorded("off", monkeypatch)
    tensors: list[torch.Tensor] = []
    found: list[tuple[Saved, list[Any]]] = []
    for _ in range(40):
        tensors += [torch.ones(chosen.choice((0, 1, 5, 90))) for _ in range(chosen.choice((0, 1, 40)))]
        again = chosen.sample(tensors, len(tensors) // 2)
        for each in both:
            note(each, again)
        chosen.shuffle(tensors)
        del tensors[: chosen.choice((0, 5, 100))]
        known = [each.untyped_storage()._cdata for each in tensors]
        some = [chosen.sample(known, chosen.choice((0, min(3, len(known)), len(known) // 2))) for _ in range(3)]
        saved, claims = [], []
        for each in both:
            assert each.alive(0, Claimed()).nbytes == 0  # of another device
            claims.append(Claimed(frozenset(some[0])))
            claims[-1].gradients = Storages(dict.fromkeys(some[1], 4))
            claims[-1].others.update(some[2])
            saved.append(each.alive(-1, claims[-1]))
        native, python = saved
        assert native.nbytes == python.nbytes
        assert [each in claims[0].activations for each in known] == [each in claims[1].activations for each in known]
        found.append((native, sorted(python)))
    assert all(sorted(native) == python for native, python in found)
    assert sum(len(python) for _, python in found) > 100


def test_what_is_gone_is_forgotten(native_reader: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activations = recorded("on", monkeypatch)
    batch = torch.ones(1)
    for _ in range(50):
        note(activations, [batch, *[torch.ones(1) for _ in range(100)]])
        assert activations.alive(-1, Claimed()).nbytes == 4
    living: Any = activations._living
    assert len(living) == len(living._kept) == len(activations._noted) == 1


@pytest.mark.parametrize(("took_ms", "known"), [(6.9, True), (7.1, False)])
def test_a_walk_may_take_7_of_the_10_ms_of_a_sampled_step(
    monkeypatch: pytest.MonkeyPatch, took_ms: float, known: bool
) -> None:
    clock = chain([0], repeat(int(took_ms * 1e6)))
    monkeypatch.setattr("gpumon_agent.attribution.graph.thread_time_ns", lambda: next(clock))
    output = torch.ones(1, requires_grad=True)
    for _ in range(100):
        output = output * 2
    activations = Activations(Places, print, limited=True)
    activations.begin_step(walks=True)
    activations.walk([output])
    assert activations.known == known


def test_eight_graphs_that_alternate_are_known_and_a_ninth_begins_anew() -> None:
    x, places = torch.ones(1, requires_grad=True), Places()

    def learns(operators: int) -> bool:
        output = x
        for _ in range(operators):
            output = output * 2
        return GraphWalk([output], places).learns

    assert [learns(count) for count in range(1, 9)] == [True] * 8
    assert [learns(count) for count in range(1, 9)] == [False] * 8
    assert [learns(9), learns(9), learns(1)] == [True, False, True]


def test_walks_that_take_too_long_are_rested_from_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = True
    walks = []

    class Slow(GraphWalk):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            walks.append(step)
            if slow:
                raise TooLarge(learns=False)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr("gpumon_agent.attribution.activations.GraphWalk", Slow)
    told: list[int] = []
    activations = Activations(Places, lambda _: told.append(step), limited=True)
    output = nn.Linear(4, 4)(torch.randn(2, 4))
    for step in range(140):
        slow = step < 100
        activations.begin_step(walks=True)
        activations.walk([output])
    assert walks[:7] == [0, 2, 5, 10, 19, 36, 69]
    assert walks[7:] == list(range(102, 140))  # after 32 steps of rest, the longest there is
    assert told == [5]  # one slow walk, or two, are not worth a notice
    assert activations.known


# ------------------------------------------------------------------------------------------------------ as the ledger


def activations(watch: Any) -> list[tuple[str, int | None]]:
    return [(e.phase, e.activations) for e in watch.events() if isinstance(e, wire.Ledger) and not e.peak]


def test_after_backward_none_are_left_and_a_kept_graph_shows(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters())
    watch(model, optimizer)
    x = torch.randn(5, 8)
    model(x).sum().backward()
    optimizer.step()
    saved = 2 * 5 * 32 * FLOAT  # x is an input, the output is not kept
    returned = 5 * 4 * FLOAT
    held = 2 * FLOAT  # the loss and the gradient that it starts from, by the very call of its backward()
    assert activations(watch)[1:] == [("forward", saved + returned), ("backward", held), ("optimizer", 0)]
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    assert activations(watch)[-1] == ("backward", saved + 2 * FLOAT)
    del loss
    optimizer.step()
    assert activations(watch)[-1] == ("optimizer", 0)
    kept = model(x)
    optimizer.step()
    assert activations(watch)[-1] == ("optimizer", saved + returned)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as without us
        kept.sum().backward()
    del kept
    optimizer.step()
    assert activations(watch)[-1] == ("optimizer", 0)


def test_micro_batches_are_walked_each_and_only_their_own(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh())
    watch(model, torch.optim.SGD(model.parameters()))
    x = torch.randn(5, 8)
    first = model(x)
    second = model(x)
    assert [nbytes for phase, nbytes in activations(watch) if phase == "forward"] == [640, 2 * 640]
    del first, second


def test_of_a_double_backward_the_graph_of_the_gradients_counts(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    watch(model, torch.optim.SGD(model.parameters()))
    x = torch.randn(5, 8, requires_grad=True)
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    before, after = (nbytes for phase, nbytes in activations(watch) if phase != "load")
    assert (after or 0) >= (before or 0) + gradient.untyped_storage().nbytes()


def test_no_tensor_and_no_graph_outlives_its_owner(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)
    saved: list[weakref.ref[Any]] = []
    model[1].register_forward_hook(lambda m, args, out: saved.extend([weakref.ref(args[0]), weakref.ref(out)]))
    gc.disable()
    try:
        for _ in range(3):
            output = model(torch.randn(5, 8))
            saved.append(weakref.ref(output))
            loss = output.sum()
            saved.append(weakref.ref(loss))
            storage = weakref.ref(output.untyped_storage())
            del output, loss
            assert storage() is None
            assert all(reference() is None for reference in saved)
            model(torch.randn(5, 8)).sum().backward()
            optimizer.step()
    finally:
        gc.enable()


def test_layers_tell_each_module_its_gradients_state_and_activations(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)
    model(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    watch.agent.phases.finish()  # the first step waits for another optimizer
    ((part,),) = watch.agent.accounts.layers.values()
    first, third = 4 * (8 * 32 + 32), 4 * (32 * 4 + 4)
    assert part.layers == (
        wire.Layer("0", "Linear", first, 2 * first + 2 * 4, 0),  # AdamW counts its steps in two scalars
        wire.Layer("1", "GELU", 0, 0, 5 * 32 * FLOAT),
        wire.Layer("2", "Linear", third, 2 * third + 2 * 4, 5 * 32 * FLOAT),
    )
    assert part.elsewhere == 5 * 4 * FLOAT  # what forward returned


def test_tensors_without_memory_of_their_own_are_passed_over(watch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    watch(model, torch.optim.SGD(model.parameters()))
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    torch.func.grad(loss)(parameters, torch.randn(5, 8))
    torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, torch.randn(3, 5, 8))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(torch.randn(5, 8))).sum().backward()
    model.zero_grad()
    assert not [failed for failed in watch.agent.guard.failures.items() if failed[1]]


def newest(watch: Any) -> wire.Ledger:
    *_, ledger = (e for e in watch.events() if isinstance(e, wire.Ledger) and not e.peak)
    return ledger


def test_a_layer_added_later_is_counted_within_64_steps(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters())
    watch(model, optimizer)
    for step in range(80):
        if step == 10:
            model.append(nn.Linear(4, 4))
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert newest(watch).weights == 2 * (16 + 4) * FLOAT


def test_a_buffer_of_the_optimizer_that_is_replaced_is_counted_within_16_steps(watch: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    watch(model, optimizer)
    for step in range(20):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if step == 2:
            optimizer.state[model[1].bias]["momentum_buffer"] = torch.zeros(1_000)[:4]
    assert newest(watch).optimizer == (2 * (16 + 4) - 4 + 1_000) * FLOAT


def test_layers_are_told_once_a_second(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr("gpumon_agent.attribution.accounts.monotonic_ns", lambda: now)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters())
    watch(model, optimizer)
    told = []
    for step in range(12):
        model(torch.ones(1 + step, 4)).sum().backward()  # each step's layers differ
        optimizer.step()
        told += [part.step for parts in watch.agent.accounts.layers.values() for part in parts]
        now += 250_000_000
    assert sorted(set(told)) == [0, 6, 11]  # of four steps a second; step 0 ends with the first event of step 1


@pytest.mark.parametrize("walks", [False, True], ids=["no walk is in time", "walks are in time"])
def test_layers_have_no_activations_until_a_graph_was_walked(monkeypatch: pytest.MonkeyPatch, walks: bool) -> None:
    """Where no walk was in time, every module had zero bytes, as if they were known."""
    monkeypatch.setattr("gpumon_agent.attribution.activations.WALK_NS", 10**12 if walks else 0)
    made = agents.REGISTRY.agent = agents.Agent("test", publish=False)
    try:
        model = nn.Sequential(*(layer for _ in range(50) for layer in (nn.Linear(8, 8), nn.GELU())))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        made.adopt(model, optimizer)
        for _ in range(4):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        (parts,) = made.accounts.layers.values()
    finally:
        made.leave("stopped")
    layers = [layer for part in parts for layer in part.layers]
    assert {layer.gradients for layer in layers if layer.kind == "Linear"} == {(8 * 8 + 8) * FLOAT}
    assert {layer.activations for layer in layers if layer.path != "0"} == ({4 * 8 * FLOAT} if walks else {None})
    assert (parts[-1].elsewhere is None) is not walks
