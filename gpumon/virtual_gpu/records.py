"""What a session's devices gave at most, and which rank was missed: read from its table, also when all have ended."""

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


@dataclass(frozen=True)
class Absence:
    """The first rank for which others waited in vain, in a collective over NCCL."""

    rank: int
    ended: bool
    """It had ended, or left the communicator; else it did not come in time."""
    seconds: int
    """So long was it waited for, where it had not ended."""


def absence(session: str, python: str = sys.executable) -> Absence | None:
    """None where every rank came that was waited for. Raises ValueError or Unavailable."""
    if not session_file(session).exists():
        return None
    library = ctypes.CDLL(str(build(python) / "libnvidia-ml.so.1"))
    figures = (ctypes.c_int * 3)()
    if not library.vgpu_read_absence(session.encode(), figures):
        return None
    return Absence(figures[0], bool(figures[1]), figures[2])


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
