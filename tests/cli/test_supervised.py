"""`gpumon run --summary` waits for the command: its output, exit code and signals are as without."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

GPUMON = (sys.executable, "-m", "gpumon", "run")
NO_STEP = "gpumon: no step was seen, so there is no summary\n"
COUNTS_SIGNALS = """
import signal, sys, time
counted = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, lambda number, _: counted.append(signal.Signals(number).name))
print("ready", flush=True)
while not counted:
    time.sleep(0.01)
time.sleep(0.3)  # a second one would come at once
print(*counted, flush=True)
sys.exit(3)
"""

COUNTS_TEN = """
import signal, sys, time
counted = []
signal.signal(signal.SIGINT, lambda number, _: counted.append(number))
print("ready", flush=True)
for press in range(1, 11):
    while len(counted) < press:
        time.sleep(0.01)
    time.sleep(0.1)  # a second one would come at once; the system merges most of such pairs, but not ten
    print(len(counted), flush=True)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "run").mkdir(mode=0o700)
    return {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path / "run")}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*GPUMON, *words], env=environment, capture_output=True, text=True, timeout=120, check=False)


def start(environment: dict[str, str], code: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [*GPUMON, "--summary", "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_the_exit_code_and_the_output_are_the_commands(environment: dict[str, str]) -> None:
    code = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(7)"
    ended = run(environment, "--summary", "-c", code)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "out\n", f"err\n{NO_STEP}")


def test_it_dies_by_the_commands_signal(environment: dict[str, str]) -> None:
    ended = run(environment, "--summary", "-c", "import os; os.kill(os.getpid(), 9)")
    assert (ended.returncode, ended.stderr) == (-signal.SIGKILL, NO_STEP)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_is_passed_on_once(environment: dict[str, str], number: signal.Signals) -> None:
    process = start(environment, COUNTS_SIGNALS)
    process.send_signal(number)
    assert process.communicate(timeout=60) == (f"{number.name}\n", NO_STEP)
    assert process.returncode == 3


def test_ctrl_c_reaches_the_command_once(environment: dict[str, str]) -> None:
    master, slave = os.openpty()

    def controlling() -> None:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [*GPUMON, "--summary", "-c", COUNTS_TEN],
        env=environment, stdin=slave, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=controlling,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    try:
        for press in range(1, 11):
            os.write(master, b"\x03")
            assert process.stdout.readline() == f"{press}\n"
    finally:
        if sys.exc_info()[0] is not None:
            process.kill()
        said = process.communicate(timeout=60)
    assert (process.returncode, *said) == (0, "", NO_STEP)
    os.close(master)
    os.close(slave)


def test_the_command_dies_with_it(environment: dict[str, str]) -> None:
    process = start(
        environment, "import os, time; print('ready', flush=True); print(os.getpid(), flush=True); time.sleep(60)"
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.communicate(timeout=60)
    until = time.monotonic() + 60
    while Path(f"/proc/{child}/cmdline").exists() and time.monotonic() < until:
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_a_command_that_cannot_start_is_refused_as_without(environment: dict[str, str]) -> None:
    for words in (("no-such-command",), ("nothing.py",)):
        refused = run(environment, "--summary", *words)
        assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", run(environment, *words).stderr)


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("wand", "'wand' is none of auto, wandb, mlflow, tensorboard, trackio, otlp"),
        ("auto,", ""),
        (",", "'' is none of auto, wandb, mlflow, tensorboard, trackio, otlp"),
        ("\x1b[2J", "'\\x1b[2J' is none of auto, wandb, mlflow, tensorboard, trackio, otlp"),
    ],
)
def test_what_is_no_tracker_is_refused_at_once(environment: dict[str, str], named: str, said: str) -> None:
    shown = run(environment, "--log-to", named, "-c", "print('started')")
    if not said:
        assert (shown.returncode, shown.stdout) == (0, "started\n")
        return
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr.splitlines()[-1] == f"Error: Invalid value for --log-to: {said}"


def test_a_library_that_is_not_installed_is_said_at_once(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['trackio'] = None\n")
    there = os.pathsep.join(filter(None, (str(tmp_path), environment.get("PYTHONPATH", ""))))
    shown = run({**environment, "PYTHONPATH": there}, "--log-to", "trackio", "-c", "print('started')")
    assert (shown.returncode, shown.stdout) == (2, "")
    said = "trackio needs trackio, which is not installed here"
    assert shown.stderr.splitlines()[-1] == f"Error: Invalid value for --log-to: {said}"


def test_a_file_in_the_current_folder_is_not_taken_for_a_library(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asyncio.py").write_text("raise SystemExit('the wrong asyncio')\n")
    monkeypatch.chdir(tmp_path)
    code = "from gpumon.cli import main; main(['run', '--summary', '-c', 'print(1)'])"
    safe = "import sys; sys.path.remove(''); " + code  # as the script `gpumon` has no current folder
    ended = subprocess.run(
        [sys.executable, "-c", safe], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.stdout, ended.stderr) == ("1\n", NO_STEP)
