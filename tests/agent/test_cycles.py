"""A reference cycle that waits for the collector: told from what somebody still holds, by its own references."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpumon_agent import wire  # noqa: E402
from gpumon_agent.leaks.cycles import Cycles, only_each_other  # noqa: E402
from gpumon_agent.leaks.object_children import Name  # noqa: E402


class Node:
    """One of a few that know each other."""


class Refused(Exception):
    """Caught, and kept by the frame that its traceback leads to."""


NAME = Name("node", "global", None)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def pair() -> weakref.ref[Any]:
    left, right = Node(), Node()
    left.other, right.other = right, left  # type: ignore[attr-defined]
    left.held = [1, {"a": ()}]  # type: ignore[attr-defined]
    return weakref.ref(left)


def by_closure() -> weakref.ref[Any]:
    node = Node()
    node.back = lambda: node  # type: ignore[attr-defined]
    return weakref.ref(node)


def by_method() -> weakref.ref[Any]:
    node = Node()
    node.back = node.__init__  # type: ignore[attr-defined,misc]
    return weakref.ref(node)


def by_frame() -> weakref.ref[Any]:
    kept = None
    try:
        raise Refused
    except Refused as error:
        kept = error
    return weakref.ref(kept)


def by_generator() -> weakref.ref[Any]:
    def generate(node: Node) -> Iterator[Node]:
        while True:
            yield node

    node = Node()
    node.generator = generate(node)  # type: ignore[attr-defined]
    next(node.generator)  # type: ignore[attr-defined]
    return weakref.ref(node)


@pytest.mark.parametrize("make", [pair, by_closure, by_method, by_frame, by_generator])
def test_a_cycle_is_one_once_nobody_holds_it(make: Callable[[], weakref.ref[Any]]) -> None:
    reference = make()
    assert only_each_other(reference)
    held = {"deep": [reference()]}
    assert not only_each_other(reference)
    held.clear()
    assert only_each_other(reference)
    gc.collect()
    assert reference() is None
    assert not only_each_other(reference)


def test_held_by_another_of_the_cycle_or_too_large_to_tell() -> None:
    reference = pair()
    other = [reference().other]
    assert not only_each_other(reference)
    other.pop().more = [Node() for _ in range(300)]
    assert only_each_other(reference)
    reference().more = [Node() for _ in range(400)]
    assert not only_each_other(reference)


def test_24_objects_are_looked_at_three_times_each_two_steps_after_they_were_noted() -> None:
    storage, cycles, held, looks = torch.zeros(1).untyped_storage(), Cycles(), [Node() for _ in range(30)], 0
    for node in held:
        cycles.note([node], NAME, None, storage, step=5)
    assert [cycles.due(step) for step in (6, 7)] == [False, True]
    for step in range(7, 100):
        while cycles.due(step):
            assert not cycles.look(step)
            looks += 1
    assert looks == 3 * 24


@pytest.mark.parametrize(("above", "found"), [(5, True), (6, False)])
def test_of_the_way_to_a_tensor_the_innermost_six_objects_are_looked_at(above: int, found: bool) -> None:
    storage, cycles, held = torch.zeros(1).untyped_storage(), Cycles(), [Node() for _ in range(above)]
    cycles.note([*held, pair()()], NAME, None, storage, step=0)
    assert cycles.look(2) == found


def test_a_census_names_what_the_cycle_was_called(watch: Any) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)
    said: list[wire.Event] = []
    watch.agent.transport.say = said.extend

    def train() -> list[weakref.ref[Any]]:
        references = []
        for step in range(5_000):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            node = Node()
            node.kept, node.me = torch.zeros(7), node  # type: ignore[attr-defined]
            references.append(weakref.ref(node))
            if step == 2:
                census = watch.agent.leaks.census
                census._blocks = {0: 0}  # it is not over with the tensors that other tests keep
                census._begin(step, "growth", ((0, None, 10_000),))
            if any(each.cyclic for census in said if isinstance(census, wire.Census) for each in census.groups):
                break
        return references

    references = train()
    found = [each for census in said if isinstance(census, wire.Census) for each in census.groups if each.cyclic]
    assert found
    (holder,) = found[0].holders
    assert (found[0].shape, found[0].device, holder.kind) == ((7,), 0, "cycle")
    assert holder.text == "reference cycle of node.kept in train()"
    gc.collect()
    assert not [each for each in references if each() is not None]


class Pretends:
    """Asked for its class it runs code of the user's, as proxies do."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("working outside of a request")


def test_no_code_of_the_users_runs_on_the_way() -> None:
    node = Node()
    node.self, node.held = node, Pretends()  # type: ignore[attr-defined]
    reference = weakref.ref(node)
    del node
    assert only_each_other(reference)
