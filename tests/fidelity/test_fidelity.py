"""The virtual GPU beside a physical one (`pytest -m gpu`), and the page that says how far they agree."""

from __future__ import annotations

import asyncio
import json
import os

import pytest
from fidelity import compare
from scenarios.catalogue import BY_NAME, SCENARIOS

from gpumon import link
from gpumon import virtual_gpu as vgpu
from gpumon_agent import wire


@pytest.fixture(scope="session")
def device():
    """The physical GPU; skips without one."""
    found = compare.physical_device()
    if found is None:
        pytest.skip("torch finds no GPU on this machine")
    return found


@pytest.mark.gpu
@pytest.mark.timeout(3 * compare.TIMEOUT_S)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_figure_is_the_same_on_a_physical_gpu(device, scenario):
    if scenario.virtual_only or scenario.devices > device["count"]:
        pytest.skip(f"needs {scenario.devices} devices, or peers that do not exist")
    physical = compare.measure(scenario, dict(os.environ))
    environment = compare.virtual_environment(device, scenario.devices)
    try:
        virtual = compare.measure(scenario, environment)
    finally:
        vgpu.remove_session(environment["VGPU_SESSION"])
    differing = compare.compare(physical, virtual)
    known = json.loads(compare.MEASURED.read_text()) if compare.MEASURED.exists() else {}
    results = known.get("scenarios", {}) if known.get("device") == device else {}
    results[scenario.name] = {
        "figures": len(physical),
        "differ": len(differing),
        "largest": str(differing[0]) if differing else "",
    }
    compare.MEASURED.write_text(json.dumps({"device": device, "scenarios": results}, indent=1) + "\n")
    compare.PAGE.write_text(compare.page())
    assert not differing, "\n".join(map(str, differing[:10]))


@pytest.mark.gpu
@pytest.mark.timeout(3 * compare.TIMEOUT_S)
@pytest.mark.parametrize("name", compare.RECORDED)
def test_a_run_on_a_physical_gpu_is_recorded(device, name):
    path = compare.RECORDINGS / f"{device['name'].lower().replace(' ', '-')}-{name}.gpumon"
    compare.record(BY_NAME[name], path, dict(os.environ))
    assert steps_of(path) > 10


def steps_of(path):
    """How many steps a recording closes."""

    async def count():
        return sum([isinstance(received.event, wire.Step) async for received in link.replay(path)])

    return asyncio.run(count())


def test_recording_writes_what_can_be_replayed(virtual_gpu, tmp_path):
    gpu = virtual_gpu(**BY_NAME["mlp"].options)
    compare.record(BY_NAME["mlp"], tmp_path / "mlp.gpumon", gpu.environment)
    assert steps_of(tmp_path / "mlp.gpumon") > 10


def test_the_page_says_what_was_measured_and_nothing_else():
    assert compare.PAGE.read_text() == compare.page(), "run python tests/fidelity/compare.py"


def test_two_runs_on_the_virtual_gpu_agree_to_the_byte(virtual_gpu):
    gpu = virtual_gpu(**BY_NAME["mlp"].options)
    runs = [compare.measure(BY_NAME["mlp"], gpu.environment) for _ in range(2)]
    assert len(runs[0]) == (1 + 5 * 4) * 11
    assert compare.compare(*runs) == []


@pytest.mark.parametrize("name", ["allocator-retries", "oom-ahead", "oom-backward"])
def test_a_larger_device_is_limited_to_what_the_scenario_is_about(virtual_gpu, name):
    scenario = BY_NAME[name]

    def figures(*more, **options):
        ran = virtual_gpu(**{**scenario.options, **options}).run(
            scenario.path, *scenario.args, "--report", *more, check=False
        )
        assert (ran.returncode != 0, scenario.fails in ran.stderr) == (bool(scenario.fails), True), ran.stderr
        return dict(compare.figures([json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"')]))

    assert compare.compare(figures(*scenario.capacity, memory="16GiB"), figures()) == []


def test_a_figure_that_differs_or_is_missing_is_named():
    differing = compare.compare({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5})
    assert [str(difference) for difference in differing] == [
        "b: physical 2, virtual 5",
        "c: physical 3, virtual None",
    ]
