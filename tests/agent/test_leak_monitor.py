"""On a device: where leaked tensors were made, checkpoints from torch.load to the last tensor, nothing in a capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def on_a_device(folder: str) -> None:

    import inspect
    import pickle
    import sys
    from pathlib import Path

    import torch
    from torch import nn

    from gpumon_agent import agent as agents
    from gpumon_agent import wire
    from gpumon_agent.leaks import allocations

    originals = torch.load, nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    agent = agents.Agent(publish=False)
    agents.REGISTRY.agent = agent
    said: list[wire.Event] = []
    agent.transport.say = said.extend  # type: ignore[method-assign,assignment]
    agent.adopt(model, optimizer)

    def step() -> torch.Tensor:
        loss = model(torch.ones(4, 256, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def steps(count: int) -> None:
        for _ in range(count):
            step()

    def checkpoints(number: int) -> list[wire.Checkpoint]:
        return [each for each in said if isinstance(each, wire.Checkpoint) and each.number == number]

    # a wrapper that nobody notices
    assert pickle.loads(pickle.dumps(torch.load)) is torch.load is torch.serialization.load
    assert inspect.signature(torch.load) == inspect.signature(originals[0])
    assert torch.load.__doc__ == originals[0].__doc__
    steps(3)
    path = Path(folder) / "model.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    nbytes = sum(each.nbytes for each in model.state_dict().values())

    def resume() -> None:
        checkpoint = torch.load(path, weights_only=True)
        line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
        model.load_state_dict(checkpoint["model"])
        del checkpoint["optimizer"]
        steps(20)
        last = checkpoints(0)[-1]
        assert (last.alive, last.tensors, last.mapped, last.foreign) == (nbytes, 4, False, False), last
        assert last.where == f"{Path(__file__).name}:{line}", last
        assert last.source_line == "checkpoint = torch.load(path, weights_only=True)"
        assert last.holders[0].source_line == last.source_line
        assert last.file == "model.pt"
        assert last.used_step == 3
        assert last.holders[0].text == "checkpoint['model'][*] in resume()", last
        assert agent.accounts.ledgers[0].checkpoints == nbytes
        # who holds it is known still while a census looks for something else, and after it
        known = len(checkpoints(0))
        agent.leaks.census._begin(agent.phases.step, "growth", ())
        assert not agent.leaks.census.searching()
        steps(64)
        assert {each.holders for each in checkpoints(0)[known:]} <= {last.holders}, checkpoints(0)[known:]
        assert any(checkpoints(0)[-1].holders)
        del checkpoint
        steps(3)
        assert checkpoints(0)[-1].alive == 0
        assert agent.accounts.ledgers[0].checkpoints == 0

    resume()

    def taken_over() -> None:
        """With assign=True the model owns what was loaded, and the optimizer the state that it is given."""
        checkpoint = torch.load(path, map_location={"cuda:0": "cuda:0"}, weights_only=True)
        other = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1)).cuda()
        other.load_state_dict(checkpoint["model"], assign=True)
        again = torch.optim.AdamW(other.parameters())
        again.load_state_dict(checkpoint["optimizer"])
        agent.adopt(other, again)
        for _ in range(8):
            other(torch.ones(4, 256, device="cuda")).sum().backward()
            again.step()
            again.zero_grad()
            steps(1)
        last = checkpoints(1)[-1]
        assert last.mapped
        assert last.alive == 0, last
        del checkpoint

    taken_over()

    def beside_a_library(number: int = 2) -> None:
        """A library reads the file again, for itself: the script's own copy is just kept, but an average of weights
        that is written to and a second model are not."""
        torch.save(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 1)).cuda(), Path(folder) / "teacher.pt")
        mine = torch.load(path, weights_only=True)
        average = torch.load(path, weights_only=True)["model"]
        teacher = torch.load(Path(folder) / "teacher.pt", weights_only=False)
        model.load_state_dict(torch.load(path, weights_only=True)["model"])
        for _ in range(200):  # until somebody was found, or nobody
            steps(1)
            if checkpoints(number)[-1].used_step is not None and not agent.leaks.census.searching():
                break
            for name, weight in model.state_dict().items():
                average[name].lerp_(weight, 0.1)
            teacher(torch.ones(4, 256, device="cuda"))
        kept, averaged, taught = (checkpoints(each)[-1] for each in range(number, number + 3))
        assert kept.used_step is not None, kept
        assert kept.alive >= 3 * nbytes, kept
        assert kept.holders[0].name.startswith("mine["), kept
        assert averaged.used_step is None or not averaged.alive, averaged
        assert taught.used_step is None or not taught.alive, taught
        del mine, average, teacher
        steps(3)

    beside_a_library()

    # a leak of one block a step: suspected, held by whom, made where
    losses = []

    def leak(count: int) -> int:
        for _ in range(count):
            loss = step()
            losses.append(loss * 2)
        return inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]

    history = agent.accounts.history
    line = leak(60)
    censuses = [each for each in said if isinstance(each, wire.Census)]
    assert len(censuses) >= 2
    kept = max(censuses[-1].groups, key=lambda group: group.count)
    assert kept.where == f"{Path(__file__).name}:{line}", kept
    assert kept.source_line == "losses.append(loss * 2)"
    assert kept.holders[0].source_line == "losses = []"
    assert kept.grown
    assert kept.has_graph
    assert "losses[*]" in kept.holders[0].name
    assert not torch._C._cuda_isHistoryEnabled()
    assert not history.stacks

    # more blocks than one slice could read: each is asked for its line; by an older torch in the pause of a census
    many = [torch.empty(1, device="cuda") for _ in range(600)]
    agent.leaks.census.growth_trigger._not_before = sys.maxsize  # or growth may begin one while stacks are being kept
    ask = allocations._ask
    for asks in (ask, None) if ask is not None else (None,):
        allocations._ask = asks
        agent.leaks.census._taking = None
        said.clear()
        assert agent.ask_census() is None
        line = leak(12)
        census = next(each for each in said if isinstance(each, wire.Census))
        kept = max((each for each in census.groups if each.has_graph), key=lambda group: group.count)
        assert census.reason == "asked"
        assert kept.where == f"{Path(__file__).name}:{line}", (asks, kept)
        assert not history.stacks
    allocations._ask = ask
    assert len(many) == 600

    # who records history has it alone
    torch.cuda.memory._record_memory_history(max_entries=100)
    assert not history.begin_stacks()
    torch.cuda.memory._record_memory_history(None)

    # nothing during a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refused = agent.ask_census()
    assert refused == "a CUDA graph is being captured"
    assert agent.ask_census() is None

    agent.leave("stopped")
    assert originals == (torch.load, nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict)
    assert torch.serialization.load is torch.load
    assert not [failed for failed in agent.guard.failures.items() if failed[1]]


def test_on_a_device(virtual_gpu: Any, tmp_path: Path) -> None:
    virtual_gpu().run(on_a_device, str(tmp_path), env={"GPUMON_GOVERNOR": "off"})


MIB = 1 << 20


@pytest.mark.parametrize(("grows_by", "suspected"), [(2, True), (1, False)])
def test_host_memory_that_grows_by_2_mib_in_four_steps_is_suspected_within_80(
    watch: Any, grows_by: int, suspected: bool
) -> None:
    """Slower growth is what any process has for a while."""
    leaks = watch.agent.leaks
    seen = False
    for step in range(2, 82):
        leaks.resident_bytes = 1024 * MIB + step // 4 * grows_by * MIB
        leaks.step_closed(step, ())
        seen |= leaks.census.growth_trigger.grows
    assert seen == suspected


def of_growth() -> None:
    import torch

    from gpumon_agent import agent as agents
    from gpumon_agent import wire
    from gpumon_agent.leaks import census as module

    module.SLICE_NS = 100_000_000
    wire.GROUPS_MAX = 4_000

    def goes_deeper(kept: int, blocks_a_step: int | None) -> bool:
        """Whether a census that growth began, of so many blocks a step or of bytes alone, looks eight lists deep."""
        agent = agents.REGISTRY.agent = agents.Agent(publish=False)
        losses = [torch.ones(3, 19, device="cuda") for _ in range(kept)]
        deep: Any = torch.ones(2, 23, device="cuda")
        for _ in range(8):
            deep = [deep]
        census, step = agent.leaks.census, 2
        while census.newest is None:
            blocks = None if blocks_a_step is None else step * blocks_a_step
            census.step_closed(step, [(0, step << 20, blocks)])
            step += 1
        found = {group.shape for group in census.newest.groups}
        agent.leave("stopped")
        assert (3, 19) in found
        assert len(losses) == kept
        return (2, 23) in found

    # some 150 blocks were added: more than half of them must be found
    assert not goes_deeper(100, 10)
    assert goes_deeper(40, 10)
    # five equal tensors are no longer what one step uses
    assert not goes_deeper(5, None)
    assert goes_deeper(4, None)


def test_a_census_goes_deeper_until_what_it_has_found_explains_the_growth(virtual_gpu: Any) -> None:
    virtual_gpu().run(of_growth, env={"GPUMON_GOVERNOR": "off"})


def of_long_graphs() -> None:
    import torch

    from gpumon_agent import agent as agents
    from gpumon_agent.leaks import graph_retention
    from gpumon_agent.thread_clock import ThreadClock

    looks = []

    class Over(ThreadClock):
        """There is never the time to see all of a graph."""

        def __init__(self, budget_ns: int) -> None:
            super().__init__(budget_ns)
            looks.append(budget_ns)

        def over(self) -> bool:
            return True

    graph_retention.ThreadClock = Over  # type: ignore[misc]
    weights = torch.ones(1000, device="cuda", requires_grad=True)

    def looks_at_six(*, asked: bool) -> int:
        agent = agents.REGISTRY.agent = agents.Agent(publish=False)
        one, two, three, four, five, six = (weights.exp().exp() for _ in range(6))
        looks.clear()
        census, step = agent.leaks.census, 2
        if asked:
            agent.ask_census()
        while census.newest is None or census.newest.why == "some objects were not visited yet":
            census.step_closed(step, [(0, 0 if asked else step << 20, None)])
            step += 1
        agent.leave("stopped")
        assert all(each.requires_grad for each in (one, two, three, four, five, six))
        return len(looks)

    # a first look at each, and five more, a step apart: of a graph that still has an end one of them sees it
    assert looks_at_six(asked=False) == 6 + 6 * 5
    # who asks gets the rest soon: four of them are looked at again, in each later round of the walk
    assert looks_at_six(asked=True) == 6 + 4 * 3


def test_four_graphs_that_are_too_long_are_looked_at_again_and_five_times_at_most(virtual_gpu: Any) -> None:
    virtual_gpu().run(of_long_graphs, env={"GPUMON_GOVERNOR": "off"})


def of_few_steps_and_blocks() -> None:
    import torch

    from gpumon_agent.attribution.history import AllocationHistory
    from gpumon_agent.leaks import allocations as module
    from gpumon_agent.leaks.allocations import Allocations
    from gpumon_agent.leaks.object_children import Files
    from gpumon_agent.thread_clock import ThreadClock

    torch.empty(1, device="cuda")
    allocations = Allocations(AllocationHistory(), Files())

    def recorded(blocks: int, *, read: bool = True) -> int:
        """Begins to record, and returns for how many steps it did."""
        allocations.begin(blocks)
        steps = 0
        while allocations.open:
            allocations.step_closed()
            steps += 1
        if read:
            assert allocations.read((), (), ThreadClock(1_000_000_000))
        return steps

    # two steps show what every step leaves behind; then twice as many, in case only some do, but they cost time
    assert [recorded(10) for _ in range(5)] == [2, 4, 8, 16, 16]

    # after three more, what is freed by the next step, or the one after it, is gone
    recorded(10, read=False)
    survived = []
    for _ in range(4):
        allocations.step_closed()
        survived.append(allocations.survived)
    assert survived == [False, False, True, True]

    # a slice reads the snapshot of 500 blocks in one piece
    assert [allocations.readable(blocks) for blocks in (500, 501)] == [True, False]
    if module._ask is not None:  # since torch 2.15 each block can be asked, which begins early: 250 may be 500 soon
        recorded(250, read=False)
        assert not allocations.readable(100_000)
        recorded(251, read=False)
        assert allocations.readable(100_000)

    # older versions of torch: more blocks are read in the pause of a census, which 60,000 do not make too long
    module._ask = None
    assert [allocations.worth_beginning(blocks) for blocks in (500, 501)] == [True, False]
    allocations.begin(10)
    assert [allocations.waits_for_pause(blocks) for blocks in (500, 501, 60_000, 60_001)] == [False, True, True, False]
    while allocations.open:
        allocations.step_closed()
    waits = []
    for _ in range(66):  # the pause need not wait for stacks of the last 64 steps; older ones are of what is freed
        allocations.step_closed()
        waits.append(allocations.waits_for_pause(1_000))
    assert waits == [True] * 2 + [False] * 62 + [True] * 2
    assert allocations.open
    allocations.stop()


def test_stacks_are_recorded_for_few_steps_and_read_of_as_many_blocks_as_there_is_time_for(virtual_gpu: Any) -> None:
    virtual_gpu().run(of_few_steps_and_blocks)
