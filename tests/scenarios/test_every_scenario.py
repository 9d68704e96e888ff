"""Every scenario runs on the virtual GPU and ends as the catalogue says."""

from __future__ import annotations

import pytest
from scenarios._document import PAGE, page
from scenarios.catalogue import FOLDER, SCENARIOS


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_it_ends_as_the_catalogue_says(run_scenario, scenario):
    run = run_scenario(scenario)
    assert all(run.ranks)


def test_every_script_is_in_the_catalogue():
    scripts = {path.stem for path in FOLDER.glob("[a-z]*.py")} - {"catalogue", "conftest"}
    assert {name for name in scripts if not name.startswith("test_")} == {scenario.script for scenario in SCENARIOS}


def test_names_are_unique():
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)


def test_the_page_of_scenarios_is_what_the_catalogue_says():
    assert PAGE.read_text() == page(), "run python tests/scenarios/_document.py"
