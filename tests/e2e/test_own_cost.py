"""What gpumon costs a real training: measured in its process, and the same in every outlet."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAME = "costs"
WITHIN_S = 240.0  # on two busy cores; it takes a second until a limit is known


def train() -> None:
    import torch
    from torch import nn

    import gpumon_agent

    torch.set_num_threads(1)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    gpumon_agent.watch(model, optimizer, name="costs")
    while True:
        model(torch.zeros(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def environment(virtual_gpu: Callable[..., Any], tmp_path: Path, request: Any) -> Iterator[dict[str, str]]:
    gpu = virtual_gpu()
    (tmp_path / "run").mkdir(mode=0o700)
    made = {**os.environ, **gpu.environment, "XDG_RUNTIME_DIR": str(tmp_path / "run"), "GPUMON_GOVERNOR": request.param}
    with subprocess.Popen(gpu.command(train), env=made) as training:
        yield made
        training.kill()


def printed(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-m", "gpumon", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False).stdout


def steps(environment: dict[str, str]) -> list[dict[str, Any]]:
    told = map(json.loads, printed(environment, "attach", NAME, "--json", "--once").splitlines())
    return [each for each in told if each["type"] == "step"]


def is_shown(cost: dict[str, Any] | None) -> bool:
    """A screen does not show a limit above 10 %, as in the first seconds."""
    return cost is not None and (cost["error"] is not None or cost["share"] < 0.08)


@pytest.mark.parametrize("environment", ["on"], indirect=True)
def test_every_outlet_tells_what_gpumon_costs(environment: dict[str, str]) -> None:
    until = time.monotonic() + WITHIN_S
    newest: dict[str, Any] = {}
    while not (is_shown(newest.get("agent_cost")) and newest["step"] > 200) and time.monotonic() < until:
        newest = (steps(environment) or [{}])[-1]
    assert newest["agent_cost"]["share"] > 0
    said = re.compile(r"gpumon costs (≤ [\d.]+ %|[\d.]+ % ± [\d.]+)")
    assert said.search(printed(environment, "attach", NAME, "--once"))
    assert re.search(said.pattern + rf" of {NAME} \(pid ", printed(environment, "doctor"))


@pytest.mark.parametrize("environment", ["off"], indirect=True)
def test_a_run_that_reads_every_step_says_nothing(environment: dict[str, str]) -> None:
    until = time.monotonic() + WITHIN_S
    told: list[dict[str, Any]] = []
    while not (told and told[-1]["step"] > 200) and time.monotonic() < until:
        told = steps(environment)
    assert told[-1]["agent_cost"] is None
    assert "gpumon costs" not in printed(environment, "attach", NAME, "--once")
    assert f" of {NAME} (pid " not in printed(environment, "doctor")
