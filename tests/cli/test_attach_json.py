"""`gpumon attach --json` against a real training process on a virtual device: limits, order, and every way to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from synthetic import GIB, Run

from gpumon.cli.attach_json import Until, print_objects
from gpumon.export.objects import Objects
from gpumon_agent import wire


def train(steps: int, pause_s: float, load_s: float = 0.0) -> None:
    """Prints step, allocated and reserved at the end of each optimizer step, as the script itself reads them."""
    import time

    import torch
    from torch import nn

    import gpumon_agent

    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    gpumon_agent.watch(model, optimizer, name="watched")
    if load_s:
        print("loading", flush=True)
        time.sleep(load_s)
    for step in range(steps):
        model(torch.zeros(32, 256, device="cuda")).sum().backward()
        optimizer.step()
        print(step, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), flush=True)
        optimizer.zero_grad()
        time.sleep(pause_s)


class Session:
    """A training process, and gpumon beside it."""

    def __init__(self, gpu: Any, runtime: Path) -> None:
        self.gpu = gpu
        self.environment = {**gpu.environment, "XDG_RUNTIME_DIR": str(runtime), "GPUMON_GOVERNOR": "off"}
        self.target = ""
        self._started: list[subprocess.Popen[str]] = []

    def train(self, steps: int, pause_s: float = 0.03, load_s: float = 0.0) -> subprocess.Popen[str]:
        """A training whose first step is done, or that loads. What attaches means this one, whatever else runs here."""
        process = self._start(self.gpu.command(train, steps, pause_s, load_s))
        assert process.stdout is not None
        assert process.stdout.readline()
        self.target = str(process.pid)
        return process

    def attach(self, *arguments: str) -> subprocess.Popen[str]:
        return self._start([sys.executable, "-m", "gpumon", "attach", self.target, "--json", *arguments])

    def objects(self, *arguments: str) -> list[dict[str, Any]]:
        process = self.attach(*arguments)
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def _start(self, command: list[str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            with contextlib.suppress(ValueError):  # its pipes are closed already
                process.communicate()


@pytest.fixture
def session(virtual_gpu: Callable[..., Any], tmp_path: Path) -> Iterator[Session]:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    started = Session(virtual_gpu(profile="a100-40"), runtime)
    yield started
    started.end()


def test_steps_counts_live_steps_and_every_figure_is_the_script_s_own(session: Session) -> None:
    training = session.train(100_000)
    made = session.objects("--steps", "5")
    steps = [each for each in made if each["type"] == "step"]
    assert [each["type"] for each in made[:2]] == ["hello", "model"]
    assert sum(not step["replayed"] for step in steps) == 5
    assert [step["step"] for step in steps] == list(range(steps[0]["step"], steps[-1]["step"] + 1))
    training.kill()
    printed = [line.split() for line in training.communicate()[0].splitlines()]
    own = {int(step): (int(allocated), int(reserved)) for step, allocated, reserved in printed}
    for step in steps[1:]:
        assert (step["ledger"]["allocated"], step["ledger"]["reserved"]) == own[step["step"]]


def test_once_prints_hello_model_the_answer_findings_and_the_newest_step(session: Session) -> None:
    session.train(100_000)
    made = session.objects("--once")
    kinds = [each["type"] for each in made]
    assert kinds[:3] == ["hello", "model", "answer"]
    assert kinds[-1] == "step"
    assert set(kinds[3:-1]) <= {"finding"}
    assert made[-1]["step"] > 0


def test_a_backend_is_null_until_it_is_known(session: Session) -> None:
    session.train(400, load_s=4.0)
    made = session.objects("--steps", "1")
    hellos = [each for each in made if each["type"] == "hello"]
    assert [(hello["backend"], len(hello["devices"])) for hello in hellos] == [(None, 0), ("cuda", 1)]


def test_for_ends_after_so_many_seconds(session: Session) -> None:
    session.train(400)
    began = time.monotonic()
    made = session.objects("--for", "1")
    assert 1 <= time.monotonic() - began < 4
    assert made[-1]["t"] - made[0]["t"] < 2


def test_when_the_training_ends_goodbye_is_the_last_object(session: Session) -> None:
    session.train(200)
    made = session.objects()
    assert (made[-1]["type"], made[-1]["reason"]) == ("goodbye", "finished")
    assert [each["step"] for each in made if each["type"] == "step"][-1] == 199


def test_a_training_killed_hard_is_lost_and_the_stream_ends(session: Session) -> None:
    training = session.train(4000)
    attached = session.attach()
    assert attached.stdout is not None
    assert json.loads(attached.stdout.readline())["type"] == "hello"
    training.send_signal(signal.SIGKILL)
    out, _ = attached.communicate(timeout=300)
    last = json.loads(out.splitlines()[-1])
    assert (last["type"], last["reason"], attached.returncode) == ("goodbye", "lost", 0)


def test_a_reader_that_has_enough_ends_it_quietly(session: Session) -> None:
    session.train(4000)
    attached = session.attach()
    assert attached.stdout is not None
    assert attached.stderr is not None
    attached.stdout.readline()
    attached.stdout.close()
    assert attached.wait(timeout=300) == 0
    assert attached.stderr.read() == ""


def test_an_interrupt_ends_it_without_a_traceback(session: Session) -> None:
    session.train(4000)
    attached = session.attach()
    assert attached.stdout is not None
    attached.stdout.readline()
    attached.send_signal(signal.SIGINT)
    _, err = attached.communicate(timeout=300)
    assert "Traceback" not in err
    assert attached.returncode == 130


def test_a_full_disk_is_one_sentence(session: Session) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    session.train(4000)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gpumon", "attach", session.target, "--json", "--steps", "3"],
            env=session.environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "Error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("target", ["999999999", "no-such-job", "ipc:///nowhere/at/all.sock"])
def test_a_target_that_is_not_there_is_one_sentence(session: Session, target: str) -> None:
    session.target = target
    attached = session.attach()
    out, err = attached.communicate(timeout=300)
    assert (out, attached.returncode) == ("", 1)
    assert err.startswith("Error: ")
    assert err.count("\n") == 1


def test_a_reader_that_pauses_misses_nothing(session: Session) -> None:
    training = session.train(150, 0.04)
    attached = session.attach()
    training.communicate(timeout=300)  # far more than a pipe holds was printed meanwhile, and nobody read it
    out, _ = attached.communicate(timeout=300)
    made = [json.loads(line) for line in out.splitlines()]
    assert len(out) > 3 * 64 * 1024
    assert [each["step"] for each in made if each["type"] == "step"] == list(range(150))
    assert (made[-1]["type"], made[-1]["reason"]) == ("goodbye", "finished")


def test_of_a_reader_that_pauses_fifty_thousand_objects_are_kept_and_none_is_lost() -> None:
    """Some 20 MB, so that a paused pager beside a training for hours does not fill the machine's memory."""
    run, (reads, writes) = Run(), os.pipe()
    outlook = wire.Outlook(3, 0, 0, GIB, GIB, GIB, wire.FORWARD, wire.FITS)
    handed, kept, heard = 0, 0, list[bytes]()

    def read() -> None:
        with os.fdopen(reads, "rb") as pipe:
            heard.extend(pipe)

    reader = threading.Thread(target=read)

    def begin() -> None:
        nonlocal kept
        kept = handed
        reader.start()

    async def stream() -> AsyncIterator[wire.Received]:
        nonlocal handed
        for received in run.stream(3):
            yield received
        asyncio.get_running_loop().call_soon(begin)  # as soon as gpumon waits: until then the loop does not run
        while handed < 60_000:
            handed += 1
            yield replace(received, seq=received.seq + handed, event=outlook)

    with os.fdopen(writes, "w") as pipe, contextlib.redirect_stdout(pipe):
        assert print_objects(stream, Objects(), Until(once=False, steps=None, seconds=None, ranks=1)) == 0
    reader.join()
    assert 50_000 <= kept < 51_000  # and what the pipe holds
    assert sum(json.loads(line)["type"] == "outlook" for line in heard) == 60_000
