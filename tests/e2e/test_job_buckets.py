"""DDP on four devices, over NCCL's stand-in and gloo, with a copy in the buckets and without: to the byte, live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("rewrapped.py")
RANKS = 4


def test_buckets_are_the_logger_s_and_the_allocator_s_and_the_finding_comes_and_goes(virtual_gpu, tmp_path) -> None:
    virtual_gpu()  # skips, or fails where it is required
    (tmp_path / "run").mkdir(mode=0o700)
    ran = subprocess.run(
        [sys.executable, "-m", "gpumon", "dryrun", "--device", "a100-40", "--devices", str(RANKS), "--json",
         sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "GPUMON_GOVERNOR": "off", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    objects = [json.loads(line) for line in ran.stdout.splitlines()]
    assert objects[-1]["exit_code"] == 0, ran.stderr
    for rank in range(RANKS):
        wraps = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [(wrap["backend"], wrap["view"]) for wrap in wraps] == [
            ("nccl", False), ("nccl", True), ("gloo", False), ("gloo", True),
        ]  # fmt: skip
        _one_rank([each for each in objects if each["rank"] == rank], wraps)


def _one_rank(objects: list[dict[str, Any]], wraps: list[dict[str, Any]]) -> None:
    weights = wraps[0]["weights"]
    for wrap in wraps:
        assert sum(wrap["buckets"]) == weights
        assert len(wrap["buckets"]) > 2
        assert wrap["beside"] == (weights if wrap["view"] else 2 * weights)  # as the allocator has it

        said = [
            each["parallel"]
            for each in objects
            if each["type"] == "model" and (each["parallel"] or {}).get("rebuilt")
            and each["parallel"]["gradient_as_bucket_view"] == wrap["view"]
        ]  # fmt: skip
        assert wrap["buckets"] in [parallel["bucket_bytes"] for parallel in said]
        assert wrap["first"] in [parallel["first_bucket_bytes"] for parallel in said]
        assert {parallel["world_size"] for parallel in said} == {RANKS}

        (step,) = [each for each in objects if each["type"] == "step" and each["step"] == wrap["step"]]
        backward = next(phase["ledger"] for phase in step["phases"] if phase["phase"] == "backward")
        assert backward["buckets"] == weights
        assert backward["gradients"] == (0 if wrap["view"] else weights)

    states = [each["state"] for each in objects if each["type"] == "finding" and each["code"] == "bucket-copy"]
    assert states == ["open", "gone", "open", "gone"]
