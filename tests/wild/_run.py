"""Runs a case bare and under `gpumon dryrun` on the virtual GPU, and puts side by side what both say."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wild.catalogue import Case

from gpumon import virtual_gpu

DEVICE = "a100-40"
FROM_STEP = 5
WORDS = ("forward", "eval", "backward", "optimizer")
TIMEOUT_S = 400


@dataclass
class Rank:
    """One process that trained: what it counted itself (`truth`), and what gpumon told of it."""

    truth: dict[str, Any]
    bare: dict[str, Any]
    pid: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    models: dict[int, dict[str, Any]] = field(default_factory=dict)

    def words(self, *, evals: bool, inferred: bool = True) -> list[str]:
        """The phases that gpumon told, in order, without what lies between.

        Without those `inferred`: a script that calls `model.forward(x)`, which no hook sees, does not count it either.
        """
        told = [word for step in self.steps for word in _words(step, inferred) if word in WORDS]
        return [word for word in told if (word == "eval") == evals]

    def counted(self, *, evals: bool) -> list[str]:
        """The same as the case counted it, up to the end of its last step: no later step closes."""
        events = self.truth["events"]
        last = max((i for i, word in enumerate(events) if word == "optimizer"), default=len(events) - 1)
        return [word for word in events[: last + 1] if (word == "eval") == evals]

    @property
    def unexplained(self) -> float | None:
        """The highest share that no line of the ledger names as a phase ends, in per cent; None if it is never told."""
        ledgers = [p.get("ledger") for s in self.steps if s["step"] >= FROM_STEP for p in s["phases"]]
        known = [one for one in ledgers if one and one["unexplained"] is not None and one["allocated"]]
        return max((100 * one["unexplained"] / one["allocated"] for one in known), default=None)

    @property
    def estimate(self) -> float | None:
        """The largest error of the estimate's peak, in per cent; None if there is none.

        It counts evaluations where the first steps of the kind had them, and a step's peak is taken as the estimate is.
        """
        errors = []
        for step in self.steps:
            told = [p for p in step["phases"] if p["allocated_peak"] is not None]
            trained = max((p["allocated_peak"] for p in told if p["phase"] != "eval"), default=0)
            if step["step"] >= FROM_STEP and trained and (step.get("estimate") or {}).get("peak"):
                highest = max(p["allocated_peak"] for p in told)
                both = [100 * (step["estimate"]["peak"] / peak - 1) for peak in (trained, highest)]
                errors.append(min(both, key=abs))
        return max(errors, key=abs, default=None)

    @property
    def forecast(self) -> float | None:
        """The median error of what each step says of the next one's peak, in per cent."""
        errors = []
        for one, following in zip(self.steps, self.steps[1:], strict=False):
            peaks = [p["allocated_peak"] for p in following["phases"] if p["allocated_peak"] is not None]
            if one["step"] >= FROM_STEP and one["forecast"] and peaks:
                errors.append(100 * abs(one["forecast"]["next_peak"] / max(peaks) - 1))
        return statistics.median(errors) if errors else None


def _words(step: dict[str, Any], inferred: bool) -> Iterator[str]:
    """Its phases, by name. One with the number of a later one stands for those between, too: of many, the last."""
    counted: dict[str, int] = {}
    for phase in step["phases"]:
        name, index = phase["phase"], phase["index"]
        if inferred or not phase["inferred"]:
            yield from [name] * (index + 1 - counted.get(name, 0))
        counted[name] = index + 1


@dataclass
class Seen:
    """Everything a check looks at."""

    case: Case
    code: int
    bare_code: int
    said: list[str]
    bare_said: list[str]
    output: str
    ranks: list[Rank]
    findings: dict[str, str]
    verdict: dict[str, Any]
    told_ranks: list[int | None]

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in self.case.requires) or "torch alone"


def run(case: Case) -> Seen:
    """Both runs."""
    with tempfile.TemporaryDirectory(prefix="gm", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for part in ("bare", "seen", "run", "home"):
            (folder / part).mkdir(mode=0o700)
        plain = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COVERAGE_"))},
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "HOME": str(folder / "home"),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "disabled",
            "TOKENIZERS_PARALLELISM": "false",
            "GPUMON_GOVERNOR": "off",  # every step is read in full
        }
        virtual = virtual_gpu.environment(case.devices, DEVICE, python=sys.executable)
        virtual = {key: value for key, value in virtual.items() if key.startswith(("VGPU_", "LD_"))}
        options = ["--device", DEVICE, "--devices", str(case.devices), "--json"]
        commands = {
            "bare": (case.command(), {**plain, **virtual}),
            "seen": ([sys.executable, "-m", "gpumon", "dryrun", *options, *case.command()], plain),
        }
        try:
            bare, seen = _both(commands, folder)
        finally:
            virtual_gpu.remove_session(virtual["VGPU_SESSION"])
        truths = [
            [json.loads(path.read_text()) for path in sorted((folder / part).glob("truth.*"))]
            for part in ("bare", "seen")
        ]
    objects = [json.loads(line) for line in seen.stdout.splitlines() if line.startswith("{")]
    return _put_together(case, bare, seen, truths[0], truths[1], objects)


def _both(commands: dict[str, tuple[list[str], dict[str, str]]], folder: Path) -> list[Any]:
    """Side by side: most of the time goes into importing torch, twice."""
    running = []
    for name, (command, environment) in commands.items():
        with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as err:
            told = {**environment, "WILD_TRUTH": str(folder / name / "truth")}
            running.append(
                subprocess.Popen(command, env=told, cwd=folder / name, stdout=out, stderr=err, start_new_session=True)
            )
    ended = []
    for name, process in zip(commands, running, strict=True):
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for each in running:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait()
            raise
        texts = [(folder / f"{name}.{end}").read_text(errors="replace") for end in ("out", "err")]
        ended.append(subprocess.CompletedProcess(commands[name][0], code, *texts))
    return ended


def _put_together(
    case: Case, bare: Any, seen: Any, bare_truths: list[Any], truths: list[Any], objects: list[dict[str, Any]]
) -> Seen:
    ranks = [Rank(truth, other) for truth, other in zip(truths, bare_truths, strict=False)]
    stepped = {o["pid"]: o["rank"] for o in objects if o["type"] == "step"}
    for rank in ranks:
        number = rank.truth["rank"]
        pids = [pid for pid, told in stepped.items() if told == number or pid == rank.truth.get("pid")]
        if not pids and len(ranks) == 1:
            pids = list(stepped) or [o["pid"] for o in objects if o["type"] == "model"]
        for o in objects:
            if o["pid"] in pids[:1] and o["type"] in ("step", "model"):
                rank.pid = o["pid"]
            if o["pid"] in pids[:1] and o["type"] == "step":
                rank.steps.append(o)
            if o["pid"] in pids[:1] and o["type"] == "model":
                rank.models[o["model"]] = o
    verdict = next((o for o in objects if o["type"] == "verdict"), {})
    return Seen(
        case,
        verdict.get("exit_code") if verdict else seen.returncode,
        bare.returncode,
        [line for line in seen.stderr.splitlines() if line.startswith("case: ")],
        [line for line in (bare.stdout + bare.stderr).splitlines() if line.startswith("case: ")],
        f"bare:\n{(bare.stdout + bare.stderr)[-6000:]}\nwatched:\n{seen.stderr[-6000:]}",
        ranks,
        {o["code"]: o["severity"] for o in objects if o["type"] == "finding"},
        verdict,
        sorted(set(stepped.values()), key=str),
    )
