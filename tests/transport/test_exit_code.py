"""The exit code is in the memory after a process has gone, and is not known where nothing could write it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from gpumon_agent.transport import exit_code
from gpumon_agent.transport.memory import EXIT, PAGE_BYTES, Memory

CHILD = """
import atexit, os, signal, sys
from gpumon_agent.transport import exit_code
from gpumon_agent.transport.memory import Memory
memory = Memory.open(int(sys.argv[1]))
memory.close_descriptor()

def write():
    assert exit_code.write_at_exit(memory)

atexit.register(write)
"""


@pytest.mark.parametrize(
    ("ends", "code", "told"),
    [
        ("", 0, 0),
        ("sys.exit(0)", 0, 0),
        ("sys.exit(1)", 1, 1),
        ("sys.exit(3)", 3, 3),
        ("sys.exit(255)", 255, 255),
        ("sys.exit(-1)", 255, 255),
        ("sys.exit(256)", 0, 0),
        ("sys.exit('a text')", 1, 1),
        ("raise RuntimeError", 1, 1),
        ("os._exit(3)", 3, None),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, None),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, None),
        ("write(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, None),
        ("write(); os._exit(3)", 3, None),
    ],
)
def test_how_a_process_ended(ends: str, code: int, told: int | None) -> None:
    memory = Memory.create(4 * PAGE_BYTES, 4 * PAGE_BYTES)
    assert exit_code.read(memory) is None
    around = bytes(memory.view[: 8 * EXIT]), bytes(memory.view[8 * EXIT + 8 :])
    ended = subprocess.run(
        [sys.executable, "-c", CHILD + ends, str(memory.fd)],
        pass_fds=[memory.fd],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"},
    )
    assert ended.returncode == code, ended.stderr
    assert exit_code.read(memory) == told
    assert (bytes(memory.view[: 8 * EXIT]), bytes(memory.view[8 * EXIT + 8 :])) == around
    memory.close()
