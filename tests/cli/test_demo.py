"""`gpumon demo`: a real training process under a real viewer, and nothing left of either."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.torch

DEMO = [sys.executable, "-m", "gpumon", "demo"]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}


def demo(env: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *args], capture_output=True, text=True, env=env, timeout=300)


def objects(text: str, kind: str) -> list[dict]:
    return [o for o in map(json.loads, text.splitlines()) if o["type"] == kind]


def gone(pid: int, patience_s: float = 120) -> bool:
    deadline = time.monotonic() + patience_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def running(env) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A demo that prints JSON, and the pid that it trains in."""
    with subprocess.Popen(
        [*DEMO, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout
        yield process, json.loads(process.stdout.readline())["pid"]
        process.kill()


def test_a_script_gets_as_many_steps_as_it_asked_for(env):
    shown = demo({**env, "CUDA_VISIBLE_DEVICES": ""}, "--json", "--steps", "3")
    assert shown.returncode == 0, shown.stderr
    (hello,) = objects(shown.stdout, "hello")
    assert hello["argv"][0].endswith("demo/train.py")
    assert objects(shown.stdout, "model")[-1]["parameters"] > 100_000
    steps = objects(shown.stdout, "step")
    assert sum(not step["replayed"] for step in steps) == 3
    phases = [phase for step in steps for phase in step["phases"]]
    # on a busy machine not every step is read
    backward = next(each for each in phases if each["phase"] == "backward" and each["allocated"] is not None)
    assert backward["allocated_peak"] > backward["allocated"] > 0  # the CPU is tracked to the byte
    assert gone(hello["pid"])
    deadline = time.monotonic() + 60  # the helper leaves after the training
    while left := list(Path(env["XDG_RUNTIME_DIR"]).rglob("*.json")):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def test_a_device_is_used_if_there_is_one(virtual_gpu, env):
    gpu = virtual_gpu(profile="t4")
    shown = demo({**gpu.environment, "XDG_RUNTIME_DIR": env["XDG_RUNTIME_DIR"]}, "--json", "--steps", "2")
    assert shown.returncode == 0, shown.stderr
    assert objects(shown.stdout, "hello")[-1]["backend"] == "cuda"
    assert objects(shown.stdout, "step")[-1]["phases"][-1]["reserved"] > 2**30


def test_spikes_have_a_batch_four_times_as_long_now_and_then(env):
    steps = objects(demo(env, "--json", "--steps", "12", "--workload", "spikes").stdout, "step")
    assert {shape[-1] for step in steps for shape in step["input_shapes"]} == {96, 384}


def test_a_leak_is_named(env):
    shown = demo(env, "--json", "--steps", "60", "--workload", "leak")
    finding = next(each for each in objects(shown.stdout, "finding") if each["code"] == "tensor-leak")
    assert finding["holder"] == "confidence[*] in train()"
    assert finding["bytes_per_step"] == 8 * 96 * 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_however_the_demo_ends_the_training_ends_too(running, how):
    process, trains = running
    assert not gone(trains, 0.2)
    process.send_signal(how)
    assert gone(trains)
    _, stderr = process.communicate(timeout=300)
    assert "Traceback" not in stderr


def test_a_training_that_stops_answering_ends_too(running):
    process, trains = running
    os.kill(trains, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    assert gone(trains)


def test_a_training_that_was_stopped_does_not_outlive_a_kill(running):
    process, trains = running
    os.kill(trains, signal.SIGSTOP)
    process.kill()
    assert gone(trains)


def test_on_a_virtual_device_it_ends_with_a_verdict(virtual_gpu, env):
    virtual_gpu()  # skips, or fails where it is required
    shown = demo(env, "--device", "t4", "--json", "--steps", "2")
    assert shown.returncode == 0, shown.stderr
    assert objects(shown.stdout, "hello")[-1]["devices"][0]["name"] == "Virtual T4"
    (verdict,) = objects(shown.stdout, "verdict")
    assert (verdict["fits"], verdict["ended"]) == (True, "steps")
    assert verdict["devices"][0]["reserved"] > 2**30


def test_a_closed_pipe_ends_it_without_a_word(env):
    with subprocess.Popen(
        [*DEMO, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdout
        assert process.stderr
        trains = json.loads(process.stdout.readline())["pid"]
        process.stdout.close()
        assert gone(trains)
        assert "Traceback" not in process.stderr.read()


def test_the_screen_appears_and_q_ends_both(env):
    master, slave = pty.openpty()
    os.set_inheritable(slave, True)
    with subprocess.Popen(
        DEMO,
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**env, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
    ) as process:
        os.close(slave)
        seen = b""
        while b"optimizer" not in seen:
            assert select.select([master], [], [], 300)[0], seen[-2000:]
            seen += os.read(master, 65536)
        children = psutil.Process(process.pid).children()  # the sampler of NVML may be one already
        (trains,) = (child for child in children if "--workload" in child.cmdline())
        os.write(master, b"q")
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):  # the other end closed
                if select.select([master], [], [], 0.1)[0]:
                    os.read(master, 65536)
        assert process.poll() == 0
    os.close(master)
    assert gone(trains.pid)


def test_no_terminal_is_said_before_anything_starts(env):
    shown = demo(env)
    assert shown.returncode == 1
    assert shown.stderr == "Error: this is not a terminal, and the screen needs one; use --json.\n"


def test_steps_without_json_is_a_wrong_argument(env):
    shown = demo(env, "--steps", "3")
    assert shown.returncode == 2
    assert "--steps needs --json" in shown.stderr


def test_a_training_that_fails_is_heard(env, tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libfoo.so.1: cannot open shared object file')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.15.0'\ncuda = None\n")
    shown = demo({**env, "PYTHONPATH": str(tmp_path)}, "--json")
    assert shown.returncode == 1
    assert "the demo's training process failed. Its output:" in shown.stderr
    assert "libfoo.so.1: cannot open shared object file" in shown.stderr


def test_two_ranks_differ_by_the_copy_in_the_buckets(env):
    shown = demo(
        {**env, "CUDA_VISIBLE_DEVICES": "", "GPUMON_GOVERNOR": "off"}, "--workload", "ddp", "--json", "--steps", "4"
    )
    assert shown.returncode == 0, shown.stderr
    views = {
        m["rank"]: m["parallel"]["gradient_as_bucket_view"] for m in objects(shown.stdout, "model") if m["parallel"]
    }
    assert views == {0: False, 1: True}
    ledgers = {s["rank"]: s["ledger"] for s in objects(shown.stdout, "step") if s["ledger"]}
    size = ledgers[1]["buckets"]
    assert size > 0
    assert [(ledgers[rank]["buckets"], ledgers[rank]["gradients"]) for rank in (0, 1)] == [(size, size), (size, 0)]
    assert {f["rank"] for f in objects(shown.stdout, "finding") if f["code"] == "bucket-copy"} == {0}
    assert all(gone(hello["pid"]) for hello in objects(shown.stdout, "hello"))
