"""What a sampled step is spared, with the governor on: too dear is rested from and tried again, never given up."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from gpumon_agent.governor import Governor


def test_a_machine_under_load_makes_no_ledger_dear_but_what_it_waits_for_does() -> None:
    for wall_ms, rests in ((35, False), (45, True)):
        governor = Governor()
        for step in range(40):
            governor.ledger_thread_ns, governor.ledger_ns = 6_000_000, wall_ms * 1_000_000
            governor.step_closed(10**11, step * 10**11)
        assert governor.ledger_at_end_only is rests


def test_ledgers_that_are_too_dear_are_rested_from_and_come_back() -> None:
    governor = Governor()
    whole = []
    for step in range(4000):
        governor.ledger_ns = 2_000_000 if governor.ledger_at_end_only else 15_000_000 if step < 1000 else 5_000_000
        governor.ledger_thread_ns = governor.ledger_ns
        if not governor.ledger_at_end_only:
            whole.append(step)
        governor.step_closed(10**11, step * 10**11)  # so long that every step is sampled
    assert whole[:12] == [*range(8), 16, 17, 34, 35]
    assert len([step for step in whole if step < 1000]) < 30
    assert whole[-1] == 3999  # and for good, once they are not
    assert len(whole) > 2000


def test_dear_ledgers_are_tried_again_after_512_steps_however_long_they_were_dear() -> None:
    """A model that is smaller after a week is read in full within the hour."""
    governor = Governor()
    whole = []
    for step in range(6000):
        governor.ledger_ns = governor.ledger_thread_ns = 15_000_000
        if not governor.ledger_at_end_only:
            whole.append(step)
        governor.step_closed(10**11, step * 10**11)
    assert max(b - a for a, b in pairwise(whole)) == 1 + 512


def composed_apart() -> None:
    import torch
    from torch import nn

    from gpumon_agent import agent as agents
    from gpumon_agent import governor, wire

    governor.STEP_SHARE = governor.COST_SHARE = 1000.0  # every step is sampled
    agent = agents.REGISTRY.agent = agents.Agent("test", publish=False)
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    agent.adopt(model, optimizer)

    def step(length):
        x = torch.randn(length, 1024, device="cuda")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ledgers = [event for _, event in agent.recorder.drain() if isinstance(event, wire.Ledger)]
        walked = any(each.activations is not None for each in ledgers if each.phase == "forward")
        return walked, [each for each in ledgers if each.peak]

    def unexplained(peak):
        lines = ("weights", "buffers", "gradients", "optimizer", "inputs", "activations", "temporaries", "workspaces")
        return peak.requested - sum(getattr(peak, line) or 0 for line in lines)

    for _ in range(4):
        step(8192)
    alike = [step(8192) for _ in range(12)]
    apart = [peaks[0] for walked, peaks in alike if peaks and not walked]
    assert len(apart) >= 4, alike  # composed from what an earlier step's walk found
    assert {peak.phase for peak in apart} == {"backward"}
    assert all(peak.activations >= 12 * 8192 * 1024 * 4 for peak in apart), apart
    assert all(0 <= unexplained(peak) <= 0.02 * peak.allocated for peak in apart)

    varying = [step(4096 + 512 * (at % 7)) for at in range(40)]
    told = [peak for _, peaks in varying for peak in peaks]
    assert told, varying  # with a walk of their own where nothing stands as it stood
    assert all(0 <= unexplained(peak) <= 0.02 * peak.allocated for peak in told), told
    agent.leave("stopped")
    assert not [failed for failed in agent.guard.failures.items() if failed[1]]


def test_a_peak_is_composed_from_an_earlier_walk_only_where_nothing_has_moved(virtual_gpu: Any) -> None:
    virtual_gpu().run(composed_apart)
