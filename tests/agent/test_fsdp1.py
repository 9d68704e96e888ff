"""Phases of FSDP1, whose wrapper is found and whose inner units are not taken for models of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
STEP = ["between", "forward", "backward", "optimizer"]


@pytest.mark.parametrize("parameters", ["flat", "original"])
def test_each_rank_has_its_phases(virtual_gpu: Callable[..., Any], tmp_path: Path, parameters: str) -> None:
    gpu = virtual_gpu(devices=2)
    out = tmp_path / "recorded"
    argv = [
        *map(str, (HERE / "run_scenario.py", out, HERE / "fsdp1.py")),
        *(["--orig"] if parameters == "original" else []),
    ]
    ended = gpu.forks.run(argv, {**gpu.environment, "GPUMON_GOVERNOR": "off"}, tmp_path, ranks=2)
    assert ended.codes == (0, 0), ended.err
    for rank in range(2):
        recorded = json.loads(Path(f"{out}.{rank}").read_text())
        assert [phase["phase"] for phase in recorded["phases"]] == ["load", *STEP[1:], *STEP * 3]
        assert {phase["device"] for phase in recorded["phases"]} == {rank}
        assert len(recorded["steps"]) == 4
        assert not recorded["failures"]
        steady = [[p["allocated_peak"] for p in recorded["phases"] if p["step"] == step] for step in (2, 3)]
        assert steady[0] == steady[1]
        assert max(steady[0]) == steady[0][2]  # the shards of both blocks are gathered in backward
