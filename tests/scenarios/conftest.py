"""Runs scenarios on the virtual GPU, each once however many tests look at it, and reads what they reported."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import virtual
from forks import Forks
from scenarios.catalogue import OLDER_TORCH, UNHURRIED, WITHOUT_WORKSPACES, Scenario

from gpumon import virtual_gpu as vgpu

TIMEOUT_S = 300
LACKS = (
    "Disabling PyTorch because PyTorch >= ",  # transformers asks for a newer one
    "Cannot find a working triton installation",  # the wheel alone has none
)
"""What a scenario says where torch is too old for it; with GPUMON_OLDER_TORCH=1 it is skipped there."""


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
    """Starts scenarios through the process that has torch imported."""

    def __init__(self, environment: Callable[..., dict[str, str]], folder: Path, forks: Forks) -> None:
        self.environment = environment
        self.folder = folder
        self.forks = forks
        self.known: dict[tuple[Scenario, tuple[str, ...]], Run] = {}

    def __call__(self, scenario: Scenario, *args: object) -> Run:
        """The scenario's run with --report and these arguments; asserts that it ended as the catalogue says."""
        key = (scenario, tuple(map(str, args)))
        if key not in self.known:
            self.known[key] = self._run(*key)
        return self.known[key]

    def close(self) -> None:
        """Write what each scenario took to GPUMON_SCENARIO_COSTS, if that names a file."""
        if costs := os.environ.get("GPUMON_SCENARIO_COSTS"):
            with Path(costs).open("a") as file:
                for (scenario, _), run in self.known.items():
                    print(f"| {scenario.name} | {run.seconds:.1f} | {max(run.rss) / 2**20:.0f} |", file=file)

    def _run(self, scenario: Scenario, args: tuple[str, ...]) -> Run:
        environment = {**self.environment(**scenario.options), **WITHOUT_WORKSPACES}
        out = self.folder / f"{len(self.known)}-{scenario.name}"
        out.mkdir()
        unhurried = UNHURRIED if scenario.ranks > 1 else ()
        command = [str(scenario.path), *scenario.args, *unhurried, *args, "--report"]
        try:
            ended = self.forks.run(command, environment, out, ranks=scenario.ranks, timeout=TIMEOUT_S)
        finally:
            vgpu.remove_session(environment["VGPU_SESSION"])
        if OLDER_TORCH:
            for text in (what for what in LACKS if any(what in said for said in ended.err)):
                pytest.skip(f"with this torch: {text}")
        if scenario.fails:
            assert any(scenario.fails in text for text in ended.err), (scenario, ended)
            assert all(code == 1 for code in ended.codes), ended
        else:
            assert not any(ended.codes), ended
        lines = tuple(
            tuple(json.loads(line) for line in text.splitlines() if line.startswith('{"')) for text in ended.out
        )
        return Run(ended.codes, ended.seconds, ended.rss, lines, ended.err)


@pytest.fixture(scope="session")
def run_scenario(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Runner]:
    """`run_scenario(scenario, *more_arguments) -> Run`; skips or fails as the `virtual_gpu` fixture does."""
    runner = Runner(partial(virtual.environment, forks.python), tmp_path_factory.mktemp("scenarios"), forks)
    yield runner
    runner.close()
