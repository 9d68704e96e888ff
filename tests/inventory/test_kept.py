"""What the owners hold is right after each change between two looks, although little is read again."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumon_agent.attribution import native_storages
from gpumon_agent.attribution.inventory import Inventory, Owners
from gpumon_agent.attribution.kept import Sum
from gpumon_agent.attribution.native_storages import Held

CPU = torch.device("cpu")
LAYER = 8 * 8 * 4
"""bytes of a layer's weight"""


def identity(tensor: Tensor) -> int:
    found: int = tensor.untyped_storage()._cdata
    return found


class Watched:
    """Three layers without biases, with momentum, looked at twice: the second look takes from the cache."""

    def __init__(self) -> None:
        self.model = nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])
        self.model[1].register_buffer("scale", torch.ones(100))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.inventory = Inventory()
        self.inventory.watch(self.model, [self.optimizer])
        self.step()
        self.look()
        self.look(fresh=False)

    def step(self) -> None:
        self.model(torch.ones(1, 8)).sum().backward()
        self.optimizer.step()

    def look(self, *, fresh: bool = True) -> Owners:
        return self.inventory.owners(CPU, fresh=fresh)

    @property
    def weight(self) -> Any:
        return self.model[1].weight


@pytest.fixture
def watched(hooks: str) -> Watched:
    watched = Watched()
    assert watched.inventory._sums[-1].weights.native is (hooks == "compiled")
    return watched


def test_unchanged(watched: Watched) -> None:
    first = watched.look(fresh=False)
    assert first == (3 * LAYER, 400, 3 * LAYER, 3 * LAYER, 0, 0)
    assert watched.look() == first


def test_gradients_that_go_and_come_back(watched: Watched) -> None:
    watched.optimizer.zero_grad()
    assert watched.look(fresh=False).gradients == 0
    watched.step()
    assert watched.look(fresh=False).gradients == 3 * LAYER


def test_a_gradient_replaced_by_a_slice_of_a_larger_one(watched: Watched) -> None:
    watched.weight.grad = torch.ones(16, 8)[:8]
    assert watched.look(fresh=False).gradients == 4 * LAYER


def test_a_gradient_replaced_by_a_larger_one_at_the_same_address(watched: Watched) -> None:
    memory = bytearray(2 * LAYER)
    watched.weight.grad = torch.frombuffer(memory, dtype=torch.float32, count=64).view(8, 8)
    assert watched.look(fresh=False).gradients == 3 * LAYER
    watched.weight.grad = None
    watched.weight.grad = torch.frombuffer(memory, dtype=torch.float32)[:64].view(8, 8)
    assert watched.look(fresh=False).gradients == 4 * LAYER


def test_a_gradient_that_becomes_a_view_of_another(watched: Watched) -> None:
    watched.weight.grad = watched.model[0].weight.grad
    assert watched.look(fresh=False).gradients == 2 * LAYER


def test_a_gradient_that_is_a_weight_counts_as_that(watched: Watched) -> None:
    watched.weight.grad = watched.model[0].weight.data
    assert watched.look(fresh=False).gradients == 2 * LAYER


def test_a_sparse_gradient_is_read_each_time(watched: Watched) -> None:
    sums = Sum()
    gradient = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 8), (8, 8), check_invariants=False)
    assert sums.read(Held([gradient]), -1)
    assert sums.claim(set()) == 8 + 32
    assert sums.read(Held([gradient]), -1)
    gradients = Held([each.grad for each in watched.model.parameters()])
    assert not watched.inventory._sums[-1].gradients.read(gradients, -1)


def test_a_sparse_gradient_comes_and_goes(watched: Watched) -> None:
    kept = watched.weight.grad
    watched.weight.grad = kept.to_sparse()
    assert watched.look(fresh=False).gradients == 2 * LAYER + 64 * (16 + 4)
    watched.weight.grad = kept
    assert watched.look(fresh=False).gradients == 3 * LAYER


def test_a_weight_of_a_subclass(watched: Watched) -> None:
    class Own(nn.Parameter):
        pass

    watched.model[1].weight = Own(torch.ones(16, 8))
    watched.model[1].weight.grad = torch.ones(16, 8)
    assert watched.look()[:3] == (4 * LAYER, 400, 4 * LAYER)
    assert not watched.inventory._sums[-1].weights.native  # its memory may be another's


@pytest.mark.parametrize("native", ["off", "on"])
def test_each_device_has_its_own_sum(virtual_gpu: Any, native: str, native_reader: Path) -> None:
    def script(native: str) -> None:
        import os

        import torch

        os.environ["GPUMON_NATIVE"] = native
        from gpumon_agent.attribution import native_storages
        from gpumon_agent.attribution.kept import Sum
        from gpumon_agent.attribution.native_storages import Held

        tensors = [torch.ones(1, device="cuda"), torch.ones(2), torch.ones(4)]
        for meta in ([], [torch.ones(3, device="meta")]):
            for index, expected in ((0, 4), (-1, 24)):
                read = native_storages.load()
                assert (read is not None) is (native == "on")
                sums = Sum(read)
                sums.read(Held(tensors + meta), index)
                assert sums.claim(set()) == expected
                assert sums.native is (native == "on" and not meta)

    virtual_gpu().run(script, native)


def test_a_list_that_shrinks_or_gets_another_first_tensor_is_read_without_a_look() -> None:
    first, second = torch.ones(1), torch.ones(2)
    sums = Sum()
    assert sums.read(Held([first, second]), -1, look=False)
    assert not sums.read(Held([first, second]), -1, look=False)
    assert sums.read(Held([first]), -1, look=False)
    assert sums.read(Held([second]), -1, look=False)
    assert sums.claim(set()) == 8


def swapped(watched: Watched) -> Tensor:
    """As a script swaps in averaged weights, and keeps its own."""
    own: Tensor = watched.weight.data
    watched.weight.data = torch.ones(8, 8)
    return own


def test_weights_swapped_while_the_others_are_kept(watched: Watched) -> None:
    own = swapped(watched)
    watched.look()
    assert identity(watched.weight) in watched.inventory.claimed
    assert identity(own) not in watched.inventory.claimed
    assert identity(own) not in watched.inventory.weights


def test_weights_swapped_for_larger_storage_are_seen_at_once_if_theirs_is_freed(watched: Watched) -> None:
    watched.weight.data = torch.ones(32, 8)[:8]
    assert watched.look(fresh=False).weights == 6 * LAYER


def test_weights_that_move_are_seen_at_once(watched: Watched) -> None:
    kept = [weight.data for weight in watched.model.parameters()]
    for weight in watched.model.parameters():
        weight.data = torch.ones(16, 8)[:8]
    assert watched.look(fresh=False).weights == 6 * LAYER
    assert watched.inventory.claimed.isdisjoint({identity(each) for each in kept})


def test_weights_that_leave_the_device(watched: Watched) -> None:
    watched.model[1].weight = nn.Parameter(watched.weight.to("meta"))
    assert watched.look().weights == 2 * LAYER


def test_a_parameter_that_is_freed_or_replaced(watched: Watched) -> None:
    watched.optimizer.param_groups[0]["params"].pop(1)
    watched.optimizer.state.pop(watched.weight)
    watched.model[1].weight = None
    gc.collect()
    assert watched.look(fresh=False)[:4] == (2 * LAYER, 400, 2 * LAYER, 2 * LAYER)


def test_a_parameter_replaced_while_its_data_is_kept(watched: Watched) -> None:
    own = watched.weight.data
    test_a_parameter_that_is_freed_or_replaced(watched)
    watched.model[0].weight = nn.Parameter(torch.ones(8, 8))
    watched.optimizer.param_groups[0]["params"].pop(0)
    watched.optimizer.state.clear()
    gc.collect()
    watched.look(fresh=False)
    assert all(identity(watched.model[at].weight) in watched.inventory.claimed for at in (0, 2))
    assert identity(own) not in watched.inventory.claimed


def test_tied_weights_count_once(watched: Watched) -> None:
    watched.model[1].weight = watched.model[0].weight
    watched.optimizer.param_groups[0]["params"].pop(1)
    assert watched.look()[:3] == (2 * LAYER, 400, 2 * LAYER)
    assert watched.look(fresh=False)[:3] == (2 * LAYER, 400, 2 * LAYER)


def test_a_buffer_that_is_freed(watched: Watched) -> None:
    watched.model[1].scale = torch.ones(7)
    assert watched.look(fresh=False).buffers == 28


def test_a_buffer_that_comes(watched: Watched) -> None:
    watched.model[0].register_buffer("more", torch.ones(10))
    assert watched.look().buffers == 440


def test_optimizer_state_that_is_loaded(watched: Watched) -> None:
    watched.optimizer.load_state_dict(copy.deepcopy(watched.optimizer.state_dict()))
    assert watched.look(fresh=False).optimizer == 3 * LAYER
    for state in watched.optimizer.state.values():
        assert identity(state["momentum_buffer"]) in watched.inventory.claimed


def test_optimizer_state_that_grows(watched: Watched) -> None:
    more = nn.Linear(8, 8, bias=False)
    watched.optimizer.add_param_group({"params": list(more.parameters())})
    watched.optimizer.state[more.weight]["momentum_buffer"] = torch.ones(8, 8)
    assert watched.look(fresh=False).optimizer == 4 * LAYER


@pytest.mark.parametrize("of", ["grad", "data", "momentum"])
def test_nothing_is_kept_alive(watched: Watched, of: str) -> None:
    take: dict[str, Callable[[], Tensor]] = {
        "grad": lambda: watched.weight.grad,
        "data": lambda: watched.weight,
        "momentum": lambda: watched.optimizer.state[watched.weight]["momentum_buffer"],
    }
    tensor = take[of]()
    gone = weakref.ref(tensor), weakref.ref(tensor.untyped_storage())
    del tensor
    watched.model[1].weight = None
    inventory = watched.inventory
    watched.__dict__.pop("optimizer")
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert inventory.owners(CPU, fresh=False)[:4] == (2 * LAYER, 400, 2 * LAYER, 0)


@pytest.mark.parametrize("first", [False, True])
def test_an_input_whose_gradient_comes_and_goes(watched: Watched, first: bool) -> None:
    x = torch.ones(8, 8, requires_grad=True)
    watched.inventory.inputs((x,), {})
    for given in (first, not first, first, not first):
        x.grad = torch.ones(8, 8) if given else None
        for fresh in (False, True, False):
            assert watched.look(fresh=fresh)[2::3] == ((3 + given) * LAYER, LAYER)


def test_after_an_error_nothing_is_looked_at_in_one_call(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read last may be freed by then."""
    monkeypatch.setattr(watched.inventory, "_state", lambda *_: 1 / 0)
    watched.weight.data = torch.ones(16, 8)
    with pytest.raises(ZeroDivisionError):
        watched.look(fresh=False)
    assert watched.inventory._sums[-1].look is None


def test_an_optimizer_that_comes_and_goes(watched: Watched) -> None:
    more = nn.Parameter(torch.ones(8, 8))
    other = torch.optim.SGD([more], lr=0.1, momentum=0.9)
    watched.inventory.watch(watched.model, [other])
    more.grad = torch.ones(8, 8)
    other.step()
    assert watched.look(fresh=False).optimizer == 4 * LAYER
    assert watched.look(fresh=False).optimizer == 4 * LAYER
    del other
    gc.collect()
    assert watched.look(fresh=False)[2:4] == (4 * LAYER, 3 * LAYER)


def test_a_second_optimizer_of_the_same_parameters(watched: Watched) -> None:
    other = torch.optim.Adam(watched.model.parameters())
    other.step()
    watched.inventory.watch(watched.model, [other])
    assert watched.look(fresh=False).optimizer == 3 * (3 * LAYER + 4)  # Adam's step is one number


@pytest.mark.parametrize("hooks", ["compiled"], indirect=True)
def test_an_optimizer_in_place_of_another_is_looked_at_in_one_call(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = watched.optimizer = torch.optim.SGD(watched.model.parameters(), lr=0.1, momentum=0.9)
    gc.collect()
    other.step()
    watched.inventory.watch(watched.model, [other])
    assert watched.look(fresh=False).optimizer == 3 * LAYER
    assert watched.look(fresh=False).optimizer == 3 * LAYER
    monkeypatch.setattr(watched.inventory, "_lasting", pytest.fail)
    assert watched.look(fresh=False).optimizer == 3 * LAYER


@pytest.mark.parametrize(("of", "name"), [("optimizer", "state"), ("weight's module", "_parameters")])
def test_ctrl_c_within_a_property_is_not_swallowed(watched: Watched, of: str, name: str) -> None:
    owner: Any = watched.optimizer if of == "optimizer" else watched.model[1]
    value = owner.__dict__.pop(name)
    interrupts = [False]

    def get(_: object) -> object:
        if interrupts[0]:
            interrupts[0] = False
            raise KeyboardInterrupt
        return value

    owner.__class__ = type("Own", (type(owner),), {name: property(get)})
    first = watched.look()
    assert watched.look() == first
    interrupts[0] = True
    with pytest.raises(KeyboardInterrupt):
        watched.look()
    assert watched.look() == first


@pytest.mark.parametrize("kept", [False, True])
def test_weights_replaced_as_another_device_is_looked_at(watched: Watched, kept: bool) -> None:
    other = torch.device("cuda", 0)
    for _ in range(2):
        assert watched.inventory.owners(other, fresh=False) == (0, 0, 0, 0, 0, 0)
    old = list(watched.model.parameters()) if kept else []
    for layer in watched.model:
        layer.weight = nn.Parameter(torch.ones(16, 8))
    assert watched.inventory.owners(other) == (0, 0, 0, 0, 0, 0)
    assert watched.look(fresh=False)[:2] == (6 * LAYER, 400)
    del old


def replaced(watched: Watched) -> None:
    watched.model[1].weight = nn.Parameter(torch.ones(16, 8))


def added(watched: Watched) -> None:
    watched.model[2].register_parameter("more", nn.Parameter(torch.ones(8, 8)))


def filled(watched: Watched) -> None:
    """As lazy modules do: the place of it was there."""
    watched.model[0].bias = nn.Parameter(torch.ones(64))


def other_dict(watched: Watched) -> None:
    watched.model[2]._parameters = {"weight": nn.Parameter(torch.ones(16, 8))}


def other_mapping(watched: Watched) -> None:
    """As a scripted module's."""

    class Values:
        kept = torch.ones(16, 8)

        def values(self) -> list[Tensor]:
            return [self.kept]

    object.__setattr__(watched.model[2], "_parameters", Values())


def resized(watched: Watched) -> None:
    watched.weight.untyped_storage().resize_(2 * LAYER)


def made_a_subclass(watched: Watched) -> None:
    watched.weight.__class__ = type("Own", (nn.Parameter,), {})
    watched.weight.untyped_storage().resize_(2 * LAYER)


@pytest.mark.parametrize("change", [replaced, added, filled, other_dict, other_mapping, resized, made_a_subclass])
def test_weights_that_change_while_all_of_the_old_ones_live(
    watched: Watched, change: Callable[[Watched], None]
) -> None:
    kept = list(watched.model.parameters())
    change(watched)
    assert watched.look().weights == 4 * LAYER
    assert len(kept) == 3


def test_a_mapping_that_is_no_dict_is_read_each_time(watched: Watched) -> None:
    values: list[Tensor] = []
    mapping = type("Mapping", (), {"values": lambda self: values})()
    object.__setattr__(watched.model[2], "_parameters", mapping)
    assert watched.look().weights == watched.look().weights == 2 * LAYER
    values.append(torch.ones(8, 8))
    assert watched.look().weights == 3 * LAYER


@pytest.mark.parametrize("last", [False, True])
def test_weights_that_leave_while_they_live(watched: Watched, last: bool) -> None:
    kept = list(watched.model.parameters())
    del watched.model[2 if last else 0]._parameters["weight"]
    assert watched.look().weights == 2 * LAYER
    assert kept


def test_a_module_that_is_freed_while_its_weights_live(watched: Watched) -> None:
    kept = list(watched.model.parameters())
    del watched.model[2]
    gc.collect()
    assert watched.look().weights == watched.look().weights == 2 * LAYER
    watched.model[1].weight = nn.Parameter(torch.ones(16, 8))
    assert watched.look().weights == 3 * LAYER
    assert kept


def test_a_buffer_replaced_while_it_lives(watched: Watched) -> None:
    kept = watched.model[1].scale
    watched.model[1].scale = torch.ones(7)
    assert watched.look().buffers == 28
    watched.model[1]._buffers.clear()
    assert watched.look().buffers == 0
    assert kept.numel() == 100


def test_the_first_entry_of_a_state_that_grows(watched: Watched) -> None:
    first = watched.optimizer.state[watched.model[0].weight]
    kept = first["momentum_buffer"]
    first["momentum_buffer"] = torch.ones(16, 8)
    assert watched.look(fresh=False).optimizer == 4 * LAYER
    first["more"] = torch.ones(8, 8)
    assert watched.look(fresh=False).optimizer == 5 * LAYER
    first.clear()
    assert watched.look(fresh=False).optimizer == 2 * LAYER
    first["momentum_buffer"] = kept
    assert watched.look(fresh=False).optimizer == 3 * LAYER


def test_a_state_with_an_entry_more(watched: Watched) -> None:
    watched.optimizer.state["more"] = {"more": torch.ones(8, 8)}
    assert watched.look(fresh=False).optimizer == 4 * LAYER


def test_a_first_entry_that_is_nested_or_long_is_read_each_time(watched: Watched) -> None:
    first = watched.optimizer.state[watched.model[0].weight]
    first["history"] = []
    for count in range(1, 3):
        first["history"].append(torch.ones(8, 8))
        assert watched.look(fresh=False).optimizer == (3 + count) * LAYER
    first["history"] = 7
    first.update({str(at): torch.ones(8, 8) for at in range(100)})
    assert watched.look(fresh=False).optimizer == 103 * LAYER
    first["99"] = torch.ones(16, 8)
    assert watched.look(fresh=False).optimizer == 104 * LAYER


def test_a_state_that_changes_as_it_is_read_anew(watched: Watched) -> None:
    """What C++ has seen last is then not what the sum is of."""
    first = watched.optimizer.state[watched.model[0].weight]
    kept = first["momentum_buffer"]
    larger = torch.ones(16, 8)
    for looks in range(20):
        for momentum, layers in (*[(kept, 3)] * looks, (larger, 4), (kept, 3)):
            first["momentum_buffer"] = momentum
            assert watched.look().optimizer == layers * LAYER


@pytest.mark.parametrize("seed", range(4))
def test_c_says_the_same_of_gradients_as_python(native_reader: Path, monkeypatch: Any, seed: int) -> None:
    monkeypatch.setenv("GPUMON_NATIVE", "on")
    chosen = random.Random(seed)
    sums = Sum(native_storages.load()), Sum()
    stores = [torch.ones(chosen.choice((0, 1, 5, 90))) for _ in range(300)]
    parameters = [nn.Parameter(torch.ones_like(each)) for each in stores]
    for _ in range(12):
        for parameter in chosen.sample(parameters, 40):
            parameter.grad = chosen.choice((None, torch.ones_like(parameter)))
        for store in chosen.sample(stores, 20):
            sharing = [each for each in parameters if each.shape == store.shape]
            chosen.choice(sharing).grad = store
        for each in sums:
            each.read(Held(stores[:100]), -1, of=Held(parameters))
        native, python = sums
        assert native.native
        found = python.found.by_identity
        everything = sorted(found)
        owned = set(chosen.sample(everything, len(everything) // 2)) | {identity(parameters[0])}
        assert native.beyond(owned, array("q", owned)) == python.beyond(owned, array("q"))
        asked = chosen.choices([*everything, *found.values(), 0], k=30)
        assert [each in native.found for each in asked] == [each in found for each in asked]
        assert len(native.found) >= len(found)
        assert native.found.by_identity == found
