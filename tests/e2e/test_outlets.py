"""One training, and everything that gpumon says of it: each outlet states the same, whoever came when."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

MOMENTS = (60, 5_400)
OF_VIEWERS = ("t", "unix", "seconds", "replayed", "device_age_s")
"""Fields that tell when a viewer looked, or what it read of its own."""

EXPLAINED = ("verdict", "sentence", "reasons", "requested", "missing", "where", "remedies", "saves", "enough")
OF_THE_DEVICE = (
    "context", "free", "other_processes", "total",
    "headroom", "headroom_at_most", "p_oom", "steps_to_oom", "steps_to_oom_low", "steps_to_oom_high",
    "max_batch_factor", "verdict",
)  # fmt: skip
"""Fields that a stream cannot know of the step that closed last before its viewer had read the device."""


def train(moments: tuple[int, ...], folder: str) -> None:
    """Keeps every second output. Evaluates at each moment until it may go on, and runs out of memory at last."""
    import time
    from pathlib import Path

    import torch
    from torch import nn

    import gpumon_agent

    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    gpumon_agent.watch(model, optimizer, name="leaking")
    kept = []
    for step in range(moments[-1] + 1):
        if step in moments:
            Path(folder, f"at-{step}").touch()
            while not Path(folder, f"go-{step}").exists():
                with torch.no_grad():  # a reading of the device is placed between two phases
                    model.eval()(torch.zeros(8, 128, device="cuda"))
                    model.train()
                time.sleep(0.2)
        output = model(torch.zeros((8, 16, 24)[step % 3], 128, device="cuda"))
        output.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            kept.append(output.detach().clone())
    model(torch.zeros(1 << 24, 128, device="cuda"))


class Job:
    """The training, and gpumon's commands beside it."""

    def __init__(self, gpu: Any, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **gpu.environment,
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "GPUMON_OOM_DIR": str(folder / "oom"),
            "GPUMON_GOVERNOR": "off",
        }
        (folder / "run").mkdir(mode=0o700)
        self._started: list[subprocess.Popen[str]] = []
        self.training = self._start(gpu.command(train, MOMENTS, str(folder)), "training")
        self._wait(lambda: any((folder / "run").rglob("*.json")))

    def _start(self, command: list[str], name: str) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.out").open("w") as out, (self.folder / f"{name}.err").open("w") as err:
            process = subprocess.Popen(command, env=self.environment, stdout=out, stderr=err, text=True)
        self._started.append(process)
        return process

    def beside(self, name: str, *arguments: str) -> subprocess.Popen[str]:
        """A command that goes on; what it prints is in a file of that name."""
        return self._start([sys.executable, "-m", "gpumon", *arguments], name)

    def printed(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "gpumon", *arguments],
            env=self.environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def objects(self, *arguments: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.printed(*arguments).splitlines()]

    def dry_run(self) -> list[dict[str, Any]]:
        command = ["dryrun", "--device", "a100-40", "--json", str(self.folder / "train.py")]
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(self.folder / "run"), "GPUMON_GOVERNOR": "off"}
        done = subprocess.run(
            [sys.executable, "-m", "gpumon", *command],
            env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stdout[-3000:] + done.stderr
        objects = [json.loads(line) for line in done.stdout.splitlines()]
        assert objects[-1]["forecast"] is None  # it has run out of memory: there is no next iteration
        return objects

    def at(self, moment: int) -> None:
        self._wait(lambda: (self.folder / f"at-{moment}").exists())
        time.sleep(1.5)  # what the training wrote has gone through the helper, and been read by whoever is there

    def go_on(self, moment: int) -> None:
        (self.folder / f"go-{moment}").touch()

    def _wait(self, there: Callable[[], bool]) -> None:
        end = time.monotonic() + 300
        while not there():
            assert self.training.poll() is None, (self.folder / "training.err").read_text()
            assert time.monotonic() < end
            time.sleep(0.05)

    def end(self) -> None:
        for process in self._started:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


@pytest.fixture
def job(virtual_gpu: Callable[..., Any], tmp_path: Path) -> Iterator[Job]:
    started = Job(virtual_gpu(profile="a100-40"), tmp_path)
    yield started
    started.end()


def without(told: Any, *names: str) -> Any:
    """Without what is each viewer's own, at whatever depth."""
    if isinstance(told, dict):
        return {name: without(each, *names) for name, each in told.items() if name not in (*OF_VIEWERS, *names)}
    return [without(each, *names) for each in told] if isinstance(told, list) else told


def state(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """What was stated last: the answer, the findings that are open, and the newest step."""
    findings: dict[tuple[Any, ...], dict[str, Any]] = {}
    for each in objects:
        if each["type"] == "finding":
            findings[each["code"], each.get("subject"), each["holder"]] = each
    steps = [each for each in objects if each["type"] == "step"]
    answers = [each for each in objects if each["type"] == "answer"]
    return without(
        {
            "answer": answers[-1],
            "findings": sorted(
                (each for each in findings.values() if each["state"] == "open"), key=lambda each: each["code"]
            ),
            "step": steps[-1],
        },
    )


def lasting(told: dict[str, Any]) -> list[Any]:
    """What a stream states again when it changes; its other words are those of that moment."""
    answer, findings = told["answer"], told["findings"]
    return [
        {name: answer[name] for name in ("state", "who", "do")},
        [{n: each[n] for n in ("code", "severity", "step", "holder", "where", "remedy")} for each in findings],
    ]


def read(path: Path) -> list[dict[str, Any]]:
    """Whole lines of what a command has printed so far."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def test_every_outlet_states_the_same_at_every_moment(job: Job) -> None:
    pid = str(job.training.pid)
    viewers = [
        job.beside("early", "attach", pid, "--json"),
        job.beside("recorded", "record", str(job.folder / "early.gpumon"), pid),
    ]
    time.sleep(2)
    for moment in MOMENTS:
        job.at(moment)
        once = state(job.objects("attach", pid, "--json", "--once"))
        assert once["step"]["step"] == moment - 1
        compared = {
            "an early recording": replayed(job, job.folder / "early.gpumon"),
            "a late recording": replayed(job, recorded(job, pid, moment)),
        }
        for who, told in compared.items():
            for what, here in once.items():
                assert told[what] == here, f"{what}, by {who}, at step {moment}"
        streams = {
            "an early --json": streamed(job.folder / "early.out", moment),
            "a late --json": late_stream(job, pid, moment),
        }
        for who, told in streams.items():
            here, there = (without(each["step"], *OF_THE_DEVICE) for each in (once, told))
            assert there == here, f"the step, by {who}, at step {moment}"
            assert lasting(told) == lasting(once), f"what stays, by {who}, at step {moment}"
        told = exported(job)
        for name, here in of_a_step(once["step"]).items():
            assert told[name] == here, f"{name}, by the exporter, at step {moment}"
        picture = " ".join(job.printed("attach", pid, "--once").split())
        assert once["answer"]["what"] in picture[:400], picture[:600]
        if moment == MOMENTS[-1]:
            viewers.append(job.beside("late", "record", str(job.folder / "late.gpumon"), pid))
            time.sleep(3)
        job.go_on(moment)
    assert job.training.wait(120) == 1
    for viewer in viewers:
        assert viewer.wait(120) == 0  # it ends as the job does
    explained = {
        "from the disk": job.objects("explain", "--last", "--json")[0],
        "from an early recording": job.objects("explain", "--session", str(job.folder / "early.gpumon"), "--json")[0],
        "from a late recording": job.objects("explain", "--session", str(job.folder / "late.gpumon"), "--json")[0],
    }
    answers = {
        "an early --json": answer(read(job.folder / "early.out")),
        "an early recording": answer(job.objects("replay", str(job.folder / "early.gpumon"), "--json", "--once")),
        "a late recording": answer(job.objects("replay", str(job.folder / "late.gpumon"), "--json", "--once")),
        "a dry run": answer(job.dry_run()),
    }
    said = [{name: each[name] for name in EXPLAINED} for each in explained.values()]
    for who, told in zip(explained, said, strict=True):
        assert told == said[0], who
    for who, told in answers.items():
        assert told["what"].endswith(said[0]["sentence"].rstrip(".")), who  # a dry run names its device before
        assert {**told, "what": ""} == {**answers["an early --json"], "what": ""}, who
    assert f"in step {MOMENTS[-1]:,}, the last that fitted, it was" in said[0]["reasons"][0]
    assert "`kept[*] in train()` grows" in said[0]["reasons"][1]


def answer(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """The last one, without the process, which is another one in a dry run."""
    told = next(each for each in reversed(objects) if each["type"] == "answer")
    return {**{name: told[name] for name in ("state", "what", "do")}, "who": without(told["who"], "pid")}


def streamed(path: Path, moment: int) -> dict[str, Any]:
    """What a stream has stated once it has come to a step."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        objects = read(path)
        steps = [each["step"] for each in objects if each["type"] == "step"]
        if steps and steps[-1] == moment - 1:
            time.sleep(0.5)  # what is stated with it
            return state(read(path))
        time.sleep(0.2)
    raise AssertionError(f"{path.name} did not come to step {moment}")


def late_stream(job: Job, pid: str, moment: int) -> dict[str, Any]:
    viewer = job.beside(f"stream-{moment}", "attach", pid, "--json")
    told = streamed(job.folder / f"stream-{moment}.out", moment)
    viewer.terminate()
    return told


def exported(job: Job) -> dict[str, float]:
    lines = [line.split() for line in job.printed("export", "prometheus", "--once").splitlines() if line[:1] != "#"]
    return {line[0].partition("{")[0]: float(line[-1]) for line in lines if line}


def of_a_step(step: dict[str, Any]) -> dict[str, float]:
    forecast = step["forecast"]
    return {
        "gpumon_steps_total": step["step"] + 1,
        "gpumon_allocated_bytes": step["ledger"]["allocated"],
        "gpumon_reserved_bytes": step["ledger"]["reserved"],
        "gpumon_forecast_peak_bytes": forecast["next_peak"],
        "gpumon_forecast_peak_low_bytes": forecast["low"],
        "gpumon_forecast_peak_high_bytes": forecast["high"],
        "gpumon_headroom_bytes": forecast["headroom"],
        "gpumon_steps_to_oom": forecast["steps_to_oom"],
    }


def recorded(job: Job, pid: str, moment: int) -> Path:
    path = job.folder / f"late-{moment}.gpumon"
    recording = job.beside(f"late-{moment}", "record", str(path), pid)
    time.sleep(4)
    recording.send_signal(signal.SIGINT)
    recording.wait(60)
    return path


def replayed(job: Job, path: Path) -> dict[str, Any]:
    copy = path.with_suffix(".copy.gpumon")
    shutil.copy(path, copy)
    return state(job.objects("replay", str(copy), "--json", "--once"))
