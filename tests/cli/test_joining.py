"""`gpumon attach PID --inject` and `gpumon detach PID`: real processes, a real gdb."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joining import TRAINING

from gpumon.cli import joining
from gpumon.host import debugger

pytestmark = pytest.mark.skipif(shutil.which("gdb") is None, reason="there is no gdb")

WORKER = """
import torch
from torch.utils.data import DataLoader
loader = iter(DataLoader(range(9), num_workers=1))
exec(open("trains.py").read())
"""
LAUNCHES = """
import subprocess, sys
command = [sys.executable, "worker.py", "100000", "0.002"]
ranks = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
print([rank.pid for rank in ranks], flush=True)
for rank in ranks:
    rank.wait()
"""


@pytest.fixture(scope="module", autouse=True)
def reachable() -> None:
    """Some containers let no debugger reach anything."""
    with running("print(1, flush=True); import time; time.sleep(60)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            debugger.queue(process.pid, "pass")
        except debugger.Refused as error:
            if "lets no debugger reach" in str(error):
                pytest.skip(str(error))
            raise


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "trains.py").write_text(TRAINING)
    (tmp_path / "worker.py").write_text(WORKER)
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def gpumon(*words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if path is None else {**os.environ, "PATH": path}
    command = [sys.executable, "-m", "gpumon", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_training_is_joined_left_and_the_same(home: Path) -> None:
    with running(TRAINING, "1200", "0.002") as alone, running(TRAINING, "1200", "0.002") as training:
        assert training.stdout is not None
        first = training.stdout.readline()
        pid = str(training.pid)
        outside = gpumon("attach", pid)
        assert outside.returncode == 1
        assert outside.stdout.startswith(f"Process {pid} has run for ")
        assert f"`gpumon attach {pid} --inject` loads it" in outside.stderr
        joined = gpumon("attach", pid, "--inject", "--json", "--steps", "3")
        assert joined.returncode == 0, joined.stderr
        steps = [each for each in map(json.loads, joined.stdout.splitlines()) if each["type"] == "step"]
        assert len(steps) >= 3
        gone = gpumon("detach", pid)
        assert (gone.returncode, gone.stdout) == (0, f"Process {pid} trains on without an agent.\n")
        again = gpumon("detach", pid)
        assert (again.returncode, again.stdout) == (1, "")
        assert again.stderr == f"Error: Nothing was changed: process {pid}: it has no agent.\n"
        rest, errors = training.communicate(timeout=120)
        unwatched, _ = alone.communicate(timeout=120)
    assert first + rest == unwatched
    assert errors == ""


def test_all_ranks_of_a_launcher_are_joined_but_no_loader_worker(home: Path) -> None:
    with running(LAUNCHES) as launcher:
        assert launcher.stdout is not None
        ranks = set(json.loads(launcher.stdout.readline()))
        end = time.monotonic() + 60
        while len(joining.processes(launcher.pid)) < 4 and time.monotonic() < end:  # two ranks, each with a worker
            time.sleep(0.2)
        time.sleep(1)
        assert len(joining.processes(launcher.pid)) == 4
        try:
            assert set(joining.everywhere(launcher.pid, "join")) == ranks
            workers = set(joining.processes(launcher.pid)) - ranks
            assert {joining.call(worker, "join") for worker in workers} == {"it is a worker of a DataLoader"}
        finally:
            for rank in ranks:
                os.kill(rank, 9)


def test_what_waits_in_c_code_is_left_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = """
import time, torch
optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters())  # something that the agent would watch
print(1, flush=True)
time.sleep(5)
print(2, flush=True)
while True: time.sleep(0.1)
"""
    monkeypatch.setattr(joining, "ANSWERS_IN_S", 1.0)
    with running(blocked) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(
            joining.Failed, match="has run no Python for 1 s: it waits in C code, so nothing was changed"
        ):
            joining.call(process.pid, "join")
        assert process.stdout.readline() == "2\n"  # it went on, and what was queued did nothing
        time.sleep(3)  # an agent would have begun by now
        assert not list((home / "run").rglob("*.json"))
        assert process.poll() is None


def test_the_agent_is_not_removed_amid_its_own_code(home: Path) -> None:
    at_work = """
import torch, gpumon_agent
model = torch.nn.Linear(2, 2)
gpumon_agent.watch(model)
print(1, flush=True)
exec("import time\\nwhile True: time.sleep(0.01)", {"__name__": "gpumon_agent.at_work"})
"""
    with running(at_work) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert joining.call(process.pid, "leave") == "its agent is at work"
        done = gpumon("detach", str(process.pid))
        assert done.returncode == 1
        assert done.stderr == f"Error: Nothing was changed: process {process.pid}: its agent is at work.\n"


def test_without_torch_or_gdb_it_says_so(home: Path) -> None:
    with running("import time; print(1, flush=True); time.sleep(60)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        done = gpumon("attach", str(process.pid), "--inject")
        assert done.returncode == 1
        assert done.stderr == (
            f"Error: Process {process.pid} does not use PyTorch, nor does a process that it started.\n"
        )
    with running("import torch, time; print(1, flush=True); time.sleep(60)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        done = gpumon("attach", str(process.pid), "--inject", path=str(home))
        assert (done.returncode, done.stdout) == (1, "")
        assert "there is no gdb here: install it (apt install gdb)" in done.stderr


def test_from_python_3_14_on_the_process_is_asked_itself(tmp_path: Path) -> None:
    script = tmp_path / "said.py"
    script.write_text("print('said', flush=True)")
    with running("import time\nprint(1, flush=True)\nwhile True: time.sleep(0.01)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        asked = debugger.remotely(process.pid, script)
        assert asked == (sys.version_info >= (3, 14))
        assert not asked or process.stdout.readline() == "said\n"
    with subprocess.Popen(["/bin/sleep", "9"]) as other:  # a program that is not Python is not started again
        assert not debugger.remotely(other.pid, script)
        other.kill()


@pytest.mark.skipif(shutil.which("lldb") is None, reason="there is no lldb")
def test_lldb_does_it_where_there_is_no_gdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lldb = shutil.which("lldb")
    assert lldb is not None
    (tmp_path / "lldb").symlink_to(lldb)
    with running("import time\nprint(1, flush=True)\nwhile True: time.sleep(0.01)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        with monkeypatch.context() as only:
            only.setenv("PATH", str(tmp_path))
            debugger.queue(process.pid, "print('\"quoted\" äöü', flush=True)")
            with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
                assert other.stdin is not None
                assert other.stdout is not None
                other.stdin.write(b"\n")
                other.stdin.flush()
                other.stdout.readline()  # all of it is loaded
                with pytest.raises(debugger.Refused, match=f"process {other.pid} is not Python, or its symbols were"):
                    debugger.queue(other.pid, "pass")
        assert process.stdout.readline() == '"quoted" äöü\n'


def test_a_traced_process_and_another_users_are_refused(home: Path) -> None:
    with running("print(1, flush=True); import time; time.sleep(60)") as process:
        assert process.stdout is not None
        process.stdout.readline()
        with subprocess.Popen(
            ["gdb", "-nx", "-p", str(process.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as gdb:
            status = Path(f"/proc/{process.pid}/status")
            end = time.monotonic() + 60
            while "TracerPid:\t0" in status.read_text() and time.monotonic() < end:
                time.sleep(0.05)
            with pytest.raises(debugger.Refused, match=f"is traced by process {gdb.pid}, a debugger: end that first"):
                debugger.queue(process.pid, "pass")
            gdb.kill()
    if os.geteuid() == 0:
        with subprocess.Popen(["/bin/sleep", "60"], user=65534) as foreign:
            try:
                with pytest.raises(debugger.Refused, match=r"belongs to another user \(uid 65534\)"):
                    debugger.queue(foreign.pid, "pass")
            finally:
                foreign.kill()


def test_nobody_else_can_write_where_the_script_is(home: Path) -> None:
    place = joining._private()
    assert place.stat().st_uid == os.geteuid()
    assert place.stat().st_mode & 0o777 == 0o700


def test_what_is_known_from_outside_has_the_gpu(virtual_gpu: Any) -> None:
    code = """
        import subprocess, sys, torch
        from gpumon.cli.outside import lines
        held = "import torch; torch.empty(1 << 28, dtype=torch.uint8, device='cuda'); print(1, flush=True); input()"
        command = [sys.executable, "-c", held, "--api-key", "mine"]
        started = [subprocess.Popen(command, stdin=-1, stdout=-1) for _ in range(2)]
        for each in started:
            each.stdout.readline()
        print(*lines(started[0].pid), sep="\\n")
        for each in started:
            each.kill()
        """
    first, host, gpu = virtual_gpu().run(textwrap.dedent(code)).stdout.splitlines()
    assert first.startswith("Process ")
    assert first.endswith(" --api-key ***")
    assert "resident" in host
    both = re.fullmatch(r"  GPU 0  ([\d.]+ MiB) by this process, ([\d.]+ MiB) by 1 other, of [\d.]+ GiB", gpu)
    assert both is not None, gpu
    assert both[1] == both[2]


def test_a_name_cannot_be_injected_into(home: Path) -> None:
    done = gpumon("attach", "train.py", "--inject")
    assert done.returncode == 2
    assert "--inject needs the pid of the process" in done.stderr
