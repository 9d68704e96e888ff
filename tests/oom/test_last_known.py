"""What is left on disk of a training that was killed, and who reads it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import hostile
import msgspec
import pytest
from click.testing import CliRunner

from gpumon.cli import main
from gpumon_agent import endpoint
from gpumon_agent.oom import last_known, report_file
from gpumon_agent.oom.last_known import File, LastKnown

TRAINS = Path(__file__).parents[1] / "transport" / "trains.py"
HARM = "".join(hostile.HARM)
GONE = LastKnown(
    unix=1_700_000_000.0, ended=True, host="here", boot_id="another", pid=4711, start_time=12, rank=3, name="train.py",
    argv=("train.py",), step=12, phase="backward", phase_s=1.5, resident=5 << 30, device=0, allocated=1 << 30,
    reserved=1 << 31,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(report_file.VARIABLE, str(tmp_path))
    return tmp_path


def file(folder: Path, second: int = 0) -> File:
    return File(report_file.ReportFile({report_file.VARIABLE: str(folder)}), second * 10**9, 4711)


def test_what_is_written_is_read_back_until_it_is_removed(folder: Path) -> None:
    made = file(folder)
    made.write(GONE)
    assert last_known.newest() == GONE
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600]
    made.remove()
    assert last_known.newest() is None
    assert not list(folder.iterdir())


def test_of_a_process_that_runs_nothing_is_told(folder: Path) -> None:
    pid = os.getpid()
    began = endpoint.start_time(pid)
    running = msgspec.structs.replace(GONE, pid=pid, start_time=began, boot_id=endpoint.boot_id(), unix=GONE.unix + 1)
    file(folder, 1).write(running)
    assert last_known.newest() is None
    file(folder, 2).write(GONE)
    assert last_known.newest() == GONE


def test_the_newest_256_files_stay(folder: Path) -> None:
    for second in range(259):
        file(folder, second).write(GONE)
    assert len(list(folder.iterdir())) == 256


CONTENTS = (b"", b"{}", b"\xff", b"[" * 100_000, b"{" + b" " * 200_000 + b"}")


@pytest.mark.parametrize("content", CONTENTS, ids=["empty", "object", "binary", "nested", "long"])
def test_what_is_no_such_file_is_passed_over(folder: Path, content: bytes) -> None:
    (folder / "last-1700000000000-1.json").write_bytes(content)
    assert last_known.newest() is None


def test_its_texts_are_printable(folder: Path) -> None:
    harm = HARM.replace("\ud7ff", "")
    file(folder).write(msgspec.structs.replace(GONE, name=harm, host=harm, phase=harm))
    done = CliRunner().invoke(main, ["explain", "--last"])
    assert done.exit_code == 0
    assert hostile.harm_in(done.output) == []


@pytest.fixture
def training(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, str(TRAINS)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def tell(process: subprocess.Popen[str], command: str) -> object:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(command + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def eventually(folder: Path, count: int) -> bool:
    until = time.monotonic() + 30
    while len(list(folder.glob("last-*.json"))) != count and time.monotonic() < until:
        time.sleep(0.05)
    return len(list(folder.glob("last-*.json"))) == count


def test_a_training_that_became_another_program_was_not_killed(training: subprocess.Popen[str], folder: Path) -> None:
    assert training.stdout is not None
    assert training.stdin is not None
    training.stdout.readline()
    assert tell(training, "start")
    tell(training, "steps 7")
    assert eventually(folder, 1)
    training.stdin.write("execs\n")
    training.stdin.flush()
    assert eventually(folder, 0)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "with its helper"])
def test_a_training_that_was_killed(training: subprocess.Popen[str], folder: Path, together: bool) -> None:
    assert training.stdout is not None
    training.stdout.readline()
    assert tell(training, "start")
    assert tell(training, "steps 7") == 7
    if together:  # as the kernel does where a whole container is killed
        assert eventually(folder, 1)
        assert "no report" in CliRunner().invoke(main, ["explain", "--last"]).output  # it runs
        helper = tell(training, "helper")
        assert isinstance(helper, int)
        os.kill(helper, signal.SIGKILL)
    training.kill()
    training.wait()
    assert eventually(folder, 1)
    done = CliRunner().invoke(main, ["explain", "--last"])
    assert done.exit_code == 0, done.output
    said = "was killed with its helper, or the machine went down" if together else "was killed, or ended by os._exit()"
    assert said in done.output
    assert "s into forward" in done.output
    assert "8.00 GiB allocated, 10.0 GiB reserved" in " ".join(done.output.split())
    assert all(len(line) <= 80 for line in done.output.splitlines())
    found = json.loads(CliRunner().invoke(main, ["explain", "--last", "--json"]).output)
    assert (found["type"], found["step"], found["ended"]) == ("killed", 6, not together)


def test_a_goodbye_removes_it(training: subprocess.Popen[str], folder: Path) -> None:
    assert training.stdout is not None
    training.stdout.readline()
    assert tell(training, "start")
    tell(training, "steps 7")
    assert eventually(folder, 1)
    tell(training, "stops")
    assert eventually(folder, 0)
