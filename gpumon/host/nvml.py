"""Reads NVIDIA's devices by NVML, into plain lists: part of the child process of drivers.py."""

from __future__ import annotations

import time

import pynvml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, TypeAlias, TypeVar

    T = TypeVar("T")
    Fields: TypeAlias = list[Any]  # of a message of the wire, in its order

_UNNAMED_BYTES = 64 << 20
"""More than this in use beyond the driver's own, but no process listed: a container hides them."""

TOLD = (
    "name", "total", "free", "used", "processes", "utilization_percent", "temperature_c", "power_mw", "power_limit_mw",
)  # fmt: skip
"""The fields of wire.DeviceReading that the driver tells: between `uuid` and `why`."""
NO_LIBRARY = "NVML is not installed: there is no NVIDIA driver here"
NO_DRIVER = "the NVIDIA driver is not loaded"
NO_DEVICE = "the driver knows no device"
_INIT_WHY = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: NO_LIBRARY,
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: NO_DRIVER,
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to query the NVIDIA driver",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "NVML and the loaded driver differ in version: reboot",
}
_CALL_WHY = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "not reported by this device",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to query",
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "not reported by this older driver",
    pynvml.NVML_ERROR_GPU_IS_LOST: "the device is lost: it fell off the bus, or must be reset",
    pynvml.NVML_ERROR_RESET_REQUIRED: "the device must be reset",
}


def _sentence(error: pynvml.NVMLError, known: dict[int, str]) -> str:
    return known.get(error.value) or f"the driver answers: {error}"


class Reader:
    """Reads NVML field by field: if a call fails, its field is None with the reason, the others are valid."""

    def __init__(self) -> None:
        self._initialized = False
        self._uuids: dict[int, str] = {}  # by NVML's index, last known: a lost device cannot be asked

    def read(self) -> dict[str, Any]:
        """The fields of a DriverReading."""
        try:
            if not self._initialized:
                pynvml.nvmlInit()
                self._initialized = True
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            self._initialized = False  # a reloaded driver needs a new nvmlInit
            return {"why": _sentence(error, _INIT_WHY)}
        why: dict[str, str] = {}
        driver = _ask(why, "driver", pynvml.nvmlSystemGetDriverVersion)
        devices: list[Fields] = []
        missing: list[str] = []
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            except pynvml.NVMLError as error:
                self._lost(index, _sentence(error, _CALL_WHY), devices, missing)
                continue
            texts: dict[str, str] = {}
            uuid = _ask(texts, "uuid", pynvml.nvmlDeviceGetUUID, handle)
            if uuid is None:
                self._lost(index, texts["uuid"], devices, missing)
                continue
            self._uuids[index] = uuid
            devices.append(_device(handle, uuid))
            devices.extend(_device(instance, uuid, parent=handle) for instance, uuid in _instances(handle))
        if not count:
            missing.append(NO_DEVICE)
        return {"driver": driver, "devices": devices, "why": "; ".join(missing) or None}

    def _lost(self, index: int, sentence: str, devices: list[Fields], missing: list[str]) -> None:
        if index in self._uuids:
            devices.append([self._uuids[index], *[None] * len(TOLD), dict.fromkeys(TOLD, sentence)])
        else:
            missing.append(f"device {index} of the driver: {sentence}")


def _ask(why: dict[str, str], field: str, call: Callable[..., T], *args: object) -> T | None:
    try:
        return call(*args)
    except pynvml.NVMLError as error:
        why[field] = _sentence(error, _CALL_WHY)
        return None


def _instances(handle: Any) -> Iterator[tuple[Any, str]]:
    """The MIG instances of a device, none if MIG is off or unknown."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        count = pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except pynvml.NVMLError:
        return
    for index in range(count):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            yield instance, pynvml.nvmlDeviceGetUUID(instance)
        except pynvml.NVMLError:  # a slot without instance
            continue


def _device(handle: Any, uuid: str, parent: Any = None) -> Fields:
    """One device, or one MIG instance of `parent`, whose sensors are used then."""
    sensors = handle if parent is None else parent
    why: dict[str, str] = {}
    name = _ask(why, "name", pynvml.nvmlDeviceGetName, handle)
    began_ns = time.monotonic_ns()
    memory = _ask(why, "total", pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is None:
        why["free"] = why["used"] = why["total"]
    processes = _processes(why, handle)
    ended_ns = time.monotonic_ns()
    if not processes and processes is not None and _unnamed(handle, memory):
        processes = None
        why["processes"] = "memory is in use, but the driver lists no process: a container hides them"
    if processes and any(held is None for _, held, _ in processes):
        why["processes.bytes"] = "the driver does not report the memory of each process"
    rates = _ask(why, "utilization_percent", pynvml.nvmlDeviceGetUtilizationRates, handle)
    celsius = pynvml.NVML_TEMPERATURE_GPU
    told = {
        "name": name,
        "total": None if memory is None else int(memory.total),
        "free": None if memory is None else int(memory.free),
        "used": None if memory is None else int(memory.used),
        "processes": processes,
        "utilization_percent": None if rates is None else int(rates.gpu),
        "temperature_c": _ask(why, "temperature_c", pynvml.nvmlDeviceGetTemperature, sensors, celsius),
        "power_mw": _ask(why, "power_mw", pynvml.nvmlDeviceGetPowerUsage, sensors),
        "power_limit_mw": _ask(why, "power_limit_mw", pynvml.nvmlDeviceGetEnforcedPowerLimit, sensors),
    }
    return [uuid, *map(told.__getitem__, TOLD), why, began_ns, ended_ns]


def _processes(why: dict[str, str], handle: Any) -> list[Fields] | None:
    """Every process with a context, once. NVML lists compute and graphics processes, with a process's total in each."""
    computing = _ask(why, "processes", pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if computing is None:
        return None
    drawing = _ask({}, "processes", pynvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []
    held: dict[int, int | None] = {}
    for process in (*computing, *drawing):
        held[process.pid] = max(
            (b for b in (held.get(process.pid), process.usedGpuMemory) if b is not None), default=None
        )
    return [[pid, held[pid], process_name(pid)] for pid in sorted(held)]


def _unnamed(handle: Any, memory: Any) -> bool:
    """Whether processes use memory: only version 2 of the call excludes what the driver reserves."""
    apart = _ask({}, "reserved", pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    return apart is not None and memory is not None and int(apart.used) > _UNNAMED_BYTES


def process_name(pid: int) -> str | None:
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:  # noqa: PTH123
            return file.read().strip() or None
    except OSError:  # gone, or a pid of another namespace
        return None
