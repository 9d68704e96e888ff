"""What the driver will not tell is None with its reason, and everything beside it is still told."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from gpumon import virtual_gpu as vgpu
from gpumon.host.protocol import DriverReading, decoder
from gpumon.host.sampler import Driver, Sampler
from gpumon_agent import wire

READ = """
import json
from gpumon.host import nvml
print(json.dumps(nvml.Reader().read()))
"""
HOLD = """
import sys, torch
kept = torch.empty(2**28, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""
FIELDS = {
    "nvmlDeviceGetMemoryInfo": {"total", "free", "used"},
    "nvmlDeviceGetComputeRunningProcesses": {"processes"},
    "nvmlDeviceGetUtilizationRates": {"utilization_percent"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetPowerUsage": {"power_mw"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_mw"},
    "nvmlDeviceGetName": {"name"},
}
REASONS = {
    "na": "not reported by this device",
    "nopermission": "no permission to query",
    "lost": "the device is lost: it fell off the bus, or must be reset",
    "error": "the driver answers: Unknown Error",
}
TOLD = {field for fields in FIELDS.values() for field in fields}


def reading(gpu) -> DriverReading:
    return decoder.decode(gpu.run(READ).stdout)


def holding(gpu, stack: ExitStack, script: str = HOLD) -> None:
    process = stack.enter_context(
        subprocess.Popen(
            gpu.command(script), env=gpu.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"


def silent(device: wire.DeviceReading) -> set[str]:
    return {field for field in TOLD if getattr(device, field) is None}


@pytest.mark.parametrize("function", FIELDS)
def test_a_call_that_is_not_supported_silences_its_own_fields_only(virtual_gpu, function):
    (device,) = reading(virtual_gpu(sensors="invented", nvml_faults={function: "na"})).devices
    assert silent(device) == FIELDS[function]
    assert {device.why[field] for field in FIELDS[function]} == {REASONS["na"]}


@pytest.mark.parametrize("fault", REASONS)
def test_the_reason_is_a_sentence(virtual_gpu, fault):
    (device,) = reading(virtual_gpu(sensors="invented", nvml_faults={"nvmlDeviceGetPowerUsage": fault})).devices
    assert device.why == {"power_mw": REASONS[fault]}


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("nodriver", "the NVIDIA driver is not loaded"),
        ("nopermission", "no permission to query the NVIDIA driver"),
        (18, "NVML and the loaded driver differ in version: reboot"),
    ],
)
def test_without_a_driver_that_answers_there_is_no_device_but_a_sentence(virtual_gpu, fault, why):
    assert reading(virtual_gpu(nvml_faults={"nvml": fault})) == DriverReading(why=why)


def test_processes_that_a_container_hides_are_unknown_not_absent(virtual_gpu):
    with ExitStack() as stack:
        gpu = virtual_gpu(sensors="invented", hide="processes")
        holding(gpu, stack)
        (device,) = reading(gpu).devices
    assert device.used > 2**28
    assert device.processes is None
    assert device.why == {"processes": "memory is in use, but the driver lists no process: a container hides them"}


@pytest.mark.parametrize(("context", "hidden"), [("40MiB", False), ("80MiB", True)])
def test_less_than_64_mib_in_use_may_be_no_process(virtual_gpu, context, hidden):
    with ExitStack() as stack:
        gpu = virtual_gpu(sensors="invented", hide="processes", context=context)
        holding(gpu, stack, HOLD.replace("2**28", "1"))
        (device,) = reading(gpu).devices
    assert device.processes == (None if hidden else ())


def test_bytes_that_the_driver_hides_are_unknown_not_zero(virtual_gpu):
    with ExitStack() as stack:
        gpu = virtual_gpu(sensors="invented", hide="bytes")
        holding(gpu, stack)
        (device,) = reading(gpu).devices
    assert [process.bytes for process in device.processes] == [None]
    assert device.why == {"processes.bytes": "the driver does not report the memory of each process"}


def test_mig_instances_are_devices_of_their_own(virtual_gpu):
    with ExitStack() as stack:
        gpu = virtual_gpu(devices=2, profile="a100-40", mig="3g.20gb", sensors="invented")
        holding(gpu, stack)
        board, first, second = reading(gpu).devices
    assert board.uuid.startswith("GPU-")
    assert first.uuid.startswith("MIG-")
    assert second.uuid.startswith("MIG-")
    assert first.total == second.total < board.total
    assert [p.bytes for p in first.processes] == [first.used]
    assert (first.used > 2**28, second.used, second.processes) == (True, 0, ())
    assert first.temperature_c == board.temperature_c


def sampled(gpu, monkeypatch) -> Sampler:
    """A sampler whose child runs under the virtual devices, while this process does not."""
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", *(n for n in gpu.environment if n.startswith("VGPU_"))):
        monkeypatch.setenv(name, gpu.environment[name])
    return Sampler(period_s=0.1, driver=Driver(patience_s=1))


async def until(sampler: Sampler, wanted: Callable[[wire.Host], object]) -> wire.Host:
    async for received in sampler:
        if wanted(received.event):
            return received.event
    raise AssertionError


async def test_a_device_lost_in_the_middle_keeps_its_name_and_comes_back(virtual_gpu, monkeypatch):
    gpu = virtual_gpu(devices=2, sensors="invented")
    async with sampled(gpu, monkeypatch) as sampler:
        before = [d.uuid for d in (await until(sampler, lambda host: host.devices)).devices]
        vgpu.set_faults(gpu.session, {"lost0": 1})
        lost, other = (await until(sampler, lambda host: host.devices and silent(host.devices[0]))).devices
        assert [lost.uuid, other.uuid] == before
        assert silent(lost) == TOLD
        assert set(lost.why.values()) == {REASONS["lost"]}
        assert silent(other) == set()
        vgpu.set_faults(gpu.session, {})
        await until(sampler, lambda host: host.devices and not silent(host.devices[0]))


async def test_a_call_that_hangs_in_the_middle_is_given_up_and_asked_again(virtual_gpu, monkeypatch):
    gpu = virtual_gpu()
    async with sampled(gpu, monkeypatch) as sampler:
        await until(sampler, lambda host: host.devices)
        vgpu.set_faults(gpu.session, {"nvmlDeviceGetUtilizationRates": "hang"})
        hung = await until(sampler, lambda host: (host.why or "").startswith("the driver did not answer"))
        assert hung.memory_total
        vgpu.set_faults(gpu.session, {})
        assert (await until(sampler, lambda host: host.devices)).why is None
