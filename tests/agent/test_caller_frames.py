"""The rest of a batch is found in the callers' variables; nothing there is kept alive, and nobody's dict is emptied."""

from __future__ import annotations

import weakref
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor

from gpumon_agent.attribution import caller_frames


def here(call: Any, *args: Any) -> Any:
    """As a module of torch's would stand between."""
    return eval("call(*args)", {"__name__": "torch.nn", "call": call, "args": args})


def test_the_rest_of_a_batch_is_what_stands_beside_what_was_given() -> None:
    def direct() -> list[Tensor]:
        inputs, targets = torch.ones(1), torch.ones(2)
        loss = torch.ones(3, requires_grad=True) * 2
        kept = [torch.ones(4)]  # from step to step: no batch
        found: list[Tensor] = here(caller_frames.beside, [inputs])
        del loss, kept
        return [each for each in found if each is inputs or each is targets or len(each) > 2]

    def within(batch: Any) -> list[Tensor]:
        given = batch[0] if isinstance(batch, tuple) else batch["x"]
        other = {"x": torch.ones(5)}
        found: list[Tensor] = here(caller_frames.beside, [given])
        del other
        return found

    assert [len(each) for each in direct()] == [1, 2]
    for batch in ((torch.ones(1), torch.ones(2)), {"x": torch.ones(1), "y": torch.ones(2)}):
        assert {len(each) for each in within(batch)} == {1, 2}
    assert {len(each) for each in within(UserDict(x=torch.ones(1), y=torch.ones(2)))} == {1, 2}


def test_a_librarys_list_of_micro_batches_is_looked_into_and_a_scripts_is_not() -> None:
    source = (
        "def step(look):\n    several = [{'x': torch.ones(n)} for n in (1, 2, 3)]\n    return look(several[1]['x'])\n"
    )
    found = {}
    for file in ("site-packages/trainer.py", "train.py"):
        namespace: dict[str, Any] = {"torch": torch, "__name__": "trainer"}
        exec(compile(source, f"/lib/{file}", "exec"), namespace)
        found[file] = namespace["step"](lambda given: {len(each) for each in here(caller_frames.beside, [given])})
    assert found == {"site-packages/trainer.py": {1, 2, 3}, "train.py": {2}}


def test_what_was_made_has_a_graph() -> None:
    def step() -> list[Tensor]:
        data, loss = torch.ones(1), torch.ones(3, requires_grad=True) * 2
        return [each for each in here(caller_frames.made) if each is data or each is loss]

    assert [len(each) for each in step()] == [3]


def test_a_look_keeps_nothing_alive_and_empties_no_dict() -> None:
    def dropped() -> bool:
        data = torch.ones(7)
        known = weakref.ref(data)
        here(caller_frames.beside, [data])
        del data
        return known() is None

    def holds_its_own() -> int:
        data = torch.ones(7)
        mine = locals()
        here(caller_frames.beside, [data])
        return len(mine)

    assert dropped()
    assert holds_its_own() == 1


def test_what_the_nearest_callers_made_is_found() -> None:
    def called(depth: int) -> int:
        loss = torch.ones(3, requires_grad=True) * 2
        found = called(depth - 1) if depth else len(here(caller_frames.made))
        del loss
        return found

    assert called(10) == 3  # of four functions: `here` is one


@pytest.mark.parametrize(("entries", "found"), [(60, 60), (70, 1)])
def test_a_tuple_of_more_than_64_is_no_batch(entries: int, found: int) -> None:
    batch = tuple(torch.ones(1) for _ in range(entries))
    beside = here(caller_frames.beside, [batch[0]])
    assert len({id(each) for each in beside if any(each is one for one in batch)} | {id(batch[0])}) == found


@pytest.mark.parametrize(("names", "found"), [(500, [1, 2]), (600, [])])
def test_a_script_of_more_than_512_names_is_not_read(names: int, found: list[int]) -> None:
    """As a long session in a notebook."""
    lengths: list[int] = []

    def look(given: Tensor) -> None:
        lengths.extend(len(each) for each in here(caller_frames.beside, [given]) if len(each) < 3)

    script = {f"name{at}": at for at in range(names)} | {"__name__": "script", "torch": torch, "look": look}
    exec(compile("x, y = torch.ones(1), torch.ones(2)\nlook(x)", "script.py", "exec"), script)
    assert sorted(set(lengths) - ({1} if names > 512 else set())) == found
