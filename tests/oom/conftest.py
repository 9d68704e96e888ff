"""A virtual device of 1 GiB, and a runtime directory of the test's own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCENARIO = Path(__file__).parents[1] / "scenarios" / "oom.py"


@dataclass(frozen=True)
class Place:
    """Where trainings of one test run, watched by an agent."""

    gpu: Any
    runtime: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"XDG_RUNTIME_DIR": str(self.runtime), "TMPDIR": str(self.runtime), "GPUMON_GOVERNOR": "off"}

    @property
    def reports(self) -> Path:
        return self.runtime / "gpumon" / "oom"

    def command(self, script: Any, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "gpumon", "run", *self.gpu.command(script, *arguments)]

    def train(self, script: Any, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(script, *arguments),
            env={**self.gpu.environment, **self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def gpumon(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gpumon", *map(str, arguments)],
            env={**self.gpu.environment, **self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture
def place(virtual_gpu: Callable[..., Any], tmp_path: Path) -> Place:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    return Place(virtual_gpu(profile="a100-40", memory="1024MiB", context="450MiB"), runtime)
