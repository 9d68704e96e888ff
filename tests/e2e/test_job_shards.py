"""Rank 0 of 8 under FSDP: what it should need against what it does, line by line, and how it is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from scenarios._gpt import GPTConfig
from scenarios.catalogue import BY_NAME

FLOAT = 4
WHOLE = GPTConfig(layers=4, width=256, vocabulary=8192).parameters * FLOAT


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_the_estimate_is_within_one_per_cent(virtual_gpu, tmp_path, kind: str) -> None:
    virtual_gpu()  # skips, or fails where it is required
    (tmp_path / "run").mkdir(mode=0o700)
    ran = subprocess.run(
        [sys.executable, "-m", "gpumon", "dryrun", "--device", "a100-40", "--json",
         *BY_NAME[f"{kind}-rank-0-of-8"].command("--steps", "10", "--sleep", "0.02")],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "GPUMON_GOVERNOR": "off"},
    )  # fmt: skip
    objects = [json.loads(line) for line in ran.stdout.splitlines()]
    steps = [each for each in objects if each["type"] == "step"]
    assert len(steps) == 10, ran.stderr
    for step in steps[3:]:
        peak = max(phase["allocated_peak"] for phase in step["phases"])
        assert step["estimate"]["peak"] == pytest.approx(peak, rel=0.01)
        for line in ("weights", "gradients", "optimizer"):
            assert step["estimate"][line] == pytest.approx(step["ledger"][line], rel=0.01), line
        assert step["ledger"]["weights"] == WHOLE // 8

    said = [each["parallel"] for each in objects if each["type"] == "model" and each["parallel"]][-1]
    assert (said["kind"], said["world_size"]) == (kind, 8)
    assert (said["shard_bytes"], said["whole_bytes"]) == (WHOLE // 8, WHOLE)
    block = 12 * 256 * 256 + 13 * 256  # weights, biases and norms
    assert said["unit_bytes"] == WHOLE - 4 * block * FLOAT  # the root's own: tables and the last norm
    assert said["unit"] == ""
