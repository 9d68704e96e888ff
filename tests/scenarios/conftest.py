"""Runs scenarios on the virtual GPU, each once however many tests look at it, and reads what they reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scenarios.catalogue import Scenario

from gpumon import virtual_gpu as vgpu

TIMEOUT_S = 120


@dataclass(frozen=True)
class Run:
    """What one scenario said; `ranks[r]` holds the JSON lines of rank r."""

    codes: tuple[int, ...]
    seconds: float
    rss: tuple[int, ...]
    ranks: tuple[tuple[dict[str, Any], ...], ...]
    errors: tuple[str, ...]

    def steps(self, rank: int = 0) -> list[dict[str, Any]]:
        """The lines of closed steps; the first is step 0, which holds `load`."""
        return [line for line in self.ranks[rank] if "phases" in line and "open" not in line]

    def at(self, step: int, phase: str, index: int = 0, rank: int = 0) -> dict[str, int]:
        """The figures at the end of a phase; `index` counts its occurrences within the step."""
        phases = [entry for entry in self.steps(rank)[step]["phases"] if entry["phase"] == phase]
        return phases[index]

    def note(self, name: str, rank: int = 0) -> Any:
        """The last value a script noted under this name."""
        return [line[name] for line in self.ranks[rank] if name in line][-1]


class Runner:
    """Starts scenarios through one process that has torch imported."""

    def __init__(self, environment: Callable[..., dict[str, str]], folder: Path) -> None:
        self.environment = environment
        self.folder = folder
        self.known: dict[tuple[Scenario, tuple[str, ...]], Run] = {}
        self.server: subprocess.Popen[str] | None = None

    def __call__(self, scenario: Scenario, *args: object) -> Run:
        """The scenario's run with --report and these arguments; asserts that it ended as the catalogue says."""
        key = (scenario, tuple(map(str, args)))
        if key not in self.known:
            self.known[key] = self._run(*key)
        return self.known[key]

    def close(self) -> None:
        """End the process, and write what each scenario took to GPUMON_SCENARIO_COSTS, if that names a file."""
        if costs := os.environ.get("GPUMON_SCENARIO_COSTS"):
            with Path(costs).open("a") as file:
                for (scenario, _), run in self.known.items():
                    print(f"| {scenario.name} | {run.seconds:.1f} | {max(run.rss) / 2**20:.0f} |", file=file)
        if self.server is not None:
            self.server.communicate()

    def _run(self, scenario: Scenario, args: tuple[str, ...]) -> Run:
        environment = self.environment(**scenario.options)
        if self.server is None:
            self.server = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("_forks.py"))],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        out = self.folder / f"{len(self.known)}-{scenario.name}"
        out.mkdir()
        job = {
            "argv": [str(scenario.path), *scenario.args, *args, "--report"],
            "env": {name: value for name, value in environment.items() if os.environ.get(name) != value},
            "ranks": scenario.ranks,
            "timeout": TIMEOUT_S,
            "out": str(out),
        }
        try:
            assert self.server.stdin is not None
            assert self.server.stdout is not None
            print(json.dumps(job), file=self.server.stdin, flush=True)
            answer = json.loads(self.server.stdout.readline())
        finally:
            vgpu.remove_session(environment["VGPU_SESSION"])
        output = [(out / f"{rank}.out").read_text() for rank in range(scenario.ranks)]
        errors = tuple((out / f"{rank}.err").read_text() for rank in range(scenario.ranks))
        if scenario.fails:
            assert any(scenario.fails in text for text in errors), (scenario, errors)
            assert all(code == 1 for code in answer["codes"]), (answer, errors)
        else:
            assert not any(answer["codes"]), (answer, errors)
        lines = tuple(tuple(json.loads(line) for line in text.splitlines() if line.startswith('{"')) for text in output)
        return Run(tuple(answer["codes"]), answer["seconds"], tuple(answer["rss"]), lines, errors)


@pytest.fixture(scope="session")
def run_scenario(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """`run_scenario(scenario, *more_arguments) -> Run`; skips or fails as the `virtual_gpu` fixture does."""

    def environment(**options: Any) -> dict[str, str]:
        try:
            return vgpu.environment(**options)
        except vgpu.Unavailable as reason:
            if os.environ.get("GPUMON_REQUIRE_VIRTUAL_GPU") == "1":
                pytest.fail(str(reason))
            pytest.skip(str(reason))

    runner = Runner(environment, tmp_path_factory.mktemp("scenarios"))
    yield runner
    runner.close()
