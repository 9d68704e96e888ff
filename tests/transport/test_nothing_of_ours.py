"""In the training process there is no descriptor, thread, child or socket of ours, and no ZeroMQ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
LOOKS = """
import json, os, sys, threading
import psutil
import torch

torch.set_num_threads(1)
watched = os.environ["WATCHED"] == "1"
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def look():
    me = psutil.Process()
    try:
        os.wait()
        waited = "for a child"
    except ChildProcessError:
        waited = "for nothing"
    return {
        "descriptors": sorted(
            os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in os.listdir("/proc/self/fd") if int(n) != FREE
        ),
        "threads": len(os.listdir("/proc/self/task")),
        "children": [each.pid for each in me.children(recursive=True)],
        "kernel's children": [open(f"/proc/self/task/{t}/children").read() for t in os.listdir("/proc/self/task")],
        "sockets": len(me.net_connections("all")),
        "threads of Python": threading.active_count(),
        "waited": waited,
        "libzmq": "libzmq" in open("/proc/self/maps").read() or "zmq" in sys.modules,
    }

FREE = os.dup(0)
os.close(FREE)
if watched:
    import gpumon_agent
    import gpumon_agent.agent
    gpumon_agent.watch(model, optimizer)
for _ in range(5):
    step()
if watched:
    assert gpumon_agent.agent.REGISTRY.agent.transport.wait_ready(60)
found = [look()]
for _ in range(5):
    step()
found.append(look())
if watched:
    gpumon_agent.stop()
found.append(look())
print(json.dumps(found))
"""


def test_proc_shows_what_it_shows_of_a_run_without_gpumon(tmp_path: Path) -> None:
    script = tmp_path / "looks.py"
    script.write_text(LOOKS)
    found = []
    for watched in "01":
        environment = {**os.environ, "WATCHED": watched, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        found.append(json.loads(ran.stdout))
    bare, watched_ = found
    assert watched_ == bare
    assert [each["waited"] for each in bare] == ["for nothing"] * 3
