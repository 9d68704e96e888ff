"""What the owners hold is right after each change between two looks, although little is read again."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpumon_agent.attribution.inventory import Inventory, Owners
from gpumon_agent.attribution.kept import Sum

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
    assert (watched.inventory._sums[-1].weights._words is not None) is (hooks == "compiled")
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
    assert sums.read([gradient], -1)
    assert sums.claim(set()) == 8 + 32
    assert sums.read([gradient], -1)
    assert not watched.inventory._sums[-1].gradients.read([each.grad for each in watched.model.parameters()], -1)


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
    assert watched.inventory._sums[-1].weights._words is None  # its memory may be another's


@pytest.mark.parametrize("native", ["off", "on"])
def test_each_device_has_its_own_sum(virtual_gpu: Any, native: str, native_reader: Path) -> None:
    def script(native: str) -> None:
        import os

        import torch

        os.environ["GPUMON_NATIVE"] = native
        from gpumon_agent.attribution import native_storages
        from gpumon_agent.attribution.kept import Sum

        tensors = [torch.ones(1, device="cuda"), torch.ones(2), torch.ones(4)]
        for meta in ([], [torch.ones(3, device="meta")]):
            for index, expected in ((0, 4), (-1, 24)):
                read = native_storages.load()
                assert (read is not None) is (native == "on")
                sums = Sum(read)
                sums.read(tensors + meta, index)
                assert sums.claim(set()) == expected
                assert (sums._words is not None) is (native == "on" and not meta)

    virtual_gpu().run(script, native)


def test_a_list_that_shrinks_or_gets_another_first_tensor_is_read_without_a_look() -> None:
    first, second = torch.ones(1), torch.ones(2)
    sums = Sum()
    assert sums.read([first, second], -1, look=False)
    assert not sums.read([first, second], -1, look=False)
    assert sums.read([first], -1, look=False)
    assert sums.read([second], -1, look=False)
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
    assert not {identity(each) for each in kept} & watched.inventory.claimed


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
    assert {identity(watched.model[0].weight), identity(watched.model[2].weight)} <= watched.inventory.claimed
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
