"""Whose each block of the allocator is, in a viewer's map: on a virtual GPU, against the tensors themselves."""

from __future__ import annotations

from typing import Any

import pytest

from gpumon_agent import wire


def named_by_a_census() -> None:
    """A deque is not read with the variables; the census walks it. What came later has no owner."""
    import os
    from collections import deque

    import torch

    from gpumon_agent import agent, wire

    os.environ["GPUMON_GOVERNOR"] = "off"
    watched = agent.REGISTRY.agent = agent.Agent()
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    watched.adopt(model, optimizer)
    kept: deque[torch.Tensor] = deque()

    def step(keeps: int) -> None:
        model(torch.ones(2, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.extend(torch.ones(1_000, device="cuda") for _ in range(keeps))

    for _ in range(4):
        step(keeps=5)
    watched.ask_census()
    for _ in range(20):
        step(keeps=0)
    assert watched.leaks.census.newest is not None
    known = len(kept)
    freed = kept.popleft()
    address = freed.data_ptr()
    del freed
    step(keeps=0)
    kept.append(torch.ones(1_000, device="cuda"))  # may have that address
    step(keeps=2)
    owned = watched.accounts.owned_now(0, watched.leaks.census.found)
    assert owned is not None
    holders = [holder.text for holder in owned.holders]
    codes = [owned.codes.get(each.data_ptr(), 0) for each in kept]
    named = [holders[code - wire.HOLDER_OWNERS] for code in codes if code]
    assert named == ["kept[*] in named_by_a_census()"] * (known - 1), named
    assert codes[known - 1 :] == [0, 0, 0]
    assert address in {each.data_ptr() for each in kept} or owned.codes.get(address, 0) == 0
    for parameter in model.parameters():
        assert wire.BLOCK_OWNERS[owned.codes[parameter.data_ptr()]] == "weights"
        for state in ("exp_avg", "exp_avg_sq"):
            assert wire.BLOCK_OWNERS[owned.codes[optimizer.state[parameter][state].data_ptr()]] == "optimizer"
    watched.leave("stopped")


def grown_since_the_census() -> None:
    """What a list gets after a census has the name that the census gave the list, whatever the function calls it."""
    import os

    import torch

    from gpumon_agent import agent, wire

    os.environ["GPUMON_GOVERNOR"] = "off"
    watched = agent.REGISTRY.agent = agent.Agent()
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched.adopt(model, optimizer)

    class Log:
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []
            self.owned = watched.accounts.owned_now(0, ())

        def step(self) -> None:
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            self.kept.append(torch.ones(1_000, device="cuda"))
            self.owned = watched.accounts.owned_now(0, watched.leaks.census.found)

    log = Log()
    for _ in range(8):
        log.step()
    assert log.owned is not None
    assert [holder.text for holder in log.owned.holders] == ["self.kept in step()"]
    watched.ask_census()
    for _ in range(20):
        log.step()
    assert watched.leaks.census.newest is not None
    assert [holder.text for holder in log.owned.holders] == ["log.kept[*] in grown_since_the_census()"]
    assert {log.owned.codes[each.data_ptr()] for each in log.kept} == {wire.HOLDER_OWNERS}
    watched.leave("stopped")


def waits_for_a_walk() -> None:
    """Most of these steps are quiet. The request samples one, and is carried out as its forward ends."""
    import msgspec
    import torch

    from gpumon_agent import agent, wire

    watched = agent.REGISTRY.agent = agent.Agent()
    model = torch.nn.Sequential(torch.nn.Linear(256, 1_024), torch.nn.ReLU(), torch.nn.Linear(1_024, 256)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched.adopt(model, optimizer)

    def step() -> None:
        model(torch.ones(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2_000):
        step()
        if watched.phases.quiet:
            break
    assert watched.phases.quiet
    watched.requests.take(wire.Request(wire.BLOCKS))
    for _ in range(20_000):
        step()
        if watched.requests.kept:
            break
    (part,) = watched.requests.kept[0]
    read = msgspec.msgpack.decode(part, type=wire.Segments)
    assert read.walked
    assert read.phase != wire.FORWARD, "as it ends"
    sums = dict.fromkeys(wire.BLOCK_OWNERS, 0)
    for segment in read.segments:
        assert len(segment.owners) == len(segment.blocks)
        for (size, _), owner in zip(segment.blocks, segment.owners, strict=True):
            sums[wire.BLOCK_OWNERS[owner]] += size
    assert sums["weights"] == 4 * (2 * 256 * 1_024 + 1_024 + 256)
    assert sums["activations"] >= 64 * 1_024 * 4, sums
    watched.leave("stopped")


@pytest.mark.parametrize("script", [named_by_a_census, grown_since_the_census, waits_for_a_walk])
def test_blocks_have_the_owners_of_their_tensors(virtual_gpu: Any, script: Any) -> None:
    virtual_gpu(memory="4GiB").run(script)


def test_numbers_of_owners_that_recordings_have() -> None:
    assert wire.BLOCK_OWNERS[:12] == (
        "", "weights", "buffers", "gradients", "optimizer", "buckets", "inputs", "activations", "workspaces",
        "checkpoints", "other_models", "variables",
    )  # fmt: skip
    assert wire.HOLDER_OWNERS == 128
    fields = set(wire.Ledger.__struct_fields__)
    assert fields >= set(wire.BLOCK_OWNERS[1:])


def test_owners_have_50_milliseconds_of_the_thread_and_five_times_that_in_all(watch: Any, monkeypatch: Any) -> None:
    import torch

    from gpumon_agent.attribution import block_owners
    from gpumon_agent.thread_clock import ThreadClock

    allowed = []

    class Noted(ThreadClock):
        def __init__(self, budget_ns: int, *, wall_ns: int | None = None) -> None:
            super().__init__(0)  # none is left
            allowed.append((budget_ns, wall_ns))

    model = torch.nn.Linear(4, 4)
    watch(model, torch.optim.SGD(model.parameters()))
    monkeypatch.setattr(block_owners, "ThreadClock", Noted)
    assert watch.agent.accounts._block_owners.now(0, [], [], []) is None
    assert allowed == [(50_000_000, 250_000_000)]
