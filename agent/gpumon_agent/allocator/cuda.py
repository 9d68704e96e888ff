"""CUDA, and ROCm by the same API: boundaries with shadow peaks, names and UUIDs of devices, out-of-memory observer."""

from __future__ import annotations

from collections.abc import Callable

from gpumon_agent.allocator import Read, Reading
from gpumon_agent.allocator.peaks import Peaks
from gpumon_agent.guard import pass_on
from gpumon_agent.wire import Device

Oom = Callable[[int, int, int, int], None]
"""device, requested bytes, the device's total and free bytes"""


def uuid_of_driver(index: int) -> str | None:
    """The UUID from the loaded driver, for torch 2.4, which does not report it. Does not touch the device."""
    import ctypes
    from uuid import UUID

    try:
        driver = ctypes.CDLL("libcuda.so.1")
        ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid  # v2 tells MIG instances apart
    except (OSError, AttributeError) as error:
        pass_on(error)
        return None
    device, found = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if driver.cuDeviceGet(ctypes.byref(device), index) or ask(ctypes.byref(found), device):
        return None
    return str(UUID(bytes=bytes(found)))


def pinned_bytes() -> int | None:
    """Bytes of pinned host memory held by torch's allocator, in use or cached, rounded up to powers of two by torch.

    None if this torch does not report it, and before CUDA is initialized. Cost: 8 µs, 15 µs with 2,000 blocks.
    """
    import torch

    ask = getattr(torch._C, "_cuda_hostMemoryStats", None)
    if ask is None or not torch.cuda.is_initialized():
        return None
    stats = ask()
    had = stats.get("reserved_bytes") or stats.get("allocated_bytes")  # older torch: only the latter, without its cache
    return None if had is None else int(had["current"])


class CudaProbe:
    def __init__(self, peaks: Peaks, oom: Oom) -> None:
        import torch

        self._torch = torch
        self.kind = "hip" if torch.version.hip else "cuda"
        self.boundary: Callable[[int], Read] = peaks.boundary
        self.silent = False  # the allocator has no statistics
        self._peaks = peaks
        self._oom: Oom | None = oom
        self._observing = False

    def devices(self) -> tuple[Device, ...]:
        cuda = self._torch.cuda
        if not cuda.is_initialized():
            return ()
        found = []
        for index in range(cuda.device_count()):
            properties = cuda.get_device_properties(index)
            uuid = getattr(properties, "uuid", None)  # since torch 2.5
            text = uuid_of_driver(index) if uuid is None else str(uuid)
            if text is not None and not text.startswith(("GPU-", "MIG-")):
                text = f"GPU-{text}"
            found.append(Device(index, text, properties.name, properties.total_memory, self.kind))
        return tuple(found)

    def fall_silent(self) -> None:
        self.silent = True
        self.boundary = lambda device: Reading()
        self._peaks.stop()

    @property
    def native(self) -> bool:
        return self._peaks.native and not self.silent

    @property
    def peaks(self) -> Peaks | None:
        """None: the allocator has no statistics."""
        return None if self.silent else self._peaks

    def now(self, device: int) -> tuple[int, int]:
        """(allocated, reserved), without closing a window."""
        stats = self._peaks.read(device)
        return stats["allocated_bytes"]["all"]["current"], stats["reserved_bytes"]["all"]["current"]

    def end(self, device: int) -> tuple[int, int] | None:
        """(allocated, live blocks), without closing a window."""
        return None if self.silent else self._peaks.end(device)

    def window(self, device: int) -> tuple[int, int] | None:
        """(highest allocated since the last boundary, reserved), without closing the window."""
        return None if self.silent else self._peaks.window(device)

    def observe_oom(self, *, began: bool = False) -> None:
        """Attaches an observer that runs before OutOfMemoryError is raised. Call it after CUDA is initialized.

        `began`: it is, although `is_initialized()` is still False while callbacks of the initialization run.

        torch cannot detach an observer: after `stop()` ours stays and does nothing.
        """
        attach = getattr(self._torch._C, "_cuda_attach_out_of_memory_observer", None)
        if attach is None or self._observing or not (began or self._torch.cuda.is_initialized()):
            return
        self._observing = True

        def observer(device: int, requested: int, total: int, free: int) -> None:
            oom = self._oom
            if oom is not None:
                oom(device, requested, total, free)

        try:
            attach(observer)
        except RuntimeError as error:
            pass_on(error)
            return  # cudaMallocAsync has no observers: then only the exception's message is known

    def stop(self) -> None:
        self._oom = None
        self._peaks.stop()
