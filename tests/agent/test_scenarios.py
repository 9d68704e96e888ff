"""On whole training scripts every figure of every phase is the one the script itself reads from torch, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from own_figures import as_phases_end
from scenarios.catalogue import BY_NAME

from gpumon_agent import wire

RUNNER = Path(__file__).with_name("run_scenario.py")
FIGURES = ("phase", "allocated", "allocated_peak", "reserved", "reserved_peak", "active", "inactive_split", "requested")
SAME = (
    "gpt-bf16",
    "accumulation",
    "checkpointing-reentrant",
    "checkpointing-non-reentrant",
    "variable-lengths",
    "ema",
    "lora",
    "compile-inplace",
    "fsdp2-rank-0-of-8",
)

Run = Callable[..., tuple[list[dict[str, Any]], list[dict[str, Any]]]]


@pytest.fixture
def run(virtual_gpu: Any, tmp_path: Path) -> Run:
    """(what the scripts said, what each rank's agent recorded) of a scenario."""

    def start(name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        scenario = BY_NAME[name]
        memory = {"memory": f"{scenario.memory_mib}MiB"} if scenario.memory_mib else {}
        gpu = virtual_gpu(devices=scenario.devices, **memory)
        recorded_to = tmp_path / "recorded"
        argv = [*map(str, (RUNNER, recorded_to, scenario.path, *scenario.args, "--report"))]
        ended = gpu.forks.run(argv, {**gpu.environment, "GPUMON_GOVERNOR": "off"}, tmp_path, ranks=scenario.ranks)
        if any("cannot import name 'fully_shard'" in text for text in ended.err):
            pytest.skip("this torch has FSDP2 only in its private modules")
        assert all((code != 0) == bool(scenario.fails) for code in ended.codes), ended
        recorded = [json.loads(Path(f"{recorded_to}.{rank}").read_text()) for rank in range(scenario.ranks)]
        assert not any(rank["failures"] for rank in recorded), ended
        said = [json.loads(line) for text in ended.out for line in text.splitlines() if line.startswith('{"')]
        return said, recorded

    return start


def own_phases(said: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The script's own figures. It reads at `load` and again before the first forward: one window of the agent's."""
    load, between, *rest = [phase for line in said for phase in line.get("phases", ())]
    for peak in ("allocated_peak", "reserved_peak"):
        between[peak] = max(load[peak], between[peak])
    phases = as_phases_end([{**between, "phase": "load"}, *rest])
    return [{name: phase[name] for name in FIGURES} for phase in phases]


@pytest.mark.parametrize("name", SAME)
def test_every_figure_is_the_scripts_own(run: Run, name: str) -> None:
    said, (recorded,) = run(name)
    assert [{name: phase[name] for name in FIGURES} for phase in recorded["phases"]] == own_phases(said)
    recomputed = {phase["phase"] for phase in recorded["phases"] if phase["flags"] & wire.RECOMPUTED}
    assert recomputed == ({"backward"} if name.startswith("checkpointing") else set())


@pytest.mark.parametrize("name", ["ddp-gloo", "fsdp2"])
def test_each_rank_has_its_phases(run: Run, name: str) -> None:
    _, ranks = run(name)
    for recorded in ranks:
        labels = [phase["phase"] for phase in recorded["phases"]]
        steps = len(recorded["steps"])
        assert labels == ["load", "forward", "backward", "optimizer"] + STEP * (steps - 1)
        assert steps > 2
    assert {phase["device"] for phase in ranks[1]["phases"]} == {1}


STEP = ["between", "forward", "backward", "optimizer"]


def test_skips_on_a_rule_of_the_scalers_own(run: Run) -> None:
    _, (recorded,) = run("scaler-skips")
    assert [step["skipped"] for step in recorded["steps"]] == [False, False, True] * 2


@pytest.mark.parametrize("name", ["hf-trainer-all", "hf-trainer-compile"])
def test_a_trainer_of_somebody_elses(run: Run, name: str) -> None:
    _, (recorded,) = run(name)
    of_step = [[p["phase"] for p in recorded["phases"] if p["step"] == step] for step in range(5)]
    micro = ["between", "forward", "backward"] * (2 if name == "hf-trainer-all" else 1)
    assert of_step[0] == ["load", *micro[1:], "optimizer"]
    assert of_step[1] == [*micro, "optimizer"]
    assert len(recorded["steps"]) == 5


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_allocation_that_fails_is_told_with_its_phase(run: Run, where: str) -> None:
    _, (recorded,) = run(f"oom-{where}")
    assert [oom["phase"] for oom in recorded["ooms"]] == [where]
    assert recorded["ooms"][0]["requested"] > 2**20
    if where != "optimizer":  # of an optimizer that raises no hook tells
        assert recorded["phases"][-1]["phase"] == where
        assert recorded["phases"][-1]["flags"] & wire.ABORTED
