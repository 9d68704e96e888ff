"""The rest of a batch is found in the callers' variables; nothing there is kept alive, and nobody's dict is emptied."""

from __future__ import annotations

import weakref
from collections import UserDict
from typing import Any

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
