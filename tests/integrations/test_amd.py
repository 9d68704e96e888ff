"""AMD's devices by the real module amdsmi, on a small libamd_smi.so of the tests (amd_stand_in.c)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from watched import Run

from gpumon.analysis import device_budget
from gpumon.host.protocol import DriverReading, decoder
from gpumon.host.sampler import read_driver
from gpumon.session.store import SessionStore
from gpumon_agent import wire

pytestmark = pytest.mark.integration
# Found, not imported: importing it fails without the library.
spec = find_spec("amdsmi")
if spec is None or spec.origin is None or shutil.which("gcc") is None:
    pytest.skip("amdsmi or gcc is not installed", allow_module_level=True)

WRAPPER = Path(spec.origin).with_name("amdsmi_wrapper.py").read_text()
SOURCE = Path(__file__).with_name("amd_stand_in.c")
LAYOUTS = """
import ctypes, sys
from amdsmi import amdsmi_wrapper
def declared(kind, name):
    if issubclass(kind, ctypes.Array):
        return declared(kind._type_, f"{name}[{kind._length_}]")
    if issubclass(kind, ctypes.Structure):
        fields = " ".join(declared(inner, field) for field, inner in kind._fields_)
        return f"struct __attribute__((packed)) {{ {fields} }} {name};"
    return f"char {name};" if kind is ctypes.c_char else f"uint{8 * ctypes.sizeof(kind)}_t {name};"
for name in sys.argv[1:]:
    kind = getattr(amdsmi_wrapper, name, None)
    if kind is not None:
        print(f"#define HAS_{name}")
        print("typedef", declared(kind, name))
"""
READ = """
import json, sys
from gpumon.host.amd_smi import Reader
reader = Reader(*sys.argv[1:])
reader.read()
print(json.dumps(reader.read()))
"""
READ_ALL = """
import asyncio, json
from gpumon.host import read_driver
reading = asyncio.run(read_driver(30))
print(json.dumps([[device.name for device in reading.devices], reading.driver, reading.why]))
"""
WITH_KFD_ID = "amdsmi_kfd_info_t" in WRAPPER
"""Whether this amdsmi tells the kernel's number of a device: since 6.4."""
UUID = "GPU-66333330-6463-3464-3030-646565323262"
NEXT_UUID = "GPU-66333330-6463-3464-3030-646565323263"
TOTAL, USED = 206141652992, 5368713217
FIELDS = {
    "get_gpu_memory_total": {"total", "free"},
    "get_gpu_memory_usage": {"used", "free"},
    "get_gpu_process_list": {"processes"},
    "get_gpu_activity": {"utilization_percent"},
    "get_temp_metric": {"temperature_c"},
    "get_power_info": {"power_mw"},
    "get_power_cap_info": {"power_limit_mw"},
}
REASONS = {2: "not reported by this device", 10: "no permission to query", 13: "the AMD driver answers: Bad address"}


def compiled(folder: Path, *sources: Path) -> None:
    library = folder / "lib" / "libamd_smi.so"
    library.parent.mkdir(exist_ok=True)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, *sources], check=True, cwd=folder)


@pytest.fixture(scope="module")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for ROCM_PATH with the library. First one without any function, to read the layouts by."""
    folder = tmp_path_factory.mktemp("rocm")
    shutil.copy(SOURCE, folder)
    names = set(re.findall(r"_libraries\['libamd_smi.so'\]\.(\w+)", WRAPPER))
    unlike = folder / "unlike.c"
    unlike.write_text("".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(names)))
    compiled(folder, unlike)
    used = set(re.findall(r"\bamdsmi_\w+_t\b", SOURCE.read_text()))
    layouts = subprocess.run(
        [sys.executable, "-c", LAYOUTS, *sorted(used)], env=environment(folder), stdout=subprocess.PIPE, check=True
    )
    (folder / "layouts.h").write_bytes(layouts.stdout)
    before = subprocess.run(["gcc", "-E", SOURCE.name], cwd=folder, stdout=subprocess.PIPE, check=True, text=True)
    like = set(re.findall(r"^int (\w+)\(", before.stdout, re.MULTILINE))
    assert len(like & names) >= 12
    unlike.write_text("".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(names - like)))
    compiled(folder, folder / SOURCE.name, unlike)
    return folder


def environment(rocm: Path, does: str = "") -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("ROCM_HOME", "LD_PRELOAD")}
    return {**kept, "ROCM_PATH": str(rocm), "AMD_STAND_IN": does, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def read(rocm: Path, tmp_path: Path) -> Callable[..., DriverReading]:
    """What the reader says while the library does `does`; `kfd`: a folder in the place of the kernel's."""

    def ask(does: str = "", kfd: Path = tmp_path, path: Path = rocm) -> DriverReading:
        command = [sys.executable, "-c", READ, str(kfd)]
        ran = subprocess.run(command, env=environment(path, does), stdout=subprocess.PIPE, check=True)
        return decoder.decode(ran.stdout.splitlines()[-1])  # before it amdsmi and the library may print

    return ask


def test_a_device_is_read_in_the_units_of_the_wire(read):
    reading = read("average=512")
    (device,) = reading.devices
    assert (reading.driver, reading.why) == ("amdgpu 6.10.5", None)
    assert (device.uuid, device.name) == (UUID, "AMD Instinct MI300X")
    assert (device.total, device.used, device.free) == (TOTAL, USED, TOTAL - USED)
    assert (device.utilization_percent, device.temperature_c) == (87, 54)
    assert (device.power_mw, device.power_limit_mw) == (512_000, 750_000)
    assert 0 < device.began_ns <= device.ended_ns


@pytest.mark.parametrize("does", ["unversioned=1", "get_gpu_driver_info=2"])
def test_a_driver_without_version_is_read_all_the_same(read, does):
    reading = read(does)
    assert (reading.driver, len(reading.devices)) == (None, 1)


@pytest.mark.parametrize(("does", "mw"), [("current=140", 140_000), ("average=7 current=9", 7_000)])
def test_either_of_two_powers_may_be_known(read, does, mw):
    assert read(does).devices[0].power_mw == mw


@pytest.mark.parametrize(
    ("cap", "mw"),
    [(300, 300_000), (9_999, 9_999_000), (10_000, 10), (9_999_999_999, 9_999_999), (10**10, None), (0, None)],
)
def test_the_limit_is_in_watts_in_old_versions_and_microwatts_in_new_ones(read, cap, mw):
    assert read(f"cap={cap}").devices[0].power_limit_mw == mw


def test_two_devices_have_their_own_figures(read):
    first, second = read("devices=2").devices
    assert (first.uuid, second.uuid) == (UUID, NEXT_UUID)
    assert second.used == first.used + 1


def test_the_bytes_of_a_process_are_the_kernel_s(read, tmp_path):
    held = tmp_path / str(os.getpid())
    held.mkdir()
    (held / "vram_28851").write_text("4294971392\n")
    (held / "vram_28852").write_text("4096\n")
    (device,) = read(kfd=tmp_path).devices
    bytes_of = {process.pid: process.bytes for process in device.processes}
    names = {process.pid: process.name for process in device.processes}
    assert len(bytes_of) == 2
    assert bytes_of.pop(os.getpid()) == (4294971392 if WITH_KFD_ID else None)
    assert list(bytes_of.values()) == [None]  # the kernel has no file of the reader
    assert names[os.getpid()] == Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert device.why["processes.bytes"] == "the kernel does not report the memory of each process"


@pytest.mark.parametrize("function", FIELDS)
@pytest.mark.parametrize("status", REASONS)
def test_a_call_that_fails_silences_its_own_fields_only(read, function, status):
    (device,) = read(f"average=512 {function}={status}").devices
    told = {field for fields in FIELDS.values() for field in fields}
    assert {field for field in told if getattr(device, field) is None} == FIELDS[function]
    assert {device.why[field] for field in FIELDS[function]} == {REASONS[status]}


@pytest.mark.parametrize(
    "does",
    [
        f"activity={0xFFFF} degrees={0xFFFF} total={1 << 50}",
        f"activity={0xFFFFFFFF} degrees=-9223372036854775 total=-1",
    ],
)
def test_what_stands_for_not_supported_is_unknown(read, does):
    """All bits of 16, 32 or 64 for small figures; for bytes, a petabyte is more than any GPU has."""
    (device,) = read(f"{does} cap=-1").devices
    silent = ("utilization_percent", "power_mw", "temperature_c", "power_limit_mw", "total", "free")
    assert [getattr(device, field) for field in silent] == [None] * 6
    assert [device.why[field] for field in silent] == [REASONS[2]] * 6
    assert device.used == USED


@pytest.mark.parametrize("serial", [0, 3, 4])
def test_a_device_without_unique_id_is_told_but_matches_none_of_torch(read, serial):
    devices = read(f"devices=2 serial={serial}").devices
    assert [device.uuid for device in devices] == ["PCI 0000:03:00.0", "PCI 0000:04:00.0"]


def test_the_uuid_is_known_if_either_function_tells_it(read):
    assert read("get_gpu_enumeration_info=2").devices[0].uuid == UUID
    (device,) = read("get_gpu_asic_info=2").devices
    assert (device.uuid, device.name) == (UUID if WITH_KFD_ID else "PCI 0000:03:00.0", None)
    assert device.why["name"] == REASONS[2]


@pytest.mark.skipif(not WITH_KFD_ID, reason="this amdsmi has no amdsmi_get_gpu_enumeration_info")
def test_the_uuid_of_hip_goes_before_the_serial_number_of_the_socket(read):
    assert [device.uuid for device in read("devices=2 serial=2").devices] == [UUID, NEXT_UUID]


def test_a_lost_device_keeps_its_uuid(read):
    lost = " ".join(f"get_gpu_{name}=43" for name in ("asic_info", "enumeration_info", "device_bdf", "memory_usage"))
    (device,) = read(f"{lost} from=2").devices
    assert (device.uuid, device.name, device.used) == (UUID, "AMD Instinct MI300X", None)


def test_a_device_that_could_not_be_asked_at_first_gets_its_uuid_later(read):
    assert read("get_gpu_asic_info=30 get_gpu_enumeration_info=30 until=1").devices[0].uuid == UUID


def test_devices_with_the_same_unique_id_match_none_of_torch(read):
    reading = read("devices=2 serial=1")
    assert [device.uuid for device in reading.devices] == [f"{UUID}, device 0", f"{UUID}, device 1"]
    assert reading.why == "AMD devices have the same UUID, as partitions of one do: which is whose is not known"


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("init=34", "the AMD driver is not loaded"),
        ("init=10", "no permission to query the AMD driver"),
        ("init=18", "the AMD driver answers: Initialization error"),
        ("devices=0", "the AMD driver knows no device"),
        ("get_gpu_device_bdf=10 serial=0", "device 0 of the AMD driver: no permission to query"),
    ],
)
def test_without_a_device_there_is_a_sentence(read, does, why):
    assert read(does) == DriverReading(driver="amdgpu 6.10.5" if "bdf" in does else None, why=why)


def test_without_the_library_there_is_a_sentence(read, tmp_path):
    assert read(path=tmp_path) == DriverReading(
        why="amdsmi is installed, but not its library libamd_smi.so: there is no ROCm here"
    )


def test_a_library_that_lacks_functions_is_named(read, tmp_path):
    (tmp_path / "none.c").write_text("int nothing;\n")
    compiled(tmp_path, tmp_path / "none.c")
    reading = read(path=tmp_path)
    assert reading.why.startswith("amdsmi and libamd_smi.so differ in version: ")
    assert "undefined symbol" in reading.why


async def test_the_child_process_reads_it_though_the_library_prints(rocm, monkeypatch):
    for name, value in environment(rocm, "devices=2").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ROCM_HOME", raising=False)
    reading = await read_driver(patience_s=30)
    assert [device.uuid for device in reading.devices if device.name == "AMD Instinct MI300X"] == [UUID, NEXT_UUID]
    assert reading.why is None  # nothing of NVML that is not here
    assert all(isinstance(device, wire.DeviceReading) for device in reading.devices)


def test_the_headroom_of_a_training_on_it_is_known(read):
    used = 70_000_000_000
    run = Run(device="AMD Instinct MI300X", total=TOTAL)
    run.hello(backend="hip", devices=(wire.Device(0, UUID, run.device, TOTAL, "hip"),)).model().steps(0, 3)
    (device,) = read(f"used={used}").devices
    device = msgspec.structs.replace(device, began_ns=None, ended_ns=None)  # of another clock than the run's
    run.events.append(
        wire.Received("host:node1", run.events[-1].unix_ns, wire.Host("node1", run.t_ns, devices=(device,)))
    )
    run.steps(3, 2).synced()
    store = SessionStore()
    for received in run.events:
        store.apply(received)
    (rank,) = store.frame(run.events[-1].unix_ns).ranks
    assert device_budget.available(rank, 0) == run.reserved + TOTAL - used


def test_a_machine_may_have_nvidia_s_and_amd_s_devices(rocm, virtual_gpu):
    gpu = virtual_gpu(profile="t4")
    changed = {name: value for name, value in environment(rocm).items() if name in ("ROCM_PATH", "AMD_STAND_IN")}
    said = gpu.run(READ_ALL, env=changed).stdout
    names, driver, why = json.loads(said.splitlines()[-1])
    assert "T4" in names[0]
    assert names[1:] == ["AMD Instinct MI300X"]
    assert driver.endswith(", amdgpu 6.10.5")
    assert why is None
