"""A published peak of a full finetuning, repeated on the virtual GPU, and the table that says so."""

from __future__ import annotations

import sys

import pytest
import torchtune_ladder as ladder
import virtual

PACKED = "+ Packed Dataset"


@pytest.mark.torch
def test_the_packed_run_is_within_one_percent() -> None:
    virtual.environment(sys.executable)  # skips where there can be none
    (rung,) = (each for each in ladder.rungs() if each.technique == PACKED)
    assert abs(ladder.measured(rung.words) / rung.published - 1) < 0.01


def test_the_table_compares_each_step_with_the_last_one_tried() -> None:
    rungs = [ladder.Rung("a", 60.0, ""), ladder.Rung("b", 51.0, "not tried: x"), ladder.Rung("c", 42.0, "chunks")]
    rungs.append(ladder.Rung("d", 40.0, "chunks fused"))
    assert list(ladder.lines(rungs, [59.4, None, 54.0, 54.01]))[2:] == [
        "| a | 60.0 | 59.40 | −1.0 % |  |  |  |",
        "| b | 51.0 | not tried: x | | | | |",
        "| c | 42.0 | 54.00 | +28.6 % | −18.0 | −5.4 | yes |",
        "| d | 40.0 | 54.01 | +35.0 % | −2.0 | +0.0 | no |",
    ]
