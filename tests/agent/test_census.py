"""A census: who holds what, by name; and that nobody notices that it was taken."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import zoo

from gpumon_agent import agent as agents
from gpumon_agent import wire


def census_of(watch: Any, step: Any, times: int = 5_000) -> wire.Census:
    """One that was asked for, when it is complete."""
    agent: agents.Agent = watch.agent
    assert agent.ask_census() is None
    before = agent.evidence.census.newest

    class Complete(Exception):
        pass

    def one() -> None:
        step()
        newest = agent.evidence.census.newest
        if newest is not before and newest is not None and not newest.cut:
            raise Complete

    try:
        zoo.around(one, times)
    except Complete:
        return agent.evidence.census.newest
    raise AssertionError("the census is not complete")


def test_every_way_of_keeping_tensors_is_named(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpumon_agent.census.SLICE_NS", 100_000_000)
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
        told = [(holder.name, holder.kind, holder.where) for holder in group.holders] if group is not None else []
        if not any(name in said and what == kind for said, what, _ in told):
            wrong[key] = name, told
    for key, what in wrong.items():
        print("WRONG", key, what)
    assert not wrong
