"""Real training loops on the virtual GPU: what gpumon tells of each is what the loop counted itself.

A check that fails for a known reason has it in the catalogue, and must go on failing until the reason is gone there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import virtual
from wild._run import Seen, run
from wild.catalogue import CASES, Case

pytestmark = [pytest.mark.long, pytest.mark.torch]
WITHIN = 2.0
"""Per cent: what may be unexplained, and what an estimate may be off."""


def ends(seen: Seen) -> Any:
    """As the bare run: its exit code and its own lines."""
    assert (seen.bare_code, seen.code) == (0, 0), seen.output
    if seen.case.says:
        assert seen.bare_said
        assert seen.said == seen.bare_said, seen.output
    assert [rank.truth["events"] for rank in seen.ranks] == [rank.bare["events"] for rank in seen.ranks]


def steps(seen: Seen) -> Any:
    told = [len(rank.steps) for rank in seen.ranks]
    assert told == [rank.truth["steps"] for rank in seen.ranks]
    if seen.case.stepless:
        assert "so no steps are counted: call gpumon_agent.step() after each update" in seen.output
    else:
        assert all(told)


def phases(seen: Seen) -> Any:
    for rank in seen.ranks if not seen.case.stepless else ():
        counted = rank.counted(evals=False)
        assert counted in (rank.words(evals=False), rank.words(evals=False, inferred=False))


def evals(seen: Seen) -> Any:
    for rank in seen.ranks if not seen.case.stepless else ():
        assert rank.words(evals=True) == rank.counted(evals=True)


def models(seen: Seen) -> Any:
    for rank in seen.ranks:
        told = sorted(model["parameters"] for model in rank.models.values())
        assert told == sorted(model["parameters"] for model in rank.truth["models"])


def unexplained(seen: Seen) -> Any:
    shares = [rank.unexplained for rank in seen.ranks]
    assert seen.case.stepless or all(share is not None and share <= WITHIN for share in shares), shares


def estimate(seen: Seen) -> Any:
    errors = [rank.estimate for rank in seen.ranks]
    assert seen.case.stepless or all(error is not None and abs(error) <= WITHIN for error in errors), errors


def findings(seen: Seen) -> Any:
    warned = {code for code, severity in seen.findings.items() if severity != "info"}
    assert warned <= set(seen.case.raises)


def ranks(seen: Seen) -> Any:
    ranked = seen.case.ranks > 1 and not seen.case.unranked
    expected: list[int | None] = list(range(seen.case.ranks)) if ranked else seen.told_ranks[:1]
    assert seen.told_ranks == expected
    assert len(seen.ranks) == len({rank.pid for rank in seen.ranks}) == seen.case.ranks


def to_the_byte(seen: Seen) -> Any:
    """The dry run's peak is that of the bare run, which nobody watched."""
    told = {peak["pid"]: peak["allocated"] for peak in seen.verdict.get("peaks", ())}
    assert [rank.truth["peak"] for rank in seen.ranks] == [rank.bare["peak"] for rank in seen.ranks]
    if not seen.case.peaks_elsewhere:
        assert [told.get(rank.pid) for rank in seen.ranks] == [rank.bare["peak"] for rank in seen.ranks]


CHECKS: tuple[Callable[[Seen], Any], ...] = (
    ends, steps, phases, evals, models, unexplained, estimate, findings, ranks, to_the_byte,
)  # fmt: skip
seen_of = cache(run)


def each() -> Iterator[Any]:
    for case in CASES:
        for check in CHECKS:
            reason = case.fails.get(check.__name__)
            marks = [pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError)] if reason else []
            yield pytest.param(case, check, marks=marks, id=f"{case.name}-{check.__name__}")


@pytest.mark.parametrize(("case", "check"), each())
def test_what_is_told_is_what_was_counted(case: Case, check: Callable[[Seen], Any]) -> None:
    for module in case.modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    virtual.environment(sys.executable)  # skips, or fails, where there is none
    check(seen_of(case))


def test_every_script_is_in_the_catalogue() -> None:
    scripts = {path.stem for path in (Path(__file__).parent / "cases").glob("[a-z]*.py")}
    assert scripts == {case.script for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_check_is_known_to_fail_by_its_name() -> None:
    assert {name for case in CASES for name in case.fails} <= {check.__name__ for check in CHECKS}
