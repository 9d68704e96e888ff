"""Runs the scripts of examples/: under `gpumon run` on the virtual GPU with a viewer, and alone on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 400
PEAKS = {f"gpumon/{name}_bytes" for name in ("peak", "forward_peak", "backward_peak", "optimizer_peak", "reserved")}
"""What every logger gets of a training on a device."""
AT_FIRST = [(None, None, 0, batch, None) for batch in (1, 2)]
"""What the variables `epoch` and `batch_idx` say as the first step closes, which it may do in the next batch."""

_OURS = (
    (r"^import gpumon_agent.*\n", ""),
    (r", \*\*gpumon_agent\.figures\(\)", ""),
    (r"^ +handlers=gpumon_agent\.debug_server\.handlers\(\),.*\n", ""),
    (r"gpumon_agent\.\w+\.Callback\(\), ", ""),  # beside another callback
    (r"^ +callbacks=\[gpumon_agent\.\w+\.Callback\(\)\],.*\n", ""),
    (r"^ +engine\.monitor\.write_events.*gpumon_agent\.figures\(\)\.items\(\).*\n", ""),
)


def text_of(name: str) -> str:
    return (EXAMPLES / f"{name}.py").read_text()


def without_gpumon(name: str) -> str:
    """The example as its author had it before."""
    text = text_of(name)
    for pattern, plain in _OURS:
        text = re.sub(pattern, plain, text, flags=re.MULTILINE)
    assert "gpumon_agent" not in text
    return text


def changed_lines(name: str) -> int:
    """Beside the import."""
    before = Counter(without_gpumon(name).splitlines())
    after = [line for line in text_of(name).splitlines() if not line.startswith("import gpumon_agent")]
    return (Counter(after) - before).total()


def _environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COVERAGE_", "GPUMON_"))}
    quiet = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**kept, **quiet, **more}


def alone(texts: dict[Path, str]) -> dict[Path, str]:
    """Runs scripts side by side on the CPU without `gpumon run`, each in a folder of its own. What they printed."""
    running = {}
    for folder, text in texts.items():
        folder.mkdir()
        (folder / "train.py").write_text(text)
        with (folder / "printed").open("w") as out:
            running[folder] = subprocess.Popen(
                [sys.executable, "train.py"], cwd=folder, env=_environment(CUDA_VISIBLE_DEVICES=""), stdout=out,
                stderr=out,
            )  # fmt: skip
    printed = {}
    for folder, process in running.items():
        with process:
            try:
                code = process.wait(TIMEOUT_S)
            finally:
                process.kill()
        printed[folder] = (folder / "printed").read_text(errors="replace")
        assert code == 0, printed[folder]
        assert "gpumon: " not in printed[folder], printed[folder]
    return printed


@dataclass
class Watched:
    folder: Path
    objects: list[dict[str, Any]]
    output: str

    @property
    def phases(self) -> Counter[str]:
        """Those that were seen, with their number."""
        told = [phase for each in self.objects if each["type"] == "step" for phase in each["phases"]]
        return Counter(each["phase"] for each in told if not each["inferred"])

    @property
    def steps(self) -> int:
        return len({each["step"] for each in self.objects if each["type"] == "step"})

    @property
    def progress(self) -> list[tuple[Any, ...]]:
        """(library, stage, epoch, batch, batches)"""
        names = ("library", "stage", "epoch", "batch", "batches")
        return [tuple(each[name] for name in names) for each in self.objects if each["type"] == "progress"]

    @property
    def findings(self) -> set[str]:
        return {each["code"] for each in self.objects if each["type"] == "finding"}


def watched(
    script: str | Path, virtual_gpu: Callable[..., Any], folder: Path, *arguments: str, launched: bool = True
) -> Watched:
    """Runs an example, or a script's text, on the virtual GPU with `gpumon attach --json` beside it."""
    folder.mkdir()
    if isinstance(script, str):
        (folder / "train.py").write_text(script)
        script = folder / "train.py"
    command = [sys.executable, *(("-m", "gpumon", "run") if launched else ()), str(script), *arguments]
    name = f"{folder.parent.name}-{os.getpid()}"
    told = {"GPUMON_AWAIT_VIEWER": "1", "GPUMON_GOVERNOR": "off", "GPUMON_NAME": name}  # every step is read
    environment = {**_environment(), **virtual_gpu().environment, **told, "HF_HUB_OFFLINE": "1"}
    with (folder / "printed").open("w") as out, (folder / "json").open("w") as lines:
        viewer = subprocess.Popen(
            [sys.executable, "-m", "gpumon", "attach", name, "--wait", "--json"],
            env=_environment(), stdout=lines, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        with viewer, subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out) as training:
            try:
                code = training.wait(TIMEOUT_S)
                output = (folder / "printed").read_text(errors="replace")
                assert code == 0, output
                viewer.wait(60)
            finally:
                training.kill()
                viewer.kill()
    objects = [json.loads(line) for line in (folder / "json").read_text().splitlines()]
    return Watched(folder, objects, output)
