"""Either side dies hard, or the disk is full, while a screen watches a real training."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

GPUMON = (sys.executable, "-m", "gpumon")
ESCAPES = re.compile(r"\x1b\[[0-9;?>=<]*[a-zA-Z$]|\x1b[=>]")
SCRIPT = """
import resource, sys, time
import torch, torch._dynamo  # it looks for a temporary directory as it is imported, and optimizers import it
if sys.argv[2:]:  # from here on the disk is full
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, flush=True)
    time.sleep(0.03)
"""


class Screen:
    """`gpumon attach` on a terminal of 120×40."""

    def __init__(self, environment: dict[str, str], pid: int) -> None:
        self.output = ""
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
            os.execve(sys.executable, [*GPUMON, "attach", str(pid)], {**environment, "TERM": "xterm-256color"})

    def read_until(self, wanted: str, seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while wanted not in ESCAPES.sub("", self.output):
            assert time.monotonic() < end, f"{wanted} never came: {ESCAPES.sub('', self.output)[-500:]!r}"
            if select.select([self.master], [], [], 0.2)[0]:
                self.output += os.read(self.master, 65536).decode(errors="replace")

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())

    def ended(self) -> int:
        """Its exit status; what it still has to draw is read, or it would wait for that."""
        while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    os.read(self.master, 65536)
                except OSError:  # it has closed its side
                    break
        else:
            return 0
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "GPUMON_GOVERNOR": "off"}


@pytest.fixture
def train(environment: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a training of so many steps, whose second one is then done."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def train(*arguments: object) -> subprocess.Popen[str]:
        command = [*GPUMON, "run", "--track-cpu", str(script), *map(str, arguments)]
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["0\n", "1\n"], process.communicate()[1]
        return process

    yield train
    for process in started:
        process.kill()
        if not process.stdout.closed:
            process.communicate()


def test_a_viewer_killed_hard_is_not_noticed_and_another_one_may_come(train, environment) -> None:
    training = train(400)
    screen = Screen(environment, training.pid)
    screen.read_until("backward")
    os.kill(screen.pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(screen.pid, 0)[1]) == -signal.SIGKILL
    again = subprocess.run(
        [*GPUMON, "attach", str(training.pid), "--json", "--steps", "2"],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    steps = [json.loads(line)["step"] for line in again.stdout.splitlines() if '"type":"step"' in line]
    assert steps == list(range(steps[-1] + 1))  # the past too, from the first step
    out, err = training.communicate(timeout=300)
    assert (training.returncode, err) == (0, "")
    assert out.splitlines()[-1] == "399"


def test_a_training_killed_hard_leaves_its_last_picture_and_says_so(train, environment) -> None:
    training = train(4000)
    screen = Screen(environment, training.pid)
    screen.read_until("backward")
    training.send_signal(signal.SIGKILL)
    screen.read_until("gone without a goodbye")
    os.kill(screen.pid, 0)  # it stays
    used = [time.monotonic(), cpu_s(screen.pid)]
    time.sleep(1.0)
    assert cpu_s(screen.pid) - used[1] < 0.5 * (time.monotonic() - used[0])  # and does not spin
    screen.press("q")
    assert screen.ended() == 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_where_no_byte_can_be_written_training_goes_on_unwatched_with_one_line(train) -> None:
    training = train(50, "full")
    out, err = training.communicate(timeout=300)
    assert training.returncode == 0
    assert out.splitlines()[-1] == "49"
    assert err.startswith("gpumon: no viewer can attach to this process: ")
    assert err.count("\n") == 1
