"""What the devices of a session gave at most: kept in its table, so it can be read when every process has ended."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass

from gpumon.virtual_gpu.building import build
from gpumon.virtual_gpu.launch import session_file


@dataclass(frozen=True)
class Record:
    """One device since its session began. Bytes."""

    capacity: int
    used: int
    """The most that all processes together held at one moment, contexts included."""
    contexts: int
    """Of which contexts, at that moment."""
    refusals: int
    """Allocations it could not give. PyTorch then frees what it has cached and asks again, so not each is an error."""
    refused_bytes: int
    """The newest of them, in whole 2 MiB pages."""


def records(session: str, python: str = sys.executable) -> tuple[Record, ...]:
    """One a device, in NVML's order; none where no process has opened the session. Raises ValueError or Unavailable."""
    if not session_file(session).exists():
        return ()
    library = ctypes.CDLL(str(build(python) / "libnvidia-ml.so.1"))
    figures = (ctypes.c_uint64 * 5)()
    found: list[Record] = []
    while library.vgpu_read_record(session.encode(), len(found), figures):
        found.append(Record(*figures))
    return tuple(found)
