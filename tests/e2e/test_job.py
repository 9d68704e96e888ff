"""A torchrun job is one thing: its ranks are found together, each with its own device, and a dead one is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GPUMON = (sys.executable, "-m", "gpumon")
DDP = Path(__file__).parents[1] / "scenarios" / "ddp.py"


def agents(environment: dict[str, str]) -> list[dict[str, Any]]:
    listed = subprocess.run([*GPUMON, "ls", "--json"], env=environment, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in listed.stdout.splitlines()]


def attach(environment: dict[str, str], *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GPUMON, "attach", *more], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def job(virtual_gpu, tmp_path) -> Iterator[dict[str, str]]:
    """The environment in which a job of two ranks trains, and no other job is."""
    environment = {**virtual_gpu(devices=2).environment, "OMP_NUM_THREADS": "1"}
    environment |= {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}  # no other job is found here
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    training = subprocess.Popen(
        [*GPUMON, "run", "--name", "job", *torchrun, str(DDP), "--steps", "600", "--sleep", "0.1"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield environment
    training.terminate()  # torchrun ends its ranks
    training.wait()


def both_training(environment: dict[str, str]) -> list[dict[str, Any]]:
    end = time.monotonic() + 300
    while True:
        listed = [agent for agent in agents(environment) if agent["step"]]
        if len(listed) == 2:
            return listed
        assert time.monotonic() < end, listed
        time.sleep(0.2)


def test_ranks_are_listed_with_their_own_device_attached_as_one_and_a_killed_one_is_lost(job):
    ranks = both_training(job)
    assert [(agent["rank"], agent["devices"]) for agent in ranks] == [(0, ["cuda:0"]), (1, ["cuda:1"])]

    one = attach(job, "--json", "--rank", "1", "--steps", "1")
    objects = [json.loads(line) for line in one.stdout.splitlines()]
    assert {each["rank"] for each in objects if each["type"] != "answer"} == {1}
    assert {each["who"]["rank"] for each in objects if each["type"] == "answer"} == {1}
    none = attach(job, "--json", "--rank", "7")
    assert (none.returncode, none.stderr) == (1, "Error: There is no rank 7 in this job: its ranks are 0, 1.\n")

    with subprocess.Popen([*GPUMON, "attach", "--json"], env=job, stdout=subprocess.PIPE, text=True) as viewer:
        heard: list[dict[str, Any]] = []
        assert viewer.stdout is not None
        for line in viewer.stdout:
            heard.append(json.loads(line))
            live = {o["rank"] for o in heard if o["type"] == "step" and not o["replayed"]}
            if live == {0, 1}:
                break
        os.kill(ranks[1]["pid"], signal.SIGKILL)
        goodbyes = [o for line in viewer.stdout if (o := json.loads(line))["type"] == "goodbye"]
        assert viewer.wait() == 0
    lost = next(o for o in goodbyes if o["rank"] == 1)
    assert lost["reason"] == "lost"
    assert lost["pid"] == ranks[1]["pid"]

    buckets = next(o for o in reversed(heard) if o["type"] == "model" and o["rank"] == 0)["parallel"]
    ledger = next(o for o in reversed(heard) if o["type"] == "step" and o["rank"] == 0)["ledger"]
    assert ledger["buckets"] == sum(buckets["bucket_bytes"]) == ledger["gradients"]
