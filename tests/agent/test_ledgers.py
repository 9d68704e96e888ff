"""On whole scripts the ledger adds up to `reserved`, its owners are an independent walk's, little is unexplained."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import virtual
from forks import Forks
from scenarios._gpt import GPTConfig
from scenarios.catalogue import BY_NAME, OLDER_TORCH, PLAIN, Scenario
from scenarios.conftest import Runner

from gpumon.analysis import ledger
from gpumon.analysis.types import OWNERS
from gpumon_agent import wire
from gpumon_agent.attribution.saving import READABLE

RUNNER = "../agent/run_ledger"
AT_BOUNDARIES = 0.001  # of allocated
AT_PEAKS = 0.02
OF_THE_FRAMES = 163_844
"""As an exception ends a phase: what its frames hold, a layer's output or the gradient of one."""
TAKES_LONG = ("compile-inductor",)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[Callable[[Scenario], Any]]:
    """What a scenario's ranks printed, run by the process that forks scenarios."""

    def environment(**options: Any) -> dict[str, str]:
        return {**virtual.environment(forks.python, **options), "GPUMON_GOVERNOR": "off"}

    runner = Runner(environment, tmp_path_factory.mktemp("ledgers"), forks)
    yield lambda scenario: runner(
        dataclasses.replace(scenario, script=RUNNER, args=(str(scenario.path), *scenario.args))
    )
    runner.close()


def sum_of(lines: Any, *names: str) -> int:
    return sum(getattr(lines, name) or 0 for name in names)


EVALUATED_IN_BF16 = dataclasses.replace(BY_NAME["eval-between"], name="eval-between-bf16", args=("--bf16",))
EVERY = [*(each for each in PLAIN if each.name not in TAKES_LONG), EVALUATED_IN_BF16]


@pytest.mark.parametrize("scenario", EVERY, ids=lambda scenario: scenario.name)
def test_every_byte_is_accounted_for(run: Any, scenario: Scenario) -> None:
    for entries in run(scenario).ranks:
        assert entries[-1] == {"failures": []}
        phases = {(p.step, p.phase, p.index): p for p in (wire.Phase(**e["phase"]) for e in entries if "phase" in e)}
        ledgers = [(wire.Ledger(**e["ledger"]), e["walked"]) for e in entries if "ledger" in e]
        assert len(ledgers) == len(phases) > 3
        # a kept workspace (torch before 2.15) is known at the second look, within the first step
        first = 1 if any(owners.workspaces for owners, _ in ledgers) else 0
        aborted_in = -1
        for owners, walked in ledgers:
            lines = ledger.lines(phases[owners.step, owners.phase, owners.index], owners)
            assert lines is not None
            assert sum_of(lines, *OWNERS, "unexplained", "unattributed", "rounding", "slack") == lines.reserved
            # in FSDP's forward and backward modules show what is gathered
            if walked is not None and ("fsdp" not in scenario.name or owners.phase == wire.OPTIMIZER):
                assert {name: getattr(owners, name) for name in walked} == walked
            if OLDER_TORCH and owners.hidden:
                continue  # a first layer's half-precision weights, which only autocast's cache holds: it says so
            if READABLE and owners.step >= first:
                if phases[owners.step, owners.phase, owners.index].flags & wire.ABORTED:
                    aborted_in = owners.step
                # the engine's thread holds the gradient that it came to until it runs again
                known = OF_THE_FRAMES if aborted_in == owners.step else 0
                assert 0 <= (lines.unexplained or 0) <= max(AT_BOUNDARIES * (lines.allocated or 0), known), owners
        peaks = [wire.Ledger(**e["peak"]) for e in entries if "peak" in e]
        for peak in peaks:
            lines = ledger.peak_lines(peak)
            assert sum_of(lines, *OWNERS, "unexplained", "unattributed", "rounding") == lines.allocated
            if READABLE:
                assert 0 <= (lines.unexplained or 0) <= AT_PEAKS * (lines.allocated or 0), peak


WRONG_TOO = (
    "tensor-leak-list", "retained-graph-output", "retained-checkpoint", "fragmentation", "ddp", "oom-forward",
)  # fmt: skip


@pytest.mark.parametrize("name", WRONG_TOO)
def test_whatever_is_wrong_the_lines_still_sum_to_reserved(run: Any, name: str) -> None:
    for entries in run(BY_NAME[name]).ranks:
        assert entries[-1] == {"failures": []}
        phases = {(p.step, p.phase, p.index): p for p in (wire.Phase(**e["phase"]) for e in entries if "phase" in e)}
        ledgers = [wire.Ledger(**e["ledger"]) for e in entries if "ledger" in e]
        assert ledgers
        for owners in ledgers:
            lines = ledger.lines(phases[owners.step, owners.phase, owners.index], owners)
            assert lines is not None
            assert sum_of(lines, *OWNERS, "unexplained", "unattributed", "rounding", "slack") == lines.reserved
            assert (lines.unexplained or 0) >= 0, owners


def test_the_phases_of_a_plain_adam_loop_hold_what_the_textbook_says(run: Any) -> None:
    entries = run(BY_NAME["gpt-fp32"]).ranks[0]
    of = {(e["ledger"]["step"], e["ledger"]["phase"]): e["ledger"] for e in entries if "ledger" in e}
    model = GPTConfig().parameters * 4
    moments = of[0, "optimizer"]["optimizer"]
    assert 2 * model <= moments <= 2 * model + 1024
    lasting = ("weights", "gradients", "optimizer")
    contents = {phase: tuple(of[0, phase][name] for name in lasting) for phase in ("forward", "backward", "optimizer")}
    assert contents["forward"] == (model, 0, 0)  # model, and activations
    assert contents["backward"] == (model, model, 0)  # model, and gradients
    assert contents["optimizer"] == (model, model, moments)  # and moments
    if READABLE:
        assert of[0, "forward"]["activations"] > model
        logits = 8 * 128 * 8192 * 4  # held by the script's own variable until the next iteration
        assert of[0, "backward"]["activations"] - logits < 10_000
        assert of[1, "between"]["activations"] == 0
        peak = next(e["peak"] for e in entries if "peak" in e and e["peak"]["step"] == 1)
        assert (peak["phase"], peak["weights"], peak["optimizer"], peak["gradients"]) == ("backward", model, moments, 0)
        assert (
            peak["activations"] == of[1, "forward"]["activations"] + logits + 8
        )  # log-softmax, the loss, its gradient
        assert peak["temporaries"] == pytest.approx(2 * logits, rel=0.001)  # gradients of both
