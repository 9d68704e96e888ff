"""`gpumon contribute`: what it measures and writes, and that nothing of the user's is in it."""

from __future__ import annotations

import json
import lzma
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import traces
from snapshot_files import BASE, MIB, block, content, event, frame, segment, write

SECRET = "project_x"


def call(where: Path, *arguments: object, said: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpumon", "contribute", *map(str, arguments)],
        cwd=where,
        env={**os.environ, **environment},
        input=said,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    frames = [frame(f"/home/me/{SECRET}/train.py", name=SECRET)]
    blocks = [block(size, frames=frames) for size in (3 * MIB, MIB)]
    part = segment(*blocks, frames=frames)
    later = event("alloc", BASE + 3 * MIB, MIB, frames=frames, user_metadata=SECRET)
    root = content([part], [later], allocator_settings={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    return write(tmp_path / f"{SECRET}.pickle", root)


@pytest.mark.torch
def test_it_has_the_device_what_a_context_costs_and_the_requests(
    virtual_gpu: Callable[..., Any], tmp_path: Path, snapshot: Path
) -> None:
    gpu = virtual_gpu(profile="h100-80", context="500MiB")
    done = call(tmp_path, snapshot, "--yes", **gpu.environment)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "contribution.json").read_text()
    assert SECRET not in written + done.stdout
    found = json.loads(written)
    (device,) = found["devices"]
    assert (device["name"], device["capability"]) == ("Virtual H100-80GB", "9.0")
    assert device["context_bytes"] == device["context_after_product_bytes"] == 500 * MIB
    assert "a context takes 500.0 MiB, 500.0 MiB after a matrix product" in done.stdout
    (made,) = found["traces"]
    assert (made["start"], made["events"]) == ([[0, 3 * MIB]], [[0, 1, MIB, 0]])
    assert (made["requested_peak"], made["reserved_peak"], made["segments_end"]) == (4 * MIB, 4 * MIB, [4 * MIB])
    assert made["alloc_conf"] == "max_split_size_mb:64"
    assert found["codes"][0] == "alloc"


def test_its_traces_are_in_the_format_of_those_that_are_compared(tmp_path: Path, snapshot: Path) -> None:
    assert call(tmp_path, snapshot, "--yes").returncode == 0
    (made,) = json.loads((tmp_path / "contribution.json").read_text())["traces"]
    file = tmp_path / "owner+repository__snapshot.json.xz"
    file.write_bytes(lzma.compress(json.dumps({**made, "source": "", "config": ""}).encode()))
    trace = traces.load(file)
    assert trace.start == ((0, 3 * MIB),)
    assert traces.reserved_peak(trace) == 4 * MIB


def test_nothing_is_written_before_you_agree(tmp_path: Path) -> None:
    done = call(tmp_path, said="n\n")
    assert (done.returncode, list(tmp_path.iterdir())) == (1, [])
    assert done.stdout.startswith("contribution.json will have ")
    assert "no CUDA device" in done.stdout
    done = call(tmp_path, "-o", "mine.json", said="y\n")
    assert done.returncode == 0
    assert json.loads((tmp_path / "mine.json").read_text())["devices"] == []
    again = call(tmp_path, "-o", "mine.json", "--yes")
    assert (again.returncode, again.stderr) == (1, "Error: mine.json exists; name another file with -o.\n")


def test_what_has_no_events_or_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.pickle", content([segment(block(MIB))]))
    text = tmp_path / "text.pickle"
    text.write_text("no")
    for file, why in ((plain, "no snapshot has events"), (text, "is not a memory snapshot")):
        done = call(tmp_path, file, "--yes")
        assert done.returncode == 1
        assert why in done.stderr
    assert not (tmp_path / "contribution.json").exists()
    done = call(tmp_path, "-o", "nowhere/mine.json", "--yes")
    assert (done.returncode, done.stderr) == (
        1,
        "Error: nowhere/mine.json cannot be written: No such file or directory.\n",
    )
