"""Reads AMD's devices by AMD's Python module amdsmi, as nvml.py reads NVIDIA's. gpumon does not depend on amdsmi.

Written from the sources of amdsmi 6.2 to 7.0 and of Linux, tried on a stand-in library only (docs/devices.md).
"""

from __future__ import annotations

import os
import time

from gpumon.host.nvml import TOLD, process_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from gpumon.host.nvml import Fields

    _Identity: TypeAlias = tuple[str, str | None, int | None]  # UUID, name, the kernel's number of the device

KFD = "/dev/kfd"
"""There if the kernel has a GPU that ROCm can use."""
KFD_PROCESSES = "/sys/class/kfd/kfd/proc"
_NO_UNIQUE_ID = (0, (1 << 64) - 1)
_WATTS_BELOW = 10_000
"""amdsmi tells the power limit in microwatts, and told it in watts in ROCm 6.0: no limit is 10 mW, none is 10 kW."""
_FIGURES_BELOW = 0xFFFF
"""Percentages, degrees and watts: what is not supported has all bits set, 16, 32 or 64 of them."""
_BYTES_BELOW = 1 << 50

NO_MODULE = "there is an AMD GPU, but amdsmi is not installed for this Python: ROCm has it in /opt/rocm/share/amd_smi"
NO_LIBRARY = "amdsmi is installed, but not its library libamd_smi.so: there is no ROCm here"
NO_DRIVER = "the AMD driver is not loaded"
NO_DEVICE = "the AMD driver knows no device"
_NOT_TOLD = "not reported by this device"
_INIT_WHY = {10: "no permission to query the AMD driver", 34: NO_DRIVER}
_CALL_WHY = {  # by amdsmi_status_t, the same numbers in all versions
    2: _NOT_TOLD,
    3: "not reported by this older driver",
    10: "no permission to query",
}


class Reader:
    """Reads field by field: if a call fails, its field is None with the reason, the others are valid."""

    def __init__(self, kfd_processes: str = KFD_PROCESSES) -> None:
        self._kfd_processes = kfd_processes
        self._smi: Any = None
        self._absent: str | None = None  # why there is no module: asked once, because importing it takes time
        self._initialized = False
        self._known: dict[int, _Identity] = {}  # by index: a lost device cannot be asked

    def read(self) -> dict[str, Any]:
        """The fields of a DriverReading; an empty `why` if nothing of AMD is here."""
        if self._smi is None:
            if self._absent is None:
                self._absent = self._load()
            if self._absent is not None:
                return {"why": self._absent}
        smi = self._smi
        try:
            if not self._initialized:
                smi.amdsmi_init()
                self._initialized = True
            handles = smi.amdsmi_get_processor_handles()
        except smi.AmdSmiException as error:
            return {"why": _sentence(error, _INIT_WHY)}
        missing: list[str] = []
        found = [(index, handle, self._identity(index, handle, missing)) for index, handle in enumerate(handles)]
        uuids = [identity[0] for *_, identity in found if identity is not None]
        if len(set(uuids)) < len(uuids):
            missing.append("AMD devices have the same UUID, as partitions of one do: which is whose is not known")
        devices = []
        for index, handle, identity in found:
            if identity is not None:
                uuid, name, kfd = identity
                own = uuid if uuids.count(uuid) == 1 else f"{uuid}, device {index}"
                devices.append(self._device(handle, own, name, kfd))
        if not handles:
            missing.append(NO_DEVICE)
        driver = self._ask({}, "", "amdsmi_get_gpu_driver_info", handles[0]) if handles else None
        version = driver["driver_version"] if driver else "N/A"
        told = None if version in ("", "N/A") else f"amdgpu {version}"
        return {"driver": told, "devices": devices, "why": "; ".join(missing) or None}

    def _load(self) -> str | None:
        """Imports amdsmi; returns why there is none. amdsmi_wrapper.py loads the library and has all its functions
        looked up while it is imported: it prints, then raises KeyError, if there is none, and AttributeError if the
        library is older."""
        try:
            import amdsmi.amdsmi_interface
        except ModuleNotFoundError:  # or a folder of that name is on the path
            return NO_MODULE if os.path.exists(KFD) else ""  # noqa: PTH110
        except (ImportError, OSError, KeyError):
            return NO_LIBRARY
        except AttributeError as error:
            return f"amdsmi and libamd_smi.so differ in version: {error}"
        self._smi = amdsmi.amdsmi_interface
        return None

    def _ask(self, why: dict[str, str], field: str, function: str, *args: object) -> Any:
        call = getattr(self._smi, function, None)
        if call is None:
            why[field] = "not reported by this older amdsmi"
            return None
        try:
            return call(*args)
        except self._smi.AmdSmiException as error:
            why[field] = _sentence(error, _CALL_WHY)
        except ValueError as error:  # it decodes texts and hexadecimal numbers of the driver
            why[field] = f"amdsmi cannot read the driver's answer: {error}"
        return None

    def _identity(self, index: int, handle: Any, missing: list[str]) -> _Identity | None:
        if index in self._known:
            return self._known[index]
        why: dict[str, str] = {}
        place = self._ask(why, "place", "amdsmi_get_gpu_device_bdf", handle)
        asic = self._ask(why, "asic", "amdsmi_get_gpu_asic_info", handle) or {}
        numbers = self._ask(why, "numbers", "amdsmi_get_gpu_enumeration_info", handle) or {}  # since 6.4
        kernel = self._ask(why, "kernel", "amdsmi_get_gpu_kfd_info", handle) or {}
        unique = _unique_id(numbers.get("hip_uuid")) or _unique_id(asic.get("asic_serial"))
        if unique is None and place is None:
            missing.append(f"device {index} of the AMD driver: {why['place']}")
            return None
        uuid = f"PCI {place}" if unique is None else torch_uuid(unique)
        name, number = asic.get("market_name"), kernel.get("kfd_id")
        identity = uuid, None if name == "N/A" else name, number if isinstance(number, int) else None
        if unique is not None:
            self._known[index] = identity
        return identity

    def _device(self, handle: Any, uuid: str, name: str | None, kfd: int | None) -> Fields:
        """One device. Units and keys: py-interface/amdsmi_interface.py and src/amd_smi/amd_smi.cc of amdsmi."""
        smi = self._smi
        why: dict[str, str] = {}
        began_ns = time.monotonic_ns()
        # Bytes, from mem_info_vram_total and mem_info_vram_used of the kernel. amdsmi_get_gpu_vram_usage has MiB.
        vram = smi.AmdSmiMemoryType.VRAM
        total = _below(_BYTES_BELOW, self._ask(why, "total", "amdsmi_get_gpu_memory_total", handle, vram))
        used = _below(_BYTES_BELOW, self._ask(why, "used", "amdsmi_get_gpu_memory_usage", handle, vram))
        processes = self._processes(why, handle, kfd)
        ended_ns = time.monotonic_ns()
        celsius = _below(
            # Degrees: amd_smi.cc divides by 1000, although amdsmi.h says millidegrees. Junction: what torch asks for.
            _FIGURES_BELOW,
            self._ask(
                why, "temperature_c", "amdsmi_get_temp_metric", handle,
                smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT,
            ),
        )  # fmt: skip
        activity = self._ask(why, "utilization_percent", "amdsmi_get_gpu_activity", handle)
        power = self._ask(why, "power_mw", "amdsmi_get_power_info", handle)
        watts = _figure(power, "average_socket_power")  # one of the two is not supported: torch.cuda.power_draw
        watts = _figure(power, "current_socket_power") if watts is None else watts
        cap = self._ask(why, "power_limit_mw", "amdsmi_get_power_cap_info", handle)
        limit = _figure(cap, "power_cap", 1_000_000 * _WATTS_BELOW) or 0  # 0: another field could be read, this not
        told = {
            "name": name,
            "total": total,
            "free": None if total is None or used is None else max(0, total - used),
            "used": used,
            "processes": processes,
            "utilization_percent": _figure(activity, "gfx_activity"),
            "temperature_c": celsius,
            "power_mw": None if watts is None else 1000 * watts,
            "power_limit_mw": (1000 * limit if limit < _WATTS_BELOW else limit // 1000) or None,
        }
        if told["free"] is None:
            why["free"] = why.get("total") or why.get("used") or _NOT_TOLD
        for field in TOLD:
            if told[field] is None:
                why.setdefault(field, _NOT_TOLD)
        return [uuid, *map(told.__getitem__, TOLD), why, began_ns, ended_ns]

    def _processes(self, why: dict[str, str], handle: Any, kfd: int | None) -> list[Fields] | None:
        """Every process that uses the device by ROCm. amdsmi's bytes of a process are not used: several versions
        of its fdinfo.cc add up the file descriptors of a process, some of which are one client's, and some take 1000
        bytes for a KiB. The kernel's own count (kfd_process.c, `vram_usage`) is exact."""
        listed = self._ask(why, "processes", "amdsmi_get_gpu_process_list", handle)
        if listed is None:
            return None
        pids = sorted({int(process["pid"]) for process in listed})
        found: list[Fields] = [[pid, self._held(pid, kfd), process_name(pid)] for pid in pids]
        if any(held is None for _, held, _ in found):
            why["processes.bytes"] = "the kernel does not report the memory of each process"
        return found

    def _held(self, pid: int, kfd: int | None) -> int | None:
        try:
            with open(f"{self._kfd_processes}/{pid}/vram_{kfd}") as file:  # noqa: PTH123
                return int(file.read())
        except (OSError, ValueError):  # ended, hidden by a container, or `kfd` is not known
            return None


def torch_uuid(unique_id: int) -> str:
    """As the agent sends it: HIP has the 16 hexadecimal digits of the kernel's unique_id as the 16 bytes of its UUID
    (ROCR's HSA_AMD_AGENT_INFO_UUID without "GPU-"), and torch writes each byte of a UUID as two digits."""
    text = f"{unique_id:016x}".encode().hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _unique_id(text: str | None) -> int | None:
    """From "GPU-f330dc4d00dee22b", "0xF330DC4D00DEE22B"; None from "N/A" and from what stands for none."""
    try:
        number = int((text or "").removeprefix("GPU-"), 16)
    except ValueError:
        return None
    return None if number in _NO_UNIQUE_ID else number


def _figure(answer: dict[str, Any] | None, key: str, limit: int = _FIGURES_BELOW) -> int | None:
    return _below(limit, answer[key] if answer else None)


def _below(limit: int, value: Any) -> int | None:
    """None for "N/A", which amdsmi says, and for what a library newer than it has in place of a figure."""
    return value if isinstance(value, int) and -limit < value < limit else None


def _sentence(error: Any, known: dict[int, str]) -> str:
    """amdsmi's AmdSmiException; those of the library have a number and end in "AMDSMI_STATUS_IO - I/O Error"."""
    code = getattr(error, "err_code", None)
    return known.get(code or 0) or f"the AMD driver answers: {str(error).split(' - ')[-1]}"
