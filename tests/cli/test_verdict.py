"""The verdict of a dry run as text."""

from __future__ import annotations

from gpumon.analysis.diagnosis.oom_report import OomReport, Remedy
from gpumon.analysis.dryrun_result import Failed, HighestPeak, Outcome, Space
from gpumon.analysis.types import Breakdown
from gpumon.cli.verdict import lines
from gpumon_agent import wire

GIB = 1 << 30


def told(*failed: Failed, alive: Breakdown | None = None) -> list[str]:
    space = Space("T4", 16 * GIB, 4 * GIB, GIB)
    peak = HighestPeak(None, 7, 0, 3, "backward", 1_000_000_000, None, lines=alive, lines_step=3, lines_of="peak")
    outcome = Outcome(not failed, "failed", 1, 4, (space,), (peak,), failed)
    return lines(outcome, "As on a GPU.", "cuFFT does not exist. " * 20)


def test_the_verdict_fits_a_window_of_100_columns_and_uses_them() -> None:
    assert 90 < max(map(len, told())) <= 100


def test_how_it_was_checked_comes_before_what_is_not_modelled() -> None:
    shown = told()
    at = shown.index("checked       As on a GPU.")
    assert shown[at + 1].startswith("not modelled  cuFFT")


def test_the_three_best_remedies_are_named() -> None:
    remedies = tuple(Remedy("smaller-batch", f"remedy {number}") for number in range(5))
    oom = wire.Oom(3, "backward", 0, 0, GIB)
    report = OomReport("too-big", "It does not fit.", "", remedies=remedies)
    shown = [line for line in told(Failed(None, oom, report, survived=False)) if line.startswith("to do ")]
    assert [line.split()[-1] for line in shown] == ["0", "1", "2"]


def test_what_is_a_thousandth_of_the_peak_is_named_and_less_is_not() -> None:
    (alive,) = [
        line
        for line in told(alive=Breakdown(weights=998_000_001, buffers=1_000_000, inputs=999_999))
        if line.startswith("alive ")
    ]
    assert "buffers" in alive
    assert "inputs" not in alive
