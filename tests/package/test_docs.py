"""The pages say what the code says."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from gpumon.cli import VERBS

ROOT = Path(__file__).parents[2]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
FOLDERS = ("docs", "docs/libraries", "benchmarks")
PAGES = [ROOT / name for name in TOP] + [page for name in FOLDERS for page in sorted(ROOT.glob(f"{name}/*.md"))]


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(listed.stdout.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


def test_the_tests_that_the_security_page_names_exist():
    named = re.findall(r"(tests/[a-z_/]+\.py)(?:::(\w+))?", (ROOT / "SECURITY.md").read_text())
    assert len(named) > 10
    for file, test in named:
        assert f"def {test}(" in (ROOT / file).read_text() if test else (ROOT / file).exists(), (file, test)


def test_the_readme_names_every_verb():
    readme = (ROOT / "README.md").read_text()
    assert [verb for verb in VERBS if f"`gpumon {verb}" not in readme] == []


def test_the_readme_names_no_verb_that_does_not_exist():
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"`gpumon ([a-z]+)", readme)) <= set(VERBS)


def test_nobody_is_told_to_install_somebody_elses_package():
    for name in tracked():
        path = ROOT / name
        if path.suffix in {".md", ".py", ".toml"} and path.is_file() and path != Path(__file__):
            assert not re.search(r"(pip|uv pip|uv) (install|add) ['\"]?gpumon\b(?!-)", path.read_text()), name


def test_the_glossary_is_the_screens():
    made = runpy.run_path(str(ROOT / "docs" / "make_glossary.py"))
    assert made["TARGET"].read_text() == made["text"](), "run: python docs/make_glossary.py"


def test_no_lock_file_and_no_index_of_packages_is_committed():
    names = tracked()
    assert not {name for name in names if re.search(r"(^|/)(uv|poetry|pdm|pylock.*)\.(lock|toml)$", name)}
    assert not re.search(r"index-url|find-links|https?://", (ROOT / "constraints.txt").read_text())


def test_what_is_replaced_is_the_agents_own_list():
    made = runpy.run_path(str(ROOT / "docs" / "make_replaced.py"))
    assert made["TARGET"].read_text() == made["text"](), "run: python docs/make_replaced.py"
