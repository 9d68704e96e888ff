"""docs/environment.md names every GPUMON_* variable there is, and a wrong value harms no training."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpumon_agent import environment

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environment.md").read_text()
NAME = re.compile(r"(?<![A-Z_])GPUMON_[A-Z][A-Z_]*[A-Z]")
READ = re.compile(r"""environ(?:ment)?(?:\.get\(|\[)["'](GPUMON_[A-Z_]+)""")


def sources(*folders: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [ROOT / name for name in listed.stdout.splitlines()]
    return [path for path in names if path.suffix in (".py", ".c", ".h", ".toml", "") and path != Path(__file__)]


def named(*folders: str) -> set[str]:
    return {name for path in sources(*folders) for name in NAME.findall(path.read_text())}


def test_the_page_names_what_the_source_names() -> None:
    assert named("agent", "gpumon", "tests", "benchmarks", ".ci", "pyproject.toml") == set(NAME.findall(PAGE))


def test_the_product_reads_no_other_variable_and_each_has_a_row_with_its_values() -> None:
    assert named("agent", "gpumon") == set(environment.TAKES)
    rows = {cells[1].strip().strip("`"): cells[2] for line in PAGE.splitlines() if len(cells := line.split("|")) > 4}
    for name, takes in environment.TAKES.items():
        for choice in takes.split("|"):
            assert choice.isupper() or f"`{choice}`" in rows[name], name


def test_every_value_passes_the_one_check() -> None:
    """Only the shim's own file, which may not import the agent, looks by itself."""
    looked = {path.name for path in sources("agent") for _ in READ.findall(path.read_text())}
    assert looked <= {"sitecustomize.py"}


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("GPUMON_HOLD_AFTER", ["0", "12", ""], ["abc", "-1", "1e3", "١", "9" * 5000, " 1"]),
        ("GPUMON_GOVERNOR", ["on", "off", ""], ["no", "OFF", "off\x1b[2J"]),
        ("GPUMON_TRACK_CPU", ["0", "1"], ["yes", "2"]),
        ("GPUMON_PEAKS", ["shadow", "bounds"], ["bound"]),
        ("GPUMON_OUTLOOK", ["print"], ["1"]),
        ("GPUMON_OOM_DIR", ["off", "/tmp/a", "relative"], []),
        ("GPUMON_NAME", ["night run"], []),
    ],
)
def test_what_a_variable_does_not_take_is_one_sentence(name: str, good: list[str], bad: list[str]) -> None:
    assert [environment.problem(name, text) for text in good] == [None] * len(good)
    for text in bad:
        said = environment.problem(name, text)
        assert said is not None
        assert said.startswith(f"{name} takes ")
        assert said.isprintable()
        assert len(said) < 120


TRAINS = """
import torch, gpumon_agent
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
gpumon_agent.watch(model, optimizer)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
from gpumon_agent import agent
assert agent.REGISTRY.agent.recorder.now[0] == 3
print("trained")
"""
WRONG = {name: "nonsense" for name, takes in environment.TAKES.items() if not takes.startswith(("TEXT", "FOLDER"))}


@pytest.mark.torch
def test_a_wrong_value_is_said_once_and_training_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in WRONG.items():
        monkeypatch.setenv(name, text)
    ran = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=False, timeout=300)
    assert (ran.returncode, ran.stdout) == (0, "trained\n"), ran.stderr
    said = ran.stderr.splitlines()
    asked = WRONG.keys() - {"GPUMON_SHIM", "GPUMON_OOM_SNAPSHOT"}  # read under `gpumon run`, and at an out-of-memory
    assert sorted(line.split()[1] for line in said) == sorted(asked)
    assert "gpumon: GPUMON_HOLD_AFTER takes NUMBER, not 'nonsense'; it is ignored" in said


def test_doctor_shows_those_that_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpumon.cli import doctor

    for name in environment.TAKES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GPUMON_PEAKS", "bounds")
    monkeypatch.setenv("GPUMON_HOLD_AFTER", "abc")
    monkeypatch.setenv("GPUMON_PEEKS", "\x1b]0;x\x07")
    seen = {each.text.split("=")[0].split()[0]: each for each in doctor._environment()}
    assert (seen["GPUMON_PEAKS"].verdict, seen["GPUMON_PEAKS"].text) == ("ok", "GPUMON_PEAKS=bounds")
    assert seen["GPUMON_HOLD_AFTER"].text == "GPUMON_HOLD_AFTER takes NUMBER, not 'abc': it is ignored"
    assert "no such variable" in seen["GPUMON_PEEKS"].text
    assert seen["GPUMON_PEEKS"].text.isprintable()
