"""A training whose snapshots of a physical GPU are public, run on the virtual GPU: it makes the same requests."""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path

import physical_traces
import pytest
import traces
import virtual

from gpumon.cli.checked import VIRTUAL_GPU

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def device() -> None:
    if tuple(map(int, re.findall(r"\d+", version("torch"))[:2])) < (2, 11):
        pytest.skip("the snapshots are of torch 2.11")
    virtual.environment(sys.executable)


@pytest.mark.parametrize("file", physical_traces.TRAINED, ids=traces.name)
def test_it_makes_the_same_requests_event_by_event(file: Path) -> None:
    run = physical_traces.repeated(file)
    assert run.same_events() == len(run.published.codes)
    assert run.identical()
    had, has = run.published.recorded, run.repeated.recorded
    assert had is not None
    assert has is not None
    assert has.requested_peak == had.requested_peak
    assert has.requested_end == had.requested_end
    assert abs(has.reserved_peak - had.reserved_peak) <= 0.005 * had.reserved_peak


def test_a_dry_run_says_of_as_many_that_they_were_checked() -> None:
    assert len(physical_traces.TRAINED) == 8
    assert VIRTUAL_GPU.startswith("Eight public runs made here the requests of a physical GPU, event by event. ")
    assert "22 recorded traces" in VIRTUAL_GPU
    assert len(traces.FILES) == 22
