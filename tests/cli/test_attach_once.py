"""`gpumon attach --once`: one picture, or one sentence why there is none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import zmq


def test_an_endpoint_that_is_no_agent_is_named_as_such(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind(f"ipc://{tmp_path}/other")
        command = [sys.executable, "-m", "gpumon", "attach", f"ipc://{tmp_path}/other", "--once"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert f"the process listening at ipc://{tmp_path}/other is no gpumon agent" in done.stderr
