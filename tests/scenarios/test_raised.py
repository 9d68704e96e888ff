"""Scenarios through agent, session and analysis: each raises what it should, and a clean one nothing that warns.

Some ten seconds a scenario, so by default one for each rule, the twins of those that warn, and two plain ones;
GPUMON_ALL_SCENARIOS=1 runs every one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from scenarios.catalogue import BY_NAME, CONTEXT_MIB, SCENARIOS, Scenario

from gpumon.analysis import rules

RULES = {rule.code: rule.severity for rule in vars(rules).values() if isinstance(rule, rules.Rule)}
PLAIN = ("accumulation", "variable-lengths")
PACED = {
    "near-capacity": ("--sleep", "0.15"),
    "oom-ahead": ("--sleep", "0.15"),
    "stray-context": ("--sleep", "0.15", "--steps", "20"),
    "rank-skew": ("--sleep", "0.1", "--steps", "30"),
}
"""About the driver's figures, or rank beside rank: a step must take as long as a reading, and there must be enough."""

WATCHED_TOO = {"other-process"}
"""The other process is started by the script, so the agent is in it as well, and it is no stranger."""

RAISE = {code: s for s in reversed(SCENARIOS) for code in s.raises if code in RULES}
"""the first scenario that raises each code"""

TWINS = {f"{code}-clean" for code, severity in RULES.items() if severity != "info"}
USUAL = [s for s in SCENARIOS if s in RAISE.values() or s.name in TWINS or s.name in PLAIN]
CHOSEN = SCENARIOS if os.environ.get("GPUMON_ALL_SCENARIOS") == "1" else USUAL


def raised(scenario: Scenario, folder: str) -> dict[str, str]:
    """Code → severity of every finding that was ever open."""
    paced = PACED.get(scenario.name.removesuffix("-clean"), ())
    device = f"{scenario.memory_mib}MiB" if scenario.memory_mib else "a100-40"
    watched = ["--device", device, "--devices", str(scenario.devices), "--context", f"{CONTEXT_MIB}MiB", "--json"]
    ran = subprocess.run(
        [sys.executable, "-m", "gpumon", "dryrun", *watched, *scenario.command(*paced)],
        capture_output=True, text=True, timeout=240, env={**os.environ, "XDG_RUNTIME_DIR": folder}, check=False,
    )  # fmt: skip
    objects = [json.loads(line) for line in ran.stdout.splitlines()]
    assert objects[-1]["steps"], ran.stderr
    return {each["code"]: each["severity"] for each in objects if each["type"] == "finding"}


def test_every_code_of_the_catalogue_has_a_rule_and_every_rule_a_scenario():
    codes = {code for scenario in SCENARIOS for code in scenario.raises}
    assert codes == RULES.keys()


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_it_raises_what_the_catalogue_says_and_nothing_else_that_warns(virtual_gpu, tmp_path, scenario):
    virtual_gpu()  # skips, or fails where it is required
    (tmp_path / "run").mkdir(mode=0o700)
    found = raised(scenario, str(tmp_path / "run"))
    assert found.keys() >= set(scenario.raises) - WATCHED_TOO
    assert {code for code, severity in found.items() if severity != "info"} <= set(scenario.raises)


def test_the_usual_ones_hold_every_rule():
    assert {code for scenario in USUAL for code in scenario.raises} >= RULES.keys() & {
        code for scenario in BY_NAME.values() for code in scenario.raises
    }
