"""`epoch` and `batch_idx` of the functions that called the step, and nothing that only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gpumon_agent.attribution.loop_variables import Position, of_callers


def test_of_each_name_the_innermost_counts() -> None:
    def step(batch_idx: int) -> Position:
        return of_callers()

    def one_epoch(epoch: int) -> Position:
        return step(4)

    def training() -> Position:
        epoch = batch_idx = 9
        found = one_epoch(2)
        del epoch, batch_idx
        return found

    assert training() == Position(epoch=2, batch=5)


def test_a_variable_of_a_closure_counts() -> None:
    def made(number: int) -> Callable[[], tuple[Position, int]]:
        epoch = number

        def one_batch() -> tuple[Position, int]:
            return of_callers(), epoch

        assert of_callers() == Position(epoch=number)
        return one_batch

    assert made(3)() == (Position(epoch=3), 3)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, -1, 1 << 53, torch.ones((), dtype=torch.int64)], ids=repr)
def test_what_is_no_count_is_not_told(value: Any) -> None:
    def step(epoch: Any, batch_idx: Any) -> Position:
        return of_callers()

    assert step(value, value) == Position()
    assert step((1 << 53) - 1, 0) == Position((1 << 53) - 1, 1)


def test_a_variable_without_a_value_is_not_told() -> None:
    def step() -> Position:
        found = of_callers()
        epoch = 1
        del epoch
        return found

    assert step() == Position()


def test_a_script_s_loop_counts_and_a_cell_knows_only_its_own_names() -> None:
    names: dict[str, Any] = {"step": of_callers}
    cell: Callable[[str], None] = lambda text: exec(compile(text, "cell", "exec"), names)  # noqa: E731
    cell("for epoch in range(3):\n    for batch_idx in range(2):\n        found = step()")
    assert names["found"] == Position(epoch=2, batch=2)
    cell("found = step()")
    assert names["found"] == Position()
