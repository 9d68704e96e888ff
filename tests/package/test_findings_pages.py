"""docs/findings/ is what its script makes of the catalogue."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_are_those_that_the_script_makes() -> None:
    made = runpy.run_path(str(DOCS / "make_findings.py"))["pages"]()
    assert {path.name: path.read_text() for path in (DOCS / "findings").glob("*.md")} == made
