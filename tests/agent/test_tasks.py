"""What a sampled step is spared, with the governor on: too dear is rested from and tried again, never given up."""

from __future__ import annotations

from gpumon_agent.governor import Governor


def test_ledgers_that_are_too_dear_are_rested_from_and_come_back() -> None:
    governor = Governor()
    whole = []
    for step in range(4000):
        governor.ledger_ns = 2_000_000 if governor.ledger_at_end_only else 15_000_000 if step < 1000 else 5_000_000
        if not governor.ledger_at_end_only:
            whole.append(step)
        governor.boundaries = 3
        governor.step_closed(10**11)  # so long that every step is sampled
    assert whole[:12] == [*range(8), 16, 17, 34, 35]
    assert len([step for step in whole if step < 1000]) < 30
    assert whole[-1] == 3999  # and for good, once they are not
    assert len(whole) > 2000
