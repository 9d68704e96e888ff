"""How a training process ended, as its viewer reports it: also by an exit code, which no Python code can see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

SCRIPT = """
import multiprocessing, os, sys, time
import torch
import gpumon_agent

def train():
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gpumon_agent.watch(model, optimizer)
    while not os.path.exists(sys.argv[1]):
        model(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.02)

def rank():
    train()
    raise ValueError("a rank's own")

if __name__ == "__main__":
    {ending}
"""


def ended(folder: Path, ending: str) -> tuple[list[tuple[str, str]], int]:
    """The goodbyes that `attach --json` printed, and the script's exit code."""
    stop, script = folder / "stop", folder / "train.py"
    script.write_text(SCRIPT.format(ending=ending))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
    training = subprocess.Popen([sys.executable, script, stop], env=environment, stderr=subprocess.DEVNULL)
    viewer = subprocess.Popen(
        [sys.executable, "-m", "gpumon", "attach", "--wait", "--json"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert viewer.stdout is not None
    assert viewer.stderr is not None
    goodbyes = []
    with training, viewer:
        try:
            for line in viewer.stdout:
                said = json.loads(line)
                if said["type"] == "step":
                    stop.touch()
                if said["type"] == "goodbye":
                    goodbyes.append((said["reason"], said["detail"]))
            assert "Traceback" not in viewer.stderr.read()
            return goodbyes, training.wait(300)
        finally:
            viewer.kill()
            training.kill()


@pytest.mark.parametrize(
    ("ending", "reason", "detail", "code"),
    [
        ("train()", "finished", None, 0),
        pytest.param("train(); sys.exit()", "finished", None, 0, marks=pytest.mark.long),
        ("train(); sys.exit(3)", "exception", "exit code 3", 3),
        pytest.param("train(); raise SystemExit(4)", "exception", "exit code 4", 4, marks=pytest.mark.long),
        ("train(); sys.exit('no data')", "exception", "exit code 1", 1),
        ("train(); raise ValueError('mine')", "exception", "ValueError: mine", 1),
        ("train(); os._exit(5)", "lost", None, 5),
        # a rank whose launcher caught its exception and printed it
        (
            "each = multiprocessing.get_context('spawn').Process(target=rank); each.start(); each.join()",
            "exception",
            "exit code 1",
            0,
        ),
    ],
)
def test_a_viewer_reports_how_a_process_ended(
    tmp_path: Path, ending: str, reason: str, detail: str | None, code: int
) -> None:
    goodbyes, returned = ended(tmp_path, ending)
    assert returned == code
    ((said, why),) = goodbyes
    assert said == reason
    assert detail in (None, why)


def test_nothing_is_left_behind_where_nobody_listens(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    ready = "import gpumon_agent.agent as own; own.REGISTRY.agent.transport.wait_ready(60)"
    script.write_text(SCRIPT.format(ending=f"train(); {ready}; sys.exit(3)"))
    (tmp_path / "stop").touch()
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, script, tmp_path / "stop"], env=environment, timeout=300, check=False)
    assert done.returncode == 3
    until = time.monotonic() + 20
    while list((tmp_path / "gpumon").glob("[!o]*")) and time.monotonic() < until:
        time.sleep(0.05)  # the helper removes them as it ends
    assert [path.name for path in (tmp_path / "gpumon").rglob("*") if path.name != "oom"] == []
