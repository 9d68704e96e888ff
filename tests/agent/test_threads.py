"""No thread of the agent's is in the program: none takes a signal, none is joined, none is traced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TRAINS = """
import os, signal, sys, threading
import torch

torch.set_num_threads(1)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def watched():
    "Whether a viewer can attach by now."
    import gpumon_agent.agent
    return gpumon_agent.agent.REGISTRY.agent.transport.wait_ready(60)

if os.environ.get("WATCHED"):
    import gpumon_agent
    gpumon_agent.watch(model, optimizer)
    step()
    assert watched()
"""


def start(script: str, folder: Path, *, watched: bool = True) -> subprocess.Popen[str]:
    path = folder / "script.py"
    path.write_text(TRAINS + script)
    return subprocess.Popen(
        [sys.executable, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1", "WATCHED": "1" if watched else ""},
    )


def told(script: str, folder: Path, *, watched: bool = True) -> str:
    """What it prints; it ends well, and says nothing on stderr."""
    process = start(script, folder, watched=watched)
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    return out


@pytest.mark.parametrize("watched", [False, True])
def test_a_signal_that_the_program_blocks_stays_pending_until_it_waits_for_it(tmp_path: Path, watched: bool) -> None:
    """As code does that SLURM tells of a pre-emption: the mask is set after the agent began."""
    waits = """
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print("blocked", flush=True)
for _ in range(200):
    sys.stdin.readline()
    print(signal.sigwait({signal.SIGUSR1}).name, flush=True)
"""
    process = start(waits, tmp_path, watched=watched)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "blocked\n"
        for _ in range(200):
            process.send_signal(signal.SIGUSR1)
            print(file=process.stdin, flush=True)
            assert process.stdout.readline() == "SIGUSR1\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


LISTS: dict[str, str] = {
    "joined": """
step()
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print("joined all")
""",
    "counted": """
step()
print(threading.active_count(), threading.enumerate(), len(threading._active))
""",
    "traced": """
seen = set()
def tracer(frame, event, argument):
    seen.add(threading.get_ident())
threading.settrace(tracer)
threading.setprofile(tracer)
if os.environ.get("WATCHED"):
    gpumon_agent.stop()
    gpumon_agent.watch(model, optimizer)
    assert watched()
step()
print(seen)
""",
}


@pytest.mark.parametrize("what", LISTS)
def test_python_knows_no_thread_of_the_agent(tmp_path: Path, what: str) -> None:
    bare = told(LISTS[what], tmp_path, watched=False)
    watched = told(LISTS[what], tmp_path)
    assert _without_idents(watched) == _without_idents(bare)


def _without_idents(text: str) -> str:
    return re.sub(r"\d{6,}", "N", text)
