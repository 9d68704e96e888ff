"""What allocators of physical GPUs were asked for, replayed: the figures are the devices', as docs/physical.md says."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import physical_traces
import pytest
import traces
import virtual

from gpumon.snapshots.replay import unknown_cache_bytes

pytestmark = pytest.mark.torch
PAGE = Path(__file__).parents[2] / "docs" / "physical.md"
ALLOWED = 0.005


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    virtual.environment(sys.executable)


@functools.cache
def compared(file: Path) -> physical_traces.Compared:
    return physical_traces.compared(file, {physical_traces.ADDRESS: physical_traces.ORDERS[physical_traces.ADDRESS]})


@pytest.mark.parametrize("file", traces.FILES, ids=traces.name)
def test_a_replay_has_the_figures_of_the_device(file: Path) -> None:
    """Requested to the byte, reserved within 0.5 %: of the cache that it began with, a trace tells a part."""
    found = compared(file)
    assert found.replayed.fits
    assert found.replayed.figures.requested_peak == found.had.requested_peak
    assert found.replayed.figures.requested_end == found.had.requested_end
    assert abs(found.share()) < ALLOWED


def test_at_least_half_of_the_reserved_peaks_are_exact() -> None:
    assert len(traces.FILES) == 22
    assert sum(compared(file).difference() == 0 for file in traces.FILES) >= 11


def test_a_trace_that_begins_with_a_known_cache_is_exact() -> None:
    known = [each for each in map(compared, traces.FILES) if unknown_cache_bytes(each.trace, each.replayed) == 0]
    assert len(known) == 9
    assert [each.difference() for each in known] == 9 * [0]


def test_the_page_has_these_figures() -> None:
    page = PAGE.read_text()
    version = re.search(r"^With torch (\S+),", page, re.MULTILINE)
    assert version
    if version[1] != compared(traces.FILES[0]).replayed.torch:
        pytest.skip(f"docs/physical.md was made with torch {version[1]}")
    for file in traces.FILES:
        found = compared(file)
        figures = (f"{found.reserved_peak:,}", f"{found.replayed.figures.reserved_peak:,}")
        assert " | ".join((*figures, *physical_traces.difference_cells(found))) in page, (
            "run benchmarks/physical_traces.py --write"
        )
