"""`gpumon compare`: two runs side by side, from recordings, JSON lines and jobs that run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from synthetic import MIB, Run

from gpumon import link
from gpumon.cli import main
from gpumon.export import jsonl
from gpumon.export.objects import Objects


@pytest.fixture
def recorded(tmp_path: Path) -> Callable[..., Path]:
    """Records a run of 20 steps."""

    def made(name: str, run: Run) -> Path:
        path = tmp_path / f"{name}.gpumon"
        with link.Recording(path) as recording:
            for received in run.stream(20):
                recording.write(received)
        return path

    return made


def compared(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["compare", *map(str, arguments)])


def test_the_biggest_difference_comes_first_by_category_phase_and_what_changed(recorded: Callable[..., Path]) -> None:
    one = Run(activations=lambda step: 300 * MIB)
    other = Run(activations=lambda step: 420 * MIB, weights=110 * MIB, input_bytes=lambda step: 2 << 16)
    small, large = recorded("a", one), recorded("b", other)
    found = json.loads(compared(small, large, "--json").output)
    by_kind: dict[str, list[Any]] = {}
    for each in found["differences"]:
        by_kind.setdefault(each["kind"], []).append(each)
    peaks = {each["name"]: each["bytes"] for each in by_kind["peak"]}
    assert peaks["allocated"] == found["peak"][1] - found["peak"][0] > 0
    assert {each["name"]: each["bytes"] for each in by_kind["category"]}["weights"] == 10 * MIB
    assert {each["name"]: each["bytes"] for each in by_kind["phase"]}["backward"] == (
        other.peaks(10)["backward"] - one.peaks(10)["backward"]
    )
    sizes = [abs(each["bytes"]) for each in by_kind["phase"]]
    assert sizes == sorted(sizes, reverse=True)
    assert "batch" in {each["what"] for each in found["changed"]}
    text = compared(small, large).output
    assert text.startswith("B's peak is ")
    assert "By category, at a step's end" in text
    assert "+10.0 MiB" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_twelve_modules_that_differ_most_are_listed(recorded: Callable[..., Path], tmp_path: Path) -> None:
    objects = Objects(replaying=True)
    lines = [s.object for received in link.replay(recorded("a", Run())) for s in objects.take(received)]
    hello = next(each for each in lines if each["type"] == "hello")

    def with_modules(name: str, factor: int) -> Path:
        modules = [{"path": f"layer{n}", "kind": "Linear", "weights": n * factor * MIB} for n in range(1, 21)]
        layers = {"type": "layers", "rank": hello["rank"], "pid": hello["pid"], "by_module": modules}
        path = tmp_path / name
        path.write_bytes(b"".join(map(jsonl.line, [*lines, layers])))
        return path

    text = compared(with_modules("a.jsonl", 1), with_modules("b.jsonl", 2)).output
    assert [f"layer{n}" for n in range(1, 21) if f"  layer{n} " in text] == [f"layer{n}" for n in range(9, 21)]
    assert "and 8 more with smaller differences" in text


def test_the_same_run_differs_by_nothing(recorded: Callable[..., Path]) -> None:
    one, other = recorded("a", Run()), recorded("b", Run())
    found = json.loads(compared(one, other, "--json").output)
    assert [each for each in found["differences"] if each["bytes"]] == []
    assert found["changed"] == []
    assert compared(one, other).output.startswith("B's peak is the same: ")


def test_a_higher_peak_fails_where_it_is_asked_to(recorded: Callable[..., Path]) -> None:
    one, other = recorded("a", Run()), recorded("b", Run(activations=lambda step: 400 * MIB))
    assert compared(one, other).exit_code == 0
    assert compared(one, other, "--fail-above", "5%").exit_code == 1
    assert compared(one, other, "--fail-above", "0.5").exit_code == 0
    assert compared(other, one, "--fail-above", "5%").exit_code == 0
    assert compared(one, other, "--fail-above", "much").exit_code == 2


def test_json_lines_compare_as_the_recording_they_were_made_from(recorded: Callable[..., Path], tmp_path: Path) -> None:
    run = Run(activations=lambda step: 400 * MIB)
    lines, objects = tmp_path / "b.jsonl", Objects()
    lines.write_bytes(b"".join(jsonl.line(s.object) for received in run.stream(20) for s in objects.take(received)))
    first = recorded("a", Run())
    from_lines, from_recording = (compared(first, each, "--json").output for each in (lines, recorded("b", run)))
    assert json.loads(from_lines) == json.loads(from_recording)


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        ("hello\n", 1, "neither a recording nor the output of --json (line 1 is no object)"),
        ('{"type": "step"}\n', 1, "holds an object that --json does not print"),
        ('{"type": "step", "rank": "x", "pid": 1}\n', 1, "holds an object that --json does not print"),
        ('{"type": "goodbye"}\n', 3, "has no step whose peak was read"),
        ("", 3, "has no step whose peak was read"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, content: str, code: int, said: str) -> None:
    file = tmp_path / "bad"
    file.write_text(content)
    done = compared(file, file)
    assert done.exit_code == code, done.output
    assert said in " ".join(done.output.split())


def test_a_job_that_is_not_there_is_one_sentence() -> None:
    done = compared("no-such-job", "no-such-job")
    assert done.exit_code == 1
    assert "Traceback" not in done.output
