"""How far back one variable's graph reaches, where no look has the time to see all of it."""

from __future__ import annotations

from typing import Any

import torch

from gpumon_agent.leaks.graph_retention import Looks, Retained, _kept, reaches, retained

AT_ONCE = 10  # nodes, of which each look has time for so many


class Hurried:
    """A clock that is over after so many nodes were read, as that is what takes the time."""

    read = 0

    def __init__(self, budget_ns: int) -> None:
        Hurried.read = 0

    def over(self) -> bool:
        return Hurried.read >= AT_ONCE

    @staticmethod
    def kept(node: Any, reader: Any) -> dict[int, int]:
        kept = _kept(node, reader)
        Hurried.read += bool(kept)
        return kept


def test_each_look_goes_on_where_the_one_before_had_to_end(monkeypatch):
    monkeypatch.setattr("gpumon_agent.leaks.graph_retention.ThreadClock", Hurried)
    monkeypatch.setattr("gpumon_agent.leaks.graph_retention._kept", Hurried.kept)
    looks = Looks()
    weights = torch.ones(128, requires_grad=True)
    total = torch.zeros(())
    own: Retained | None = None
    seen = []
    for step in range(12):
        once = (weights * torch.ones(128)).square().sum()  # keeps two of 512 bytes a step, and the weights
        total = total + once
        if step >= 8:
            own = retained(total, {weights.untyped_storage()._cdata}, 0, looks)
            assert own is not None
            seen.append(own.bytes // 1024)
            assert step == 8 or not reaches(once, looks.before, 1_000_000)
            assert step == 8 or reaches(total * 2, looks.before, 1_000_000)
    assert own is not None
    assert seen == [5, 10, 11, 12]  # steps' worth: the third look found all eleven there were
    assert not own.cut

    # another graph each time is as long as it is
    single = Looks()
    sizes = set()
    for _ in range(3):
        once = (weights * torch.ones(128)).square().sum()
        measured = retained(once, {weights.untyped_storage()._cdata}, 0, single)
        assert measured is not None
        sizes.add((measured.bytes, measured.cut))
    assert sizes == {(1024, False)}
