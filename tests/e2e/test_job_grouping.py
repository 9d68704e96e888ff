"""The ranks of a job are one job, whoever started them and however late they learn of each other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
GPUMON = (sys.executable, "-m", "gpumon")
TRAINS = """
import os, subprocess, sys, time
import torch

def train(seconds, model, rank):
    optimizer = torch.optim.AdamW(model.parameters())
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)

def ranks(seconds, rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    train(seconds, torch.nn.Linear(4, 4), rank)  # a rank that does not know of the others yet
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    train(60, torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4)), rank)
"""
STARTED = {
    "by mp.spawn": """
def work(rank, seconds):
    ranks(seconds, rank)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (float(sys.argv[1]),), 2)
""",
    "by the first rank": """
if __name__ == "__main__":
    rank = int(os.environ.get("LOCAL_RANK", 0))
    train(1, torch.nn.Linear(4, 4), rank)  # as Lightning: watched before it starts the others
    if not rank:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
        environment = {**os.environ, "LOCAL_RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "0"}
        other = subprocess.Popen([sys.executable, *sys.argv], env=environment)
    ranks(float(sys.argv[1]), rank)
""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "run").mkdir(mode=0o700)
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path / "run"), "TMPDIR": str(tmp_path)}


@pytest.fixture
def started(environment: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[None]:
    how, seconds = request.param
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = tmp_path / "train.py"
    script.write_text(TRAINS + STARTED[how])
    command = [*GPUMON, "run", sys.executable, str(script), str(seconds), str(port)]
    training = subprocess.Popen(command, env=environment, start_new_session=True)
    yield
    os.killpg(training.pid, 9)
    training.wait()


def listed(environment: dict[str, str], count: int) -> list[dict[str, Any]]:
    end = time.monotonic() + 120
    while True:
        said = subprocess.run([*GPUMON, "ls", "--json"], env=environment, capture_output=True, text=True, check=True)
        found = [json.loads(line) for line in said.stdout.splitlines()]
        if len([each for each in found if each["step"]]) >= count:
            return found
        assert time.monotonic() < end, found
        time.sleep(0.1)


@pytest.mark.parametrize("started", [(how, 20) for how in STARTED], indirect=True, ids=list(STARTED))
@pytest.mark.usefixtures("started")
def test_ranks_that_do_not_know_of_each_other_yet_are_one_job_and_stay_it(environment: dict[str, str]) -> None:
    listed(environment, 2)
    command = [*GPUMON, "attach", "--json"]
    ranks: dict[int, set[int | None]] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        for line in viewer.stdout:
            said = json.loads(line)
            if said["type"] == "step":
                ranks.setdefault(said["pid"], set()).add(said["rank"])
            if len(ranks) == 2 and all(each - {None} for each in ranks.values()):
                break
        viewer.kill()
    assert {rank for each in ranks.values() for rank in each if rank is not None} == {0, 1}


@pytest.mark.parametrize("started", [("by the first rank", 0)], indirect=True, ids=["by the first rank"])
@pytest.mark.usefixtures("started")
def test_a_rank_that_begins_after_the_viewer_joins_it(environment: dict[str, str]) -> None:
    command = [*GPUMON, "attach", "--json", "--wait"]
    heard: set[tuple[int, int | None]] = set()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as viewer:
        assert viewer.stdout is not None
        for line in viewer.stdout:
            said = json.loads(line)
            if said["type"] == "step":
                heard.add((said["pid"], said["rank"]))
            if {rank for _, rank in heard} >= {0, 1}:
                break
        viewer.kill()
    assert len({pid for pid, _ in heard}) == 2
