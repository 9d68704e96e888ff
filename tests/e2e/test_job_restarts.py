"""An elastic job: a rank is killed, torchrun starts all of them anew, and who watches sees one job that went on."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

GPUMON = (sys.executable, "-m", "gpumon")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
DDP = Path(__file__).parents[1] / "scenarios" / "ddp.py"


class Heard:
    """The objects of a viewer, as they come."""

    def __init__(self, viewer: subprocess.Popen[str]) -> None:
        self.objects: list[dict[str, Any]] = []
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._viewer = viewer
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._viewer.stdout or ():
            self._queue.put(line)
        self._queue.put(None)

    def until(self, holds: Any, seconds: float = 90) -> None:
        """Until something holds of all objects, or the viewer has ended."""
        end = time.monotonic() + seconds
        while not holds(self.objects):
            line = self._queue.get(timeout=max(0.1, end - time.monotonic()))
            assert line is not None, [each for each in self.objects if each["type"] in ("hello", "goodbye")]
            self.objects.append(json.loads(line))

    def rest(self) -> None:
        while (line := self._queue.get(timeout=300)) is not None:
            self.objects.append(json.loads(line))


def training(objects: list[dict[str, Any]], restarts: int) -> set[int]:
    """Ranks that closed a step after so many restarts."""
    pids = {each["pid"] for each in objects if each["type"] == "hello" and each["restarts"] == restarts}
    return {each["rank"] for each in objects if each["type"] == "step" and not each["replayed"] and each["pid"] in pids}


@pytest.fixture
def environment(virtual_gpu, tmp_path) -> dict[str, str]:
    made = {**virtual_gpu(devices=2).environment, "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    # Workers share torchrun's store by default, across restarts too: a rank that reads it early finds the NCCL id of
    # the start before (https://github.com/pytorch/pytorch/issues/135712), and waits for ranks that are gone.
    return made | {"TMPDIR": str(tmp_path), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def job(environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    torchrun = (*TORCHRUN, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
    process = subprocess.Popen(
        [*GPUMON, "run", "--name", "job", *torchrun, str(DDP), "--steps", "600", "--sleep", "0.05"],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    yield process
    process.terminate()
    process.wait()


def test_a_killed_rank_is_lost_the_job_is_restarted_and_its_watchers_stay(job, environment) -> None:
    viewer = subprocess.Popen(
        [*GPUMON, "attach", "--wait", "--json"], env=environment, stdout=subprocess.PIPE, text=True
    )
    exporter = subprocess.Popen(
        [*GPUMON, "export", "prometheus", "--listen", "127.0.0.1:0"], env=environment, stderr=subprocess.PIPE, text=True
    )
    assert exporter.stderr is not None
    url = exporter.stderr.readline().split()[1].rstrip(";")
    try:
        heard = Heard(viewer)
        heard.until(lambda objects: training(objects, 0) == {0, 1})
        first = {each["rank"]: each for each in heard.objects if each["type"] == "hello"}
        assert {rank: (each["local_rank"], each["local_world_size"], each["node"]) for rank, each in first.items()} == {
            0: (0, 2, "0"),
            1: (1, 2, "0"),
        }
        os.kill(first[1]["pid"], signal.SIGKILL)

        heard.until(lambda objects: training(objects, 1) == {0, 1})
        byes = {each["pid"]: each["reason"] for each in heard.objects if each["type"] == "goodbye"}
        assert byes[first[1]["pid"]] == "lost"
        assert byes[first[0]["pid"]] in ("signal", "lost", "exception")
        second = {each["rank"]: each for each in heard.objects if each["type"] == "hello" and each["restarts"] == 1}
        assert {each["pid"] for each in second.values()}.isdisjoint(each["pid"] for each in first.values())
        assert {each["run_id"] for each in (*first.values(), *second.values())} == {first[0]["run_id"]}

        both = 'gpumon_job_ranks{run="0",state="live",training="job"} 2.0'
        deadline = time.monotonic() + 20  # the exporter hears of the new ranks on its own
        while both not in (lines := urllib.request.urlopen(url, timeout=10).read().decode().splitlines()):
            assert time.monotonic() < deadline, "\n".join(lines)
            time.sleep(0.1)
        restarts = [line for line in lines if line.startswith("gpumon_rank_restarts_total{")]
        assert len(restarts) == 2
        assert all(line.endswith(" 1.0") for line in restarts)

        os.kill(second[0]["pid"], signal.SIGKILL)  # no restart is left: torchrun gives up, and so does the viewer
        heard.rest()
        assert viewer.wait(30) == 0
        assert job.wait(60) != 0
    finally:
        for process in (viewer, exporter):
            process.kill()
            process.communicate()
