"""`gpumon whatif` and the benchmark of forecasts on a recorded run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import backtest
from click.testing import CliRunner

from gpumon.cli import main

RECORDING = str(Path(__file__).parents[1] / "data" / "json-example.gpumon")


def test_whatif_answers_from_a_recording_and_says_what_it_cannot() -> None:
    done = CliRunner().invoke(main, ["whatif", "--session", RECORDING, "--json"])
    assert done.exit_code == 0, done.output
    answers = {each["change"]: each for each in map(json.loads, done.output.splitlines())}
    now, fused = answers["as it is"], answers["fused optimizer"]
    assert now["phase"] == "optimizer"
    assert now["low"] == now["peak"] == now["high"]
    assert fused["peak"] < now["peak"]
    assert fused["fits"] is True
    assert answers["gradients as bucket views"]["why_not"] == "it does not run under DistributedDataParallel"
    together = CliRunner().invoke(main, ["whatif", "--session", RECORDING, "--batch", "0.5x", "--fused"])
    assert together.exit_code == 0, together.output
    assert "batch × 0.5, fused optimizer" in together.output
    assert CliRunner().invoke(main, ["whatif", "--session", RECORDING, "--batch", "much"]).exit_code == 2
    missing = CliRunner().invoke(main, ["whatif", "--session", RECORDING, "--rank", "3"])
    assert (missing.exit_code, "rank 3" in missing.output) == (1, True)


def test_backtest_scores_a_recording() -> None:
    done = CliRunner().invoke(backtest.command, [RECORDING])
    assert done.exit_code == 0, done.output
    assert "10 steps, same shapes" in done.output
    assert "outlook                 0.00 %" in done.output
    assert re.search(r"out of memory in step 10, .*: the outlook \d+\.\d ms before", done.output)
    assert CliRunner().invoke(backtest.command, ["nowhere.gpumon"]).exit_code == 1
