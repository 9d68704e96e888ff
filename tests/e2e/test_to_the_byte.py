"""The main job, from a script that knows nothing of gpumon to a viewer's JSON: no figure off by a byte."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from own_figures import as_phases_end

SCRIPT = Path(__file__).with_name("own_readings.py")
FIGURES = ("allocated", "allocated_peak", "reserved", "reserved_peak", "active", "inactive_split", "requested")
GPUMON = (sys.executable, "-m", "gpumon")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def attach(environment: dict[str, str], job: str, *options: str, within_s: float = 240) -> list[dict[str, Any]]:
    """What a viewer prints that is started beside the job, as soon as the job can be found."""
    end = time.monotonic() + within_s
    while True:
        viewer = subprocess.run(
            [*GPUMON, "attach", job, "--json", *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        if viewer.returncode == 0:
            return [json.loads(line) for line in viewer.stdout.splitlines()]
        assert time.monotonic() < end, viewer.stderr
        time.sleep(0.1)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_figure_of_every_phase_is_what_the_script_read_itself(virtual_gpu, tmp_path, micro_batches):
    environment = {**virtual_gpu(profile="a100-40").environment, "GPUMON_GOVERNOR": "off"}
    own = tmp_path / "own.jsonl"
    command = [SCRIPT, own, "--steps", 25, "--pause", 0.1, "--micro-batches", micro_batches]
    with subprocess.Popen([*GPUMON, "run", "--name", "own", *map(str, command)], env=environment) as training:
        objects = attach(environment, "own")
        assert training.wait() == 0
    steps = [o for o in objects if o["type"] == "step"]
    seen = [
        {"step": step["step"], "phase": phase["phase"], **{name: phase[name] for name in FIGURES}}
        for step in steps
        for phase in step["phases"]
    ]
    assert len(steps) == 25
    assert seen == as_phases_end(lines(own))
    assert objects[-1]["type"] == "goodbye"
    assert objects[-1]["reason"] == "finished"


@pytest.mark.parametrize("reset", ["never", "boundary", "sometimes"])
def test_the_peaks_a_user_reads_are_the_same_with_and_without_gpumon(virtual_gpu, tmp_path, reset):
    environment = virtual_gpu(profile="a100-40").environment
    read: dict[str, list[dict[str, Any]]] = {}
    for how, launch in {"alone": [sys.executable], "watched": [*GPUMON, "run"]}.items():
        own = tmp_path / f"{how}.jsonl"
        command = [*launch, SCRIPT, own, "--steps", 10, "--micro-batches", 2, "--reset", reset]
        subprocess.run([*map(str, command)], env=environment, check=True, timeout=300)
        read[how] = lines(own)
    assert read["watched"] == read["alone"]
    assert len(read["alone"]) == 10 * 7
