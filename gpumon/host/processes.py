"""Watched processes and the machine's memory, by psutil."""

from __future__ import annotations

import time
from collections.abc import Collection

import msgspec
import psutil

from gpumon_agent import wire
from gpumon_agent.wire.masking import masked

CHILDREN_EVERY_S = 4.0
"""Interval for finding children, which reads every process of the machine. Their memory is read each time."""


class _Watched(msgspec.Struct):
    process: psutil.Process
    children: list[psutil.Process] | None = None  # not searched yet
    asked_cpu: bool = False  # psutil's first answer is a meaningless 0.0


class Processes:
    """Keeps a psutil.Process per watched pid: CPU shares are differences between two readings."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._children_due = 0.0

    def read(self, pids: Collection[int]) -> tuple[wire.ProcessReading, ...]:
        """One reading per pid, in order; all fields None if the process is gone or not accessible."""
        for gone in self._watched.keys() - set(pids):
            del self._watched[gone]
        known = {pid: reading for pid in sorted(set(pids)) if (reading := self._own(pid)) is not None}
        now = time.monotonic()
        if now >= self._children_due or any(self._watched[pid].children is None for pid in known):
            self._children_due = now + CHILDREN_EVERY_S
            self._find_children()
        return tuple(self._whole(pid, known.get(pid)) for pid in sorted(set(pids)))

    def _own(self, pid: int) -> wire.ProcessReading | None:
        """The reading without children."""
        try:
            watched = self._watched.get(pid)
            if watched is None or not watched.process.is_running():
                watched = self._watched[pid] = _Watched(psutil.Process(pid))
            process = watched.process
            with process.oneshot():
                rss = process.memory_info().rss
                threads = process.num_threads()
                cpu: float | None = process.cpu_percent()
        except psutil.Error:
            self._watched.pop(pid, None)
            return None
        if not watched.asked_cpu:
            watched.asked_cpu, cpu = True, None
        return wire.ProcessReading(pid, rss, cpu, threads)

    def _find_children(self) -> None:
        """For all watched processes in one pass: a job has many."""
        by_parent: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter():
            try:
                by_parent.setdefault(process.ppid(), []).append(process)
            except psutil.Error:
                continue
        for pid, watched in self._watched.items():
            found = {pid: watched.process}
            todo = [pid]
            while todo:
                fresh = [child for child in by_parent.get(todo.pop(), ()) if child.pid not in found]
                found.update((child.pid, child) for child in fresh)
                todo += [child.pid for child in fresh]
            del found[pid]
            watched.children = list(found.values())

    def _whole(self, pid: int, own: wire.ProcessReading | None) -> wire.ProcessReading:
        if own is None:
            return wire.ProcessReading(pid)
        found = self._watched[pid].children or ()
        children = tuple(c for c in map(_child, found) if c is not None)
        return wire.ProcessReading(pid, own.rss, own.cpu_percent, own.threads, children)


def _child(process: psutil.Process) -> wire.ChildProcess | None:
    try:
        with process.oneshot():
            name = " ".join(masked(process.name().split(" ")))  # a title set by the process may be its command line
            return wire.ChildProcess(process.pid, name, process.memory_info().rss)
    except psutil.NoSuchProcess:
        return None
    except psutil.AccessDenied:
        return wire.ChildProcess(process.pid, "?")


def machine_memory() -> tuple[int, int]:
    """(total, available) bytes of the machine."""
    memory = psutil.virtual_memory()
    return int(memory.total), int(memory.available)
