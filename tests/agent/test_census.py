"""A census: who holds what, by name; and that nobody notices that it was taken."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import zoo

from gpumon_agent import agent as agents
from gpumon_agent import wire
from gpumon_agent.frames import Place
from gpumon_agent.governor import Governor
from gpumon_agent.leaks import gc_roots
from gpumon_agent.leaks.census import ROUNDS
from gpumon_agent.leaks.heap_walker import DEPTH_MAX, HeapWalker, Root
from gpumon_agent.leaks.object_children import Files, Name
from gpumon_agent.leaks.owned_storages import OwnedStorages
from gpumon_agent.thread_clock import ThreadClock


def census_of(watch: Any, step: Any, times: int = 5_000) -> wire.Census:
    """One that was asked for, when it is complete. Before that it told what it had found by names."""
    agent: agents.Agent = watch.agent
    said: list[wire.Event] = []
    agent.transport.say = said.extend  # type: ignore[method-assign,assignment]
    assert agent.ask_census() is None
    before = agent.leaks.census.newest

    class Complete(Exception):
        pass

    def one() -> None:
        step()
        newest = agent.leaks.census.newest
        if newest is not before and newest is not None and not newest.cut:
            raise Complete

    try:
        zoo.around(one, times)
    except Complete:
        early, complete = (each for each in said if isinstance(each, wire.Census))
        assert (early.number, early.cut, complete.number, complete.cut) == (0, True, 0, False)
        assert early.groups
        return complete
    raise AssertionError("the census is not complete")


def test_every_way_of_keeping_tensors_is_named(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumon_agent.leaks.census.SLICE_NS", 100_000_000)
    monkeypatch.setattr(wire, "GROUPS_MAX", 64)  # one of each
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)
    zoo.hooked(model)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    census = census_of(watch, step)
    by_length = {group.shape[0]: group for group in census.groups if len(group.shape) == 1}
    wrong = {}
    for key, length in zoo.LENGTHS.items():
        name, kind = zoo.EXPECTED[key]
        group = by_length.get(length)
        told = [(holder.text, holder.kind, holder.where) for holder in group.holders] if group is not None else []
        # the optimizer leads there too, and this test's own variables
        kinds = (kind, "closure", "module") if key == "attribute of a parameter" else (kind,)
        if not any(name in said and what in kinds for said, what, _ in told):
            wrong[key] = name, told
    for key, what in wrong.items():
        print("WRONG", key, what)
    assert not wrong


def test_it_keeps_nothing_alive(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors go at once when the script lets go of them, wherever the census stands: between any two slices."""
    monkeypatch.setattr("gpumon_agent.leaks.census.SLICE_NS", 60_000)
    monkeypatch.setattr("gpumon_agent.leaks.census.ROUNDS", ROUNDS[:2])
    kept: list[int] = []
    inside: list[int] = []

    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch(model, optimizer)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def train() -> None:
        step()
        census = watch.agent.leaks.census
        census._begin(0, "asked", ())
        held = zoo.Holdall()
        for at in range(20_000):  # the more a process has loaded, the later the walk is here
            if census._taking is None or (inside and at > inside[-1] + 20):
                return
            step()
            if census._taking is not None and any(each.label == ".held" for each in census._taking._walk._levels):
                inside.append(at)
            if not held.renew():
                kept.append(at)

    train()
    assert len(inside) > 3
    assert kept == []


def test_not_in_a_compiler_nor_under_a_tracer(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watch(nn.Linear(1, 1))
    assert watch.agent.ask_census() is None
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert watch.agent.ask_census() == "a compiler is tracing"
    monkeypatch.undo()
    if sys.version_info < (3, 13):
        monkeypatch.setattr(sys, "gettrace", lambda: print)
        assert watch.agent.ask_census() == "a debugger or a tracer is active"


def test_a_training_is_the_same_to_the_bit(watch: Any) -> None:
    def train(census: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        watch(model, optimizer)
        kept, losses = [], []
        for _ in range(30):
            if census:
                assert watch.agent.ask_census() is None
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss.detach())
            losses.append(loss.item())
        return losses

    assert train(census=True) == train(census=False)
    census = watch.agent.leaks.census
    looked_at = census._taking._walk.objects if census._taking is not None else census.newest.objects  # it may be done
    assert looked_at > 1_000
    assert any("paused the training for" in said for said in watch.notices())


def test_what_lives_no_more_is_not_counted(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that is another one in each step is met again in each round."""
    monkeypatch.setattr("gpumon_agent.leaks.census.SLICE_NS", 10_000_000)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        zoo.RENEWED = [torch.zeros(7, 11) for _ in range(6)]

    census = census_of(watch, step)
    groups = [group for group in census.groups if group.shape == (7, 11)]
    assert sum(group.count for group in groups) <= 6, groups


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How long each piece of work was allowed to take, ns."""
    allowed: list[int] = []

    class Noted(ThreadClock):
        def __init__(self, budget_ns: int, *, wall_ns: int | None = None) -> None:
            super().__init__(budget_ns, wall_ns=wall_ns)
            if budget_ns:
                allowed.append(budget_ns)

    monkeypatch.setattr("gpumon_agent.leaks.census.ThreadClock", Noted)
    monkeypatch.setattr("gpumon_agent.leaks.graph_retention.ThreadClock", Noted)
    return allowed


def grow(agent: agents.Agent) -> None:
    for step in range(2, 40):
        agent.leaks.census.step_closed(step, [(0, step << 20, None)])


def test_a_slice_takes_two_milliseconds_and_a_request_pauses_for_at_most_100(watch: Any, times: list[int]) -> None:
    grow(watch.agent)
    assert max(times) == 2_000_000
    times.clear()
    assert watch.agent.ask_census() is None
    watch.agent.leaks.census.step_closed(40, ())
    assert 0 < sum(each for each in times if each > 2_000_000) <= 100_000_000


def test_5_000_storages_are_remembered_with_their_holders(limited: agents.Agent) -> None:
    census = limited.leaks.census
    census._begin(2, "growth", ())
    taking = census._taking
    assert taking is not None
    kept = [torch.zeros(3) for _ in range(6_000)]
    walk: Any = SimpleNamespace(name=lambda: Name("losses[*]", "list", None))
    for tensor in kept:
        taking._count(tensor, tensor, walk)
    ((key, tally),) = taking._tallies.items()
    taking._first_holders[id(tally)] = taking._group(key, tally).holders[0]
    assert len(taking._storages()) == 5_000


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Iterator[agents.Agent]:
    """An agent that keeps within its budget."""
    monkeypatch.delenv("GPUMON_GOVERNOR", raising=False)
    agent = agents.REGISTRY.agent = agents.Agent("test", publish=False)
    yield agent
    agent.leave("stopped")


@pytest.mark.parametrize(("earned_ns", "begins"), [(2_000, False), (3_000, True)])
def test_a_slice_begins_if_200_steps_earn_500_microseconds(
    monkeypatch: pytest.MonkeyPatch, limited: agents.Agent, times: list[int], earned_ns: int, begins: bool
) -> None:
    """A shorter one would do little but find its place again, and a longer rest would let a census take for ever."""
    monkeypatch.setattr(Governor, "census_ns", earned_ns)
    limited.leaks.census._credit_ns = 0
    for _ in range(300):
        limited.leaks.census._earn()
    times.clear()
    grow(limited)
    assert bool(times) == begins


def test_a_process_has_100_ms_to_name_its_first_leak_however_little_its_steps_earn(
    monkeypatch: pytest.MonkeyPatch, limited: agents.Agent, times: list[int]
) -> None:
    monkeypatch.setattr(Governor, "census_ns", 1)
    census = limited.leaks.census
    assert census._credit_ns == 100_000_000
    grow(limited)
    assert 0 < census._credit_ns < 100_000_000
    assert len(times) > 10


def test_the_line_of_an_address_is_not_that_of_the_tensor_which_took_its_place(limited: agents.Agent) -> None:
    census = limited.leaks.census
    census._begin(2, "growth", ())
    taking = census._taking
    assert taking is not None
    gone, alive = torch.zeros(3), torch.zeros(3)
    for tensor, line in ((alive, 7), (gone, 8)):
        found = taking._count(tensor, tensor, SimpleNamespace(name=lambda: Name("losses[*]", "list", None)))
        assert found
        taking._lines[tensor.data_ptr()] = Place("train.py", line)
    ((key, tally),) = taking._tallies.items()
    del gone, tensor
    assert tally.count == 2
    assert taking._group(key, tally).where == "train.py:7"
    del alive
    assert taking._group(key, tally).where is None


def test_stacks_are_read_at_the_beginning_of_a_slice_however_long_that_took(
    limited: agents.Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow machine to find its place takes a slice more than 100 µs."""
    census = limited.leaks.census
    census._begin(2, "growth", ())
    taking = census._taking
    assert taking is not None
    taking._stages = [taking._tell, taking._read_lines]
    census.allocations.unread = True
    monkeypatch.setattr(type(census.allocations), "survived", True)
    read: list[int] = []
    monkeypatch.setattr(census.allocations, "read", lambda *_: not read.append(1))
    clock = ThreadClock(10_000_000)
    while clock.spent_ns < 1_000_000:
        pass
    taking.run(3, clock)
    assert read


def kept_census(watch: Any, monkeypatch: pytest.MonkeyPatch) -> wire.Census:
    monkeypatch.setattr("gpumon_agent.leaks.census.SLICE_NS", 100_000_000)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters())
    watch(model, optimizer)

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return census_of(watch, step)


def test_2_000_kinds_of_tensors_and_200_names_of_a_kind_are_told_apart(
    watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it remembers of them is memory of the training. The others are counted."""
    monkeypatch.setattr(wire, "GROUPS_MAX", 4_000)
    runs = {f"run {run}": {f"loss {at}": torch.ones(3, 17) for at in range(32)} for run in range(8)}
    kinds = [torch.ones(length) for length in range(1, 2_200)]
    census = kept_census(watch, monkeypatch)
    (alike,) = (group for group in census.groups if group.shape == (3, 17))
    assert (alike.count, sum(holder.count for holder in alike.holders)) == (256, 200)
    assert census.tensors >= len(kinds) + 256
    assert len(census.groups) == 2_000
    assert len(runs) == 8


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_that_are_kept_are_named(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layout has no shape, and a shape of the other is not made of numbers."""
    parts = [torch.ones(2, 23), torch.ones(3, 23)]
    kept = {layout: [torch.nested.nested_tensor(parts, layout=layout)] for layout in (torch.strided, torch.jagged)}
    found = {group.shape: group.holders[0].container for group in kept_census(watch, monkeypatch).groups}
    assert {found[(115,)], found[(5, 23)]} == {"kept"}
    assert len(kept) == 2


def test_of_equal_tensors_the_graphs_of_the_first_three_are_measured_for_200_microseconds_each(
    watch: Any, monkeypatch: pytest.MonkeyPatch, times: list[int]
) -> None:
    """The first may have lost its graph to a backward; to follow all of them takes too long."""
    weights = torch.ones(1_000, requires_grad=True)

    def loss(times: int) -> torch.Tensor:
        total = weights
        for _ in range(times):
            total = (total / 2).exp()  # which keeps 4 KB
        return total.sum().reshape(1, 1, 1, 1, 1)

    losses = [loss(1), loss(1), loss(5), loss(50)]
    census = kept_census(watch, monkeypatch)
    (alike,) = (group for group in census.groups if group.shape == (1, 1, 1, 1, 1))
    assert alike.graph_bytes is not None
    assert 4 * 4_000 <= alike.graph_bytes // len(losses) <= 7 * 4_000
    assert times.count(200_000) >= 3


@pytest.mark.parametrize(("threshold", "told"), [(9_999, False), (10_000, True)])
def test_what_waits_for_the_collector_is_told_if_it_runs_every_10_000_objects_or_later(
    watch: Any, monkeypatch: pytest.MonkeyPatch, threshold: int, told: bool
) -> None:
    before = gc.get_threshold()
    gc.set_threshold(threshold)
    try:
        census = kept_census(watch, monkeypatch)
    finally:
        gc.set_threshold(*before)
    assert (census.waiting is not None) == told


def interrupted() -> tuple[HeapWalker, list[int]]:
    """A walk whose first slice ends at the second tensor, and the lengths of the tensors that it meets."""
    met: list[int] = []

    def found(tensor: torch.Tensor, walk: HeapWalker) -> bool:
        met.append(len(tensor))
        if met == [1, 2]:
            walk.once_more()
        return True

    return HeapWalker(found, Files(), gc_roots.of_module), met


def test_a_slice_can_leave_a_tensor_to_the_next_one() -> None:
    """As it does with one whose graph takes longer than was left."""
    space = {f"weights_{length}": torch.ones(length) for length in (1, 2, 3)}
    walk, met = interrupted()
    walk.begin([Root(lambda: space, named=True)], limit=6)
    assert not walk.run(ThreadClock(1_000_000_000), lambda: False)
    assert met == [1, 2]
    assert walk.run(ThreadClock(1_000_000_000), lambda: False)
    assert met == [1, 2, 2, 3]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_container_that_is_replaced_by_a_longer_one_is_read_on(kind: type[Any]) -> None:
    """`values += (loss,)` makes a new tuple in each step, and a walk takes several."""
    holder = types.SimpleNamespace(values=kind(torch.ones(length) for length in (1, 2, 3)))
    walk, met = interrupted()
    walk.begin([Root(lambda: {"holder": holder}, named=True)], limit=6)
    assert not walk.run(ThreadClock(1_000_000_000), lambda: False)
    holder.values = kind((*holder.values, torch.ones(4)))
    while not walk.run(ThreadClock(1_000_000_000), lambda: False):
        pass
    assert met == [1, 2, 2, 3, 4]


def walked(space: dict[str, Any], limit: int = 200) -> dict[str, int]:
    """Names to how many tensors each holds, by one walk."""
    names: Counter[str] = Counter()

    def found(tensor: torch.Tensor, walk: HeapWalker) -> bool:
        names[f"{walk.name().text} {walk.name().kind}"] += 1
        return True

    walk = HeapWalker(found, Files(), gc_roots.of_module)
    walk.begin([Root(lambda: space, named=True)], limit=limit)
    while not walk.run(ThreadClock(1_000_000_000), lambda: False):
        pass
    return names


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({f"loss {at}": ONE for at in range(32)}, "it['loss 3']"),
        ({f"loss {at}": ONE for at in range(33)}, "it[*]"),
        ([(ONE,) * 8] * 2, "it[*][3]"),
        ([(ONE,) * 9] * 2, "it[*][*]"),
        (types.SimpleNamespace(**{f"out{at}": ONE for at in range(7)}), "it.out3 attribute"),
        (types.SimpleNamespace(**{f"out{at}": ONE for at in range(8)}), "it.out* attribute"),
        (deque([ONE], maxlen=10_000_000), "it[*] global"),
    ],
)
def test_how_many_keys_entries_and_numbered_names_are_told_apart(value: Any, name: str) -> None:
    assert any(each.startswith(name) for each in walked({"it": value}))


@pytest.mark.parametrize(("hooks", "name"), [(4, "it.gradient hook closure"), (5, "it.gradient hook[*].closure")])
def test_more_than_four_hooks_of_a_tensor_share_a_name(hooks: int, name: str) -> None:
    def hook(kept: torch.Tensor) -> Any:
        return lambda gradient: gradient * kept

    weight = torch.ones(1, requires_grad=True)
    for _ in range(hooks):
        weight.register_hook(hook(torch.ones(1)))
    assert any(each.startswith(name) for each in walked({"it": weight})), walked({"it": weight})


@pytest.mark.parametrize(("entries", "found"), [(2_000, 2_000), (2_001, 0)])
def test_a_bounded_cache_of_more_than_2_000_entries_is_not_read(entries: int, found: int) -> None:
    """They are read in one piece, and its bound keeps them from growing for ever."""
    remembers = functools.lru_cache(maxsize=5_000)(lambda at: torch.ones(1))
    for at in range(entries):
        remembers(at)
    assert walked({"it": remembers}).get("it.cache[*] cache", 0) == found


def test_10_000_containers_keep_their_names_when_another_name_leads_to_them() -> None:
    """To remember more would take memory from the training."""
    rows = [[ONE, ONE] for _ in range(10_100)]
    names: Counter[str] = Counter()

    def found(tensor: torch.Tensor, walk: HeapWalker) -> bool:
        names[walk.name().text] += 1
        return True

    walk = HeapWalker(found, Files(), gc_roots.of_module)
    for name in ("first", "again"):
        space = {name: rows}
        walk.begin([Root(lambda space=space: space, named=True)], limit=200)  # type: ignore[misc]
        while not walk.run(ThreadClock(1_000_000_000), lambda: False):
            pass
    assert 0 < names["again[*][*]"] <= 2 * 110


def claimed_of(watch: Any, others: list[nn.Module]) -> tuple[set[int], int]:
    """What has an owner beside a watched model, and in how many slices that was read, with a look at the clock each."""
    model = nn.Linear(2, 2)
    watch(model, torch.optim.SGD(model.parameters()))
    owned = OwnedStorages(watch.agent.accounts.inventory, lambda: others, {})
    slices = 1
    while not owned.run(ThreadClock(0)):
        slices += 1
    return owned.claimed, slices


@pytest.mark.parametrize(("copies", "owned"), [(3, True), (4, False)])
def test_three_equal_models_own_their_weights_and_four_are_a_leak(watch: Any, copies: int, owned: bool) -> None:
    others: list[nn.Module] = [nn.Linear(5, 5) for _ in range(copies)]
    claimed, _ = claimed_of(watch, others)
    assert all((each.untyped_storage()._cdata in claimed) == owned for other in others for each in other.parameters())


def test_between_two_looks_at_the_clock_eight_tensors_of_a_module_are_looked_at(watch: Any) -> None:
    _, slices = claimed_of(watch, [nn.ParameterList([torch.ones(1) for _ in range(160)])])
    assert 20 <= slices <= 26


def test_what_is_read_of_large_containers() -> None:
    """The rest takes too long: 10,000 entries of a set; before the last round 512 of a list, and 4,096 of a dict."""
    assert 10_000 <= sum(walked({"it": {torch.ones(1) for _ in range(10_100)}}).values()) <= 10_016
    rows: list[Any] = [0] * 1_100
    rows[-600] = [ONE]
    assert [sum(walked({"it": rows}, limit).values()) for limit in (24, 200)] == [0, 1]
    rows[-500] = [ONE]
    assert sum(walked({"it": rows}, 24).values()) >= 1
    table: dict[int, Any] = dict.fromkeys(range(4200), 0) | {-1: [ONE], -2: 0}
    assert [sum(walked({"it": table}, limit).values()) for limit in (24, 200)] == [0, 1]


@pytest.mark.parametrize(("levels", "found"), [(150, 1), (170, 0)])
def test_160_levels_are_walked(levels: int, found: int) -> None:
    deep: Any = [ONE]
    for _ in range(levels - 2):
        deep = [deep]
    assert sum(walked({"it": deep}, DEPTH_MAX).values()) == found


def test_between_two_looks_at_the_clock_16_objects_are_looked_at() -> None:
    walk = HeapWalker(lambda tensor, walk: True, Files(), gc_roots.of_module)
    space = {"it": [1.5] * 160}
    walk.begin([Root(lambda: space, named=True)], limit=6)
    slices = 1
    while not walk.run(ThreadClock(0), lambda: False):
        slices += 1
    assert 10 <= slices <= 14


LENGTHS = (40_001, 40_002, 40_003)  # nobody else has such a tensor


def test_the_way_back_lists_no_cache_and_no_class_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To list what a cache of thousands remembers may take longer than what is left of a slice."""
    met: list[int] = []
    listed: list[Any] = []

    @functools.lru_cache(maxsize=100)
    def remembered(length: int) -> list[list[torch.Tensor]]:
        return [[torch.ones(length)] for _ in range(4)]

    class Kept:
        tensors = remembered

    def closed_over() -> Any:
        return Kept

    for length in LENGTHS:
        remembered(length)
    children = HeapWalker._children

    def listing(walk: HeapWalker, level: Any) -> Any:
        listed.append(level.obj)
        return children(walk, level)

    def found(tensor: torch.Tensor, walk: HeapWalker) -> bool:
        met.extend(length for length in tensor.shape if length in LENGTHS)
        return True

    monkeypatch.setattr(HeapWalker, "_children", listing)
    walk = HeapWalker(found, Files(), gc_roots.of_module)
    space = {"one": closed_over}
    walk.begin([Root(lambda: space, named=True)], limit=20)
    slices = 1
    while not walk.run(ThreadClock(0), lambda: False):
        slices += 1
    assert met == sorted([*LENGTHS] * 4)
    times = [sum(one is each for one in listed) for each in (closed_over, Kept, remembered)]
    assert max(times) < 20 < slices, times  # as often as there may be more to look at in it, not in each slice
