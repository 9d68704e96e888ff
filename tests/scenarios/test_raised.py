"""Scenarios through agent, session and analysis: each raises what it should, and a clean one nothing that warns.

By default one for each rule, the twins of those that warn, and two plain ones; GPUMON_ALL_SCENARIOS=1 runs every one.
Those that need the driver's figures, or ranks side by side, run under `gpumon dryrun`, some ten seconds each; of the
others the agent's messages are taken as they are said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scenarios.catalogue import BY_NAME, CONTEXT_MIB, SCENARIOS, WITHOUT_WORKSPACES, Scenario
from told import findings, told

from gpumon.analysis import rules

RULES = {
    rule.code: rule.severity
    for rule in vars(rules).values()
    if isinstance(rule, rules.Rule) and rule is not rules.AGENT_PART_OFF  # no script should raise that one
}
PLAIN = ("accumulation", "variable-lengths")
PACED = {
    "near-capacity": ("--sleep", "0.15"),
    "oom-ahead": ("--sleep", "0.15"),
    "stray-context": ("--sleep", "0.15", "--steps", "20"),
    "rank-skew": ("--sleep", "0.1", "--steps", "50"),
    "host-leak": ("--sleep", "0.5"),
    "host-leak-worker": ("--sleep", "0.5", "--steps", "130"),
    "checkpoint-save": ("--steps", "80"),
}
"""About the driver's figures, or rank beside rank: a step must take as long as a reading, and there must be enough."""

DRIVEN = ("near-capacity", "oom-ahead", "allocator-retries", "other-process", "host-leak")
"""About what the viewer reads beside the agent."""

WATCHED_TOO = {"other-process"}
"""The other process is started by the script, so the agent is in it as well, and it is no stranger."""

TRUE_TOO = {
    "checkpoint-device": {"retained-checkpoint", "stray-context"},
    "ddp-gloo": {"stray-context"},
    "ddp-gloo-clean": {"stray-context"},
}
"""What a scenario also shows, where a reading falls right: each rank keeps its copy, and a context comes with it; as
gloo's thread frees an event of the rank's device, PyTorch sets that thread's own again, the first: a context there."""

RAISE = {code: s for s in reversed(SCENARIOS) for code in s.raises if code in RULES}
"""the first scenario that raises each code"""

TWINS = {f"{code}-clean" for code, severity in RULES.items() if severity != "info"} - {"host-leak-clean"}
AS_ANOTHER = ("stray-context-clean",)
"""As rank-skew-clean: two ranks, long enough for readings of the driver, and nothing may warn."""

USUAL = [s for s in SCENARIOS if s in RAISE.values() or s.name in TWINS or s.name in PLAIN]
CHOSEN = SCENARIOS if os.environ.get("GPUMON_ALL_SCENARIOS") == "1" else USUAL


def raised(scenario: Scenario, gpu: Any, folder: Path) -> dict[str, str]:
    """Code → severity of every finding that was ever open."""
    paced = PACED.get(scenario.name.removesuffix("-clean"), ())
    if scenario.ranks == 1 and not scenario.fails and not scenario.name.startswith(DRIVEN):
        ever = findings(told(gpu, folder, scenario.path, *scenario.args, *paced))[1]
        return {code: each.severity for code, each in ever.items()}
    (folder / "run").mkdir(mode=0o700)
    return driven(scenario, paced, str(folder / "run"))


def driven(scenario: Scenario, paced: tuple[str, ...], folder: str) -> dict[str, str]:
    """The same through `gpumon dryrun`."""
    device = f"{scenario.memory_mib}MiB" if scenario.memory_mib else "a100-40"
    watched = ["--device", device, "--devices", str(scenario.devices), "--context", f"{CONTEXT_MIB}MiB", "--json"]
    environment = {**os.environ, **WITHOUT_WORKSPACES, "XDG_RUNTIME_DIR": folder}
    ran = subprocess.run(
        [sys.executable, "-m", "gpumon", "dryrun", *watched, *scenario.command(*paced)],
        capture_output=True, text=True, timeout=240, env=environment, check=False,
    )  # fmt: skip
    objects = [json.loads(line) for line in ran.stdout.splitlines()]
    assert scenario.fails in ran.stderr
    assert objects[-1]["steps"] or scenario.fails, ran.stderr
    return {each["code"]: each["severity"] for each in objects if each["type"] == "finding"}


def test_every_code_of_the_catalogue_has_a_rule_and_every_rule_a_scenario_and_a_clean_twin():
    codes = {code for scenario in SCENARIOS for code in scenario.raises}
    with_twin = {code for scenario in SCENARIOS if scenario.has_twin for code in scenario.raises}
    assert codes == RULES.keys() == with_twin


@pytest.mark.parametrize(
    "scenario", [pytest.param(s, id=s.name, marks=pytest.mark.long if s.name in AS_ANOTHER else ()) for s in CHOSEN]
)
def test_it_raises_what_the_catalogue_says_and_nothing_else_that_warns(virtual_gpu, tmp_path, scenario):
    found = raised(scenario, virtual_gpu(**scenario.options), tmp_path)
    assert found.keys() >= set(scenario.raises) - WATCHED_TOO
    warned = {code for code, severity in found.items() if severity != "info"}
    assert warned <= set(scenario.raises) | TRUE_TOO.get(scenario.name, set())


def test_the_usual_ones_hold_every_rule():
    assert {code for scenario in USUAL for code in scenario.raises} >= RULES.keys() & {
        code for scenario in BY_NAME.values() for code in scenario.raises
    }
