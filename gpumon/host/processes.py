"""Watched processes and the machine's memory as the operating system sees them (psutil)."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field

import psutil

from gpumon_agent import wire

CHILDREN_EVERY_S = 4.0
"""Finding children means reading every process of the machine: it is done this often, their memory each time."""


@dataclass
class _Watched:
    process: psutil.Process
    children: list[psutil.Process] = field(default_factory=list)
    children_due: float = 0.0
    asked_cpu: bool = False  # psutil's first answer is a meaningless 0.0


class Processes:
    """Keeps a psutil.Process for each watched pid, since CPU shares are differences between two readings."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}

    def read(self, pids: Collection[int]) -> tuple[wire.ProcessReading, ...]:
        """One reading a pid, in order; a process that is gone, or is not ours to see, has None everywhere."""
        for gone in self._watched.keys() - set(pids):
            del self._watched[gone]
        return tuple(self._read(pid) for pid in sorted(pids))

    def _read(self, pid: int) -> wire.ProcessReading:
        try:
            watched = self._watched.get(pid)
            if watched is None or not watched.process.is_running():
                watched = self._watched[pid] = _Watched(psutil.Process(pid))
            process = watched.process
            with process.oneshot():
                rss = process.memory_info().rss
                threads = process.num_threads()
                cpu: float | None = process.cpu_percent()
            if not watched.asked_cpu:
                watched.asked_cpu, cpu = True, None
            if time.monotonic() >= watched.children_due:
                watched.children = process.children(recursive=True)
                watched.children_due = time.monotonic() + CHILDREN_EVERY_S
        except psutil.Error:
            self._watched.pop(pid, None)
            return wire.ProcessReading(pid)
        children = tuple(c for c in map(_child, watched.children) if c is not None)
        return wire.ProcessReading(pid, rss, cpu, threads, children)


def _child(process: psutil.Process) -> wire.ChildProcess | None:
    try:
        with process.oneshot():
            return wire.ChildProcess(process.pid, process.name(), process.memory_info().rss)
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return wire.ChildProcess(process.pid, "?")


def machine_memory() -> tuple[int, int]:
    """(total, available) bytes of the machine."""
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)
