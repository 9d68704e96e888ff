"""Which loads are followed, and when somebody looks at what they left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gpumon_agent.attribution.kept import Claimed
from gpumon_agent.governor import Governor
from gpumon_agent.leaks.checkpoints import Checkpoints
from gpumon_agent.leaks.loads import Loads


@pytest.fixture
def loads() -> Iterator[Loads]:
    made = Loads()
    made.step = lambda: 5
    yield made
    made.stop()


def load(folder: Path, tensors: int) -> dict[str, torch.Tensor]:
    torch.save({str(at): torch.ones(at + 1) for at in range(tensors)}, folder / "state.pt")
    state = torch.load(folder / "state.pt")
    assert isinstance(state, dict)
    return state


def give(tensors: int) -> None:
    """Of the shapes of a file's first ones, to a model, but no tensors of a load."""
    nn.Module().load_state_dict({str(at): torch.zeros(at + 1) for at in range(tensors)}, strict=False)


def test_the_newest_64_loads_are_followed(loads: Loads, tmp_path: Path) -> None:
    kept = [load(tmp_path, 1) for _ in range(70)]
    assert [each.number for each in loads.loads] == list(range(6, 70))
    assert len(kept) == 70


def test_of_a_load_200_000_tensors_are_followed(loads: Loads) -> None:
    """Each takes 2 µs, and a data set may be a list of millions."""
    loads.step = lambda: 0  # what is given before the first step is a load
    given = {str(at): torch.empty(1) for at in range(200_003)}
    nn.Module().load_state_dict(given, strict=False)
    assert [len(each.followed) for each in loads.loads] == [200_000]


@pytest.mark.parametrize(("of", "given", "twin"), [(1, 1, False), (2, 2, True), (16, 2, True), (17, 2, False)])
def test_a_twin_has_an_eighth_of_its_tensors_shapes_in_what_was_given_and_two_of_them(
    loads: Loads, tmp_path: Path, of: int, given: int, twin: bool
) -> None:
    """An optimizer's file has three tensors to each of the model's; of a single one its shape says nothing."""
    kept = load(tmp_path, of), load(tmp_path, of)
    give(given)
    first, second = loads.loads
    assert not second.twin  # the newest is what was converted on the way
    assert (first.twin, first.used_step) == (twin, 5 if twin else None)
    assert kept


def test_owners_are_asked_two_steps_after_its_use_and_who_holds_it_every_64_until_a_search_begins(
    loads: Loads, tmp_path: Path
) -> None:
    """As the optimizer steps for the second time its state has been made of it."""
    governor, searches, step = Governor(), [], 0
    governor.ledger = False
    checkpoints = Checkpoints(
        loads,
        governor,
        devices=lambda: [("cpu", 0)],
        say=lambda events: None,
        search=lambda: bool(searches.append(step)),
        searching=lambda: False,
    )
    kept = load(tmp_path, 2)
    nn.Module().load_state_dict(kept, strict=False)
    for step in (5, 6):
        checkpoints.step_closed(step)
        assert not governor.ledger
    checkpoints.step_closed(7)
    assert governor.ledger
    loads.step = lambda: 7
    loads.claim(-1, Claimed())
    for step in range(8, 200):
        checkpoints.step_closed(step)
    assert searches == [8, 64, 128, 192]
