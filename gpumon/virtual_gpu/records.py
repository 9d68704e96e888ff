"""A session's device records and missed ranks, from its table, even after all its processes have ended."""

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
    """The maximum that all processes held together, contexts included."""
    contexts: int
    """Contexts at that moment."""
    refusals: int
    """Failed allocations. PyTorch then frees its cache and retries, so not each is an error."""
    refused_bytes: int
    """Size of the newest, in 2 MiB pages."""


@dataclass(frozen=True)
class Absence:
    """The first rank that others waited for in vain, in an NCCL collective."""

    rank: int
    ended: bool
    """It had ended, or left the communicator; else it was late."""
    seconds: int
    """The waiting time, if it had not ended."""


def absence(session: str, python: str = sys.executable) -> Absence | None:
    """None if no rank was missed. Raises ValueError or Unavailable."""
    if not session_file(session).exists():
        return None
    library = ctypes.CDLL(str(build(python) / "libnvidia-ml.so.1"))
    figures = (ctypes.c_int * 3)()
    if not library.vgpu_read_absence(session.encode(), figures):
        return None
    return Absence(figures[0], bool(figures[1]), figures[2])


def records(session: str, python: str = sys.executable) -> tuple[Record, ...]:
    """One per device, in NVML's order; empty if no process has opened the session. Raises ValueError or Unavailable."""
    if not session_file(session).exists():
        return ()
    library = ctypes.CDLL(str(build(python) / "libnvidia-ml.so.1"))
    figures = (ctypes.c_uint64 * 5)()
    found: list[Record] = []
    while library.vgpu_read_record(session.encode(), len(found), figures):
        found.append(Record(*figures))
    return tuple(found)
