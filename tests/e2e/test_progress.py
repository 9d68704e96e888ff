"""Where a loop says it is, and what it logs, in a real training on the virtual GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

LOOP = """
import json, os, sys, time
import torch
import gpumon_agent

assert gpumon_agent.figures() == {}  # there is no agent yet
gpumon_agent.progress(epoch=0, batch=1)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
gpumon_agent.watch(model, optimizer)
logged, highest, began, step = [], [], time.monotonic(), 0
torch.cuda.reset_peak_memory_stats()
while not os.path.exists("stop"):
    gpumon_agent.progress(epoch=step // 100, batch=step % 100 + 1, batches=100)
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 50 == 0:
        logged.append(gpumon_agent.figures())
        highest.append(torch.cuda.max_memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    time.sleep(0.004)
json.dump([logged, highest], open("logged.json", "w"))
"""

VARIABLES = """
import itertools, os, sys, time
import torch
import gpumon_agent

model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
gpumon_agent.watch(model, optimizer)

def one_epoch(epoch):
    for batch_idx in range(100):
        if os.path.exists("says"):
            gpumon_agent.progress(stage="mine", epoch=7, batch=3)
        model(torch.randn(64, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.004)
        if os.path.exists("stop"):
            sys.exit()

for epoch in itertools.count():
    one_epoch(epoch)
"""


def viewer(folder: Path, *options: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "gpumon", "attach", "--wait", "--json", *options]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_viewer_sees_it_live_and_late_and_the_figures_are_torchs_own(
    virtual_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    gpu = virtual_gpu()
    training = subprocess.Popen(gpu.command(LOOP), cwd=tmp_path, env={**os.environ, **gpu.environment})
    with training:
        try:
            live = [each for each in viewer(tmp_path, "--for", "3") if each["type"] == "progress"]
            late = [each for each in viewer(tmp_path, "--once") if each["type"] == "progress"]
            (tmp_path / "stop").touch()
            assert training.wait(300) == 0
        finally:
            training.kill()
    assert 2 <= len(live) <= 5  # about one a second
    assert [(each["library"], each["stage"], each["batches"]) for each in live] == [(None, "train", 100)] * len(live)
    for each in live:
        assert abs(each["epoch"] * 100 + each["batch"] - 1 - each["step"]) <= 1
    assert len(late) == 1
    assert (late[0]["epoch"], late[0]["batch"]) >= (live[-1]["epoch"], live[-1]["batch"])
    logged, highest = json.loads((tmp_path / "logged.json").read_text())
    assert len(logged) > 3  # most of these steps are not read
    # the user's reset begins a new peak for torch; gpumon's has begun with the reading before
    assert [each["gpumon/peak_bytes"] for each in logged] == highest
    assert {"gpumon/forward_peak_bytes", "gpumon/backward_peak_bytes", "gpumon/next_peak_bytes"} <= logged[1].keys()
    assert logged[0]["gpumon/peak_bytes"] == logged[0]["gpumon/backward_peak_bytes"]


EVERY_STEP = """
import time
import torch
import gpumon_agent

model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
gpumon_agent.watch(model, optimizer)
wakes = 0
while wakes < 2:
    torch.cuda.reset_peak_memory_stats()
    model(torch.randn(64, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    wakes += bool(gpumon_agent.registry.REGISTRY.agent.phases.quiet_peaks)
    peak, highest = gpumon_agent.figures()["gpumon/peak_bytes"], torch.cuda.max_memory_allocated()
    assert peak == highest, (peak, highest)
    time.sleep(0.002)
"""


def test_no_peak_is_missed_as_the_agent_begins_to_read_again(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    """The figures of a step that was not read are taken after the reading that ends it."""
    gpu = virtual_gpu()
    environment = {**os.environ, **gpu.environment}
    ran = subprocess.run(
        gpu.command(EVERY_STEP), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr


def test_without_a_line_its_variables_say_it_until_the_loop_does(
    virtual_gpu: Callable[..., Any], tmp_path: Path
) -> None:
    gpu = virtual_gpu()
    training = subprocess.Popen(gpu.command(VARIABLES), cwd=tmp_path, env={**os.environ, **gpu.environment})
    with training:
        try:
            live = [each for each in viewer(tmp_path, "--for", "5") if each["type"] == "progress"]
            (tmp_path / "says").touch()
            said = viewer(tmp_path, "--for", "5")
            (tmp_path / "stop").touch()
            assert training.wait(300) == 0
        finally:
            training.kill()
    assert 2 <= len(live) <= 6  # as steps are read: about one in 2 s, at first one in a second
    assert {(each["library"], each["stage"], each["batches"]) for each in live} == {(None, None, None)}
    for each in live:
        assert abs(each["epoch"] * 100 + each["batch"] - 1 - each["step"]) <= 1
    stages = [each["stage"] for each in said if each["type"] == "progress"]
    assert stages[-1] == "mine"
    assert stages.count("mine") == 1  # it has not changed since
