"""What the process table takes from other processes."""

from __future__ import annotations

import os
import subprocess
import sys

from gpumon.host.processes import Processes

TITLED = """
import ctypes
ctypes.CDLL(None).prctl(15, b"python train.py", 0, 0, 0)  # as setproctitle does: the title's first 15 characters
print(flush=True)
input()
"""


def test_a_title_shows_no_secret() -> None:
    """psutil completes a name of 15 characters from the command line, where setproctitle puts the whole title."""
    title = "python train.py --token hf_Jq3vX9 --lr 1"
    child = subprocess.Popen(
        [title, "-c", TITLED], executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    (reading,) = Processes().read([os.getpid()])
    (name,) = [each.name for each in reading.children if each.pid == child.pid]
    child.communicate(b"\n")
    assert "hf_Jq3vX9" not in name
    assert name == "python train.py --token *** --lr 1"
