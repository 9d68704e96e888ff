"""A part of the agent that fails at the user's objects goes off: the training goes on, and every viewer says so."""

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
import sys, torch
class Lazy(dict):
    "A batch that is decoded when it is asked for by name, and not by a walk over it."
    def values(self):
        raise RuntimeError("ask by name")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
    def forward(self, batch):
        return self.inner(batch["x"])

model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(10_000):
    model(Lazy(x=torch.ones(2, 4))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step >= 20:
        print(step, flush=True)
        if not sys.stdin.readline().strip():
            break
"""


def test_a_part_that_is_off_shows_on_the_screen_and_in_json_for_who_comes_late(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    gpumon = (sys.executable, "-m", "gpumon")
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    training = subprocess.Popen(
        [*gpumon, "run", str(script)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert training.stdin is not None
    assert training.stdout is not None
    try:
        assert training.stdout.readline() == "20\n"
        while not list(tmp_path.rglob("*.json")):  # the helper writes it: some steps are over before it has begun
            assert training.poll() is None
            time.sleep(0.05)

        def ask(*options: str) -> str:
            return subprocess.run(
                [*gpumon, "attach", str(training.pid), *options],
                capture_output=True, text=True, timeout=120, env=environment, check=True,
            ).stdout  # fmt: skip

        screen = ask("--once")
        assert "agent-part-off" in screen
        assert "forward is off" in screen
        made = [json.loads(line) for line in ask("--json", "--for", "3").splitlines()]
        (finding,) = [each for each in made if each["type"] == "finding" and each["code"] == "agent-part-off"]
        assert (finding["severity"], finding["where"].partition(":")[0]) == ("warning", "storages.py")
        assert "RuntimeError: ask by name" in finding["remedy"]
        print(file=training.stdin, flush=True)
        _, err = training.communicate(timeout=60)
        assert (training.returncode, err) == (
            0,
            "gpumon: forward: RuntimeError: ask by name (training is not affected)\n",
        )
    finally:
        training.kill()
        training.communicate()
