"""What NVML says of virtual devices, as the host side reads it; nvitop reads the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gpumon.host import nvml
from gpumon.host.protocol import DriverReading, decoder
from gpumon_agent import wire

MIB = 2**20


def read() -> None:
    """One reading, as the child process would answer."""
    import json

    from gpumon.host.nvml import Reader

    print(json.dumps(Reader().read()))


def hold(device: int) -> None:
    """Holds 100 MiB of a device and says what the allocator reserved, until its input ends."""
    import os
    import sys

    import torch

    kept = torch.empty(100 * 2**20, dtype=torch.uint8, device=f"cuda:{device}")
    uuid = torch.cuda.get_device_properties(device).uuid
    print(os.getpid(), torch.cuda.memory_reserved(device), f"GPU-{uuid}", kept.numel(), flush=True)
    sys.stdin.read()


@contextmanager
def holding(gpu, device: int, env: dict[str, str] | None = None) -> Iterator[tuple[int, int, str]]:
    """(pid, reserved bytes, UUID) of a process that holds memory."""
    with subprocess.Popen(
        gpu.command(hold, device),
        env={**gpu.environment, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        pid, reserved, uuid, _ = process.stdout.readline().split()
        yield int(pid), int(reserved), uuid


def reading(gpu, **env: str) -> DriverReading:
    return decoder.decode(gpu.run(read, env=env).stdout)


def test_a_lost_device_says_so_of_every_field_that_the_driver_tells() -> None:
    assert ("uuid", *nvml.TOLD, "why", "began_ns", "ended_ns") == wire.DeviceReading.__struct_fields__


def test_the_process_that_reads_the_driver_is_small() -> None:
    """Nothing in it needs msgspec and the wire's types, which take 4 MB, or typing and pathlib, which take 1."""
    code = "import sys, gpumon.host.drivers; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"msgspec", "gpumon_agent.wire", "asyncio", "psutil", "textual", "typing", "pathlib"} & set(loaded)


def by_uuid(gpu, **env: str) -> dict:
    return {device.uuid: device for device in reading(gpu, **env).devices}


def test_each_device_tells_what_it_is(virtual_gpu):
    said = reading(virtual_gpu(devices=2, profile=["a100-40", "t4"], sensors="invented"))
    assert said.driver
    assert said.why is None
    first, second = said.devices
    assert "A100" in first.name
    assert "T4" in second.name
    assert first.total > second.total > 0
    assert first.used + first.free == first.total
    assert first.uuid != second.uuid
    assert first.processes == ()
    assert 0 <= first.utilization_percent <= 100
    assert first.temperature_c > 0
    assert 0 < first.power_mw <= first.power_limit_mw
    assert first.why == {}


def test_a_process_holds_what_it_reserved_and_its_context(virtual_gpu):
    gpu = virtual_gpu(devices=2, memory="16GiB", context="450MiB")
    with holding(gpu, 1) as (pid, reserved, uuid):
        devices = by_uuid(gpu)
        held = devices[uuid]
    (process,) = held.processes
    assert (process.pid, process.bytes, process.name) == (pid, reserved + 450 * MIB, Path(sys.executable).name)
    assert held.used == process.bytes
    assert held.total == 16 * 1024 * MIB
    assert {u: d.processes for u, d in devices.items() if u != uuid} == {u: () for u in devices if u != uuid}


def test_devices_are_told_apart_by_uuid_whatever_order_torch_sees(virtual_gpu):
    gpu = virtual_gpu(devices=2)
    with holding(gpu, 0, env={"CUDA_VISIBLE_DEVICES": "1"}) as (pid, _, uuid):
        devices = list(reading(gpu).devices)
    assert [d.uuid for d in devices].index(uuid) == 1
    assert [[p.pid for p in d.processes] for d in devices] == [[], [pid]]


NVITOP = """
import json, nvitop
print(json.dumps({d.uuid(): [d.memory_total(), d.memory_used(), {p: i.gpu_memory() for p, i in d.processes().items()}]
                  for d in nvitop.Device.all()}))
"""


def test_nvitop_reads_the_same_to_the_byte(virtual_gpu):
    gpu = virtual_gpu(devices=2, memory="16GiB")
    with holding(gpu, 0), holding(gpu, 1):
        theirs = json.loads(gpu.run(NVITOP).stdout)
        ours = by_uuid(gpu)
    assert theirs == {
        uuid: [device.total, device.used, {str(p.pid): p.bytes for p in device.processes}]
        for uuid, device in ours.items()
    }


def test_no_device_at_all_is_said(virtual_gpu):
    said = reading(virtual_gpu(devices=0))
    assert said.devices == ()
    assert said.why == "the driver knows no device"


def test_a_reading_survives_the_pipe():
    said = DriverReading("600.00", why="the driver knows no device")
    assert decoder.decode(msgspec.json.encode(said)) == said
