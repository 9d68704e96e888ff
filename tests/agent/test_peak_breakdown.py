"""A peak's composition: a replay by hand, and PyTorch's own history, which nobody sees us use."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gpumon_agent import wire
from gpumon_agent.attribution.block_owners import BlockOwners
from gpumon_agent.attribution.graph import Places
from gpumon_agent.attribution.inventory import Inventory
from gpumon_agent.attribution.peak_breakdown import Block, compose
from gpumon_agent.attribution.unwatched_models import UnwatchedModels
from gpumon_agent.attribution.workspaces import Workspaces
from gpumon_agent.storages import CPU


def events(*told: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [
        {"action": "alloc" if action == "+" else "free_requested", "addr": address, "size": size}
        for action, address, size in told
    ]


WEIGHT = Block("weights", 100)


def saved(path: str, nbytes: int) -> Block:
    return Block("activations", nbytes, (0, path))


def test_what_was_alive_at_the_peak_is_told_apart() -> None:
    trace = events(
        ("-", 2, 50),  # an activation is freed before the peak
        ("+", 10, 40),  # a gradient, which stays
        ("+", 11, 30),  # a temporary
        ("+", 12, 7),  # nobody's, and it stays: the peak
        ("-", 11, 30),
        ("-", 3, 60),
    )
    before = {1: WEIGHT, 2: saved("a.0", 50), 3: saved("a.1", 60)}
    after = {1: WEIGHT, 10: Block("gradients", 40, (0, "a.0"))}
    found = compose(trace, 215, before, after, {}, forward=False)  # 5 bytes at the beginning are nobody's
    assert found.requested == 215 - 50 + 40 + 30 + 7
    assert found.lines == {"weights": 100, "activations": 60, "gradients": 40, "temporaries": 30}
    assert found.requested - sum(found.lines.values()) == 5 + 7
    assert found.module == "a"  # after a.0's gradient, before a.1's activation went


def test_what_the_loss_saved_is_an_activation_while_it_is_alive() -> None:
    trace = events(("+", 5, 8), ("+", 6, 20), ("-", 5, 8), ("+", 7, 30), ("-", 6, 20), ("+", 6, 5), ("-", 6, 5))
    found = compose(trace, 100, {1: WEIGHT}, {1: WEIGHT, 7: Block("gradients", 30)}, {6: saved("", 20)}, forward=False)
    assert found.lines == {"weights": 100, "activations": 20, "gradients": 30}


def test_a_phase_that_only_frees_peaked_as_it_began() -> None:
    found = compose(events(("-", 2, 50)), 150, {1: WEIGHT, 2: saved("a", 50)}, {1: WEIGHT}, {}, forward=False)
    assert (found.requested, found.lines, found.module) == (150, {"weights": 100, "activations": 50}, None)


def test_in_forward_the_module_is_the_one_around_what_is_saved_next_to_the_peak() -> None:
    trace = events(("+", 2, 5), ("+", 3, 5), ("+", 4, 90), ("-", 4, 90), ("+", 5, 5))
    after = {2: saved("b.0.q", 5), 3: saved("b.0.k", 5), 5: saved("b.0.out", 5)}
    assert compose(trace, 0, {}, after, {}, forward=True).module == "b.0"
    assert compose(trace[:-1], 0, {}, after, {}, forward=True).module is None  # nothing after it tells


def invisible() -> None:

    import torch
    from torch import nn

    from gpumon_agent import agent as agents
    from gpumon_agent import wire

    names = ("_cuda_memorySnapshot", "_cuda_record_memory_history", "_cuda_isHistoryEnabled")
    originals = {name: getattr(torch._C, name) for name in names}
    agent = agents.REGISTRY.agent = agents.Agent("test", publish=False)
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    agent.adopt(model, optimizer)
    history = agent.accounts._peak.history

    def step(inside):
        x = torch.randn(32, 1024, device="cuda")
        loss = model(x).sum()
        loss.backward()
        was = history.recording
        inside()
        optimizer.step()
        optimizer.zero_grad()
        recording.append(was)
        events = [event for _, event in agent.recorder.drain()]
        return [event for event in events if isinstance(event, wire.Ledger) and event.peak]

    recording = []
    peaks = []
    for _ in range(4):
        peaks += step(lambda: None)
    assert [peak.phase for peak in peaks] == ["optimizer"] * len(peaks), peaks
    assert len(peaks) >= 2
    assert recording[-1]
    named = [sum(getattr(peak, line) or 0 for line in ("weights", "gradients", "optimizer", "inputs", "activations",
             "temporaries", "workspaces", "buffers")) for peak in peaks]  # fmt: skip
    assert peaks[-1].requested == named[-1]
    assert peaks[-1].temporaries == peaks[-1].weights  # foreach: one list as large as the parameters

    snapshots = []

    def look() -> None:
        assert history.recording
        assert not torch._C._cuda_isHistoryEnabled()
        snapshots.append(torch.cuda.memory._snapshot())
        assert history.recording

    assert step(look)  # somebody looked, and saw nothing of ours
    assert snapshots[0]["device_traces"][0] == []

    def record() -> None:
        assert history.recording
        torch.cuda.memory._record_memory_history(max_entries=1000)

    assert step(record) == []
    assert not history.recording
    assert torch._C._cuda_isHistoryEnabled()
    for _ in range(2):
        assert step(lambda: None) == []  # theirs goes on, and ours stays away
    assert torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(None)
    for _ in range(2):
        assert step(lambda: None) == []  # who records once has it alone: what they recorded may still be wanted
    agent.leave("stopped")
    assert originals == {name: getattr(torch._C, name) for name in originals}
    assert not torch._C._cuda_isHistoryEnabled()
    assert not [failed for failed in agent.guard.failures.items() if failed[1]]


def test_history_is_ours_for_one_phase_and_gives_way_to_the_users(virtual_gpu: Any) -> None:
    virtual_gpu().run(invisible, env={"GPUMON_GOVERNOR": "off"})


def test_a_phase_of_more_than_100_000_events_has_no_breakdown(virtual_gpu: Any) -> None:
    """Torch keeps them in memory until the phase ends."""

    def script() -> None:
        import torch

        from gpumon_agent.attribution.history import AllocationHistory

        torch.empty(1, device="cuda")
        history = AllocationHistory()
        known = []
        for count in (30_000, 60_000):
            assert history.begin()
            for _ in range(count):  # an event each for allocation and free
                torch.empty(1, device="cuda")
            known.append(history.end() is not None)
        history.remove()
        assert known == [True, False], known

    virtual_gpu().run(script)


def test_a_weight_replaced_by_one_of_its_size_is_known_again_after_32_breakdowns() -> None:
    """The bytes of its line are the same, so only a new search sees that the address is another."""
    model = nn.Linear(8, 8)
    inventory = Inventory()
    inventory.watch(model)
    owners = BlockOwners(inventory, UnwatchedModels(lambda: [(0, model)], print), Workspaces())

    def line() -> str:
        sums = inventory.owners(torch.device("cpu"))
        ledger = wire.Ledger(0, wire.BACKWARD, 0, 0, None, None, None, *sums)
        return owners.blocks(ledger, CPU, [], Places())[model.weight.data_ptr()].line

    assert line() == "weights"
    model.weight.data = model.weight.data.clone()
    assert [line() for _ in range(33)][-1] == "weights"
