"""The helper as a process: what it does first, and how it detects that the trainer has ended.

`prepare` is the first call in `helper.main`, after its imports: until then the helper runs on the trainer's CPUs and
may hold its descriptors.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
from collections.abc import Callable
from pathlib import Path

DESCRIPTOR = 3
"""The memory's, the helper's only one beside its standard streams, which are /dev/null."""

NAME = "gpumon"
"""What `ps` and `top` call the helper. Its command line names the interpreter."""

NICE = 19
_RAISED = (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_AS)


def prepare() -> list[str]:
    """Detaches the helper from what it inherited from the trainer. Returns what the system refused, a line each.

    Working directory `/`, umask 077, no descriptor above DESCRIPTOR (before glibc 2.34 `spawn` cannot close them), all
    CPUs of its cpuset, no core dumps. The soft limits of descriptors, CPU seconds and address space become the hard
    ones; the hard ones stay. Its own CPU seconds count, not the trainer's.
    """
    os.chdir("/")
    os.umask(0o077)
    for descriptor in [int(each.name) for each in Path("/proc/self/fd").iterdir()]:
        if descriptor > DESCRIPTOR:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(descriptor)
    Path("/proc/self/comm").write_text(NAME)
    for limit in _RAISED:
        hard = resource.getrlimit(limit)[1]
        resource.setrlimit(limit, (hard, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    return _refused(("all CPUs", lambda: os.sched_setaffinity(0, range(_cpus()))))


def _cpus() -> int:
    """More than the highest number of a CPU: the system ignores those that are not in the cpuset.

    A container may be told of fewer CPUs than the numbers of its own suggest.
    """
    return max(os.sysconf("SC_NPROCESSORS_CONF"), *os.sched_getaffinity(0)) + 1


def lower_priority() -> list[str]:
    """Sets nice 19, once the helper has started. Returns what the system refused, a line each.

    If the kernel groups processes by session, sets its group too (sched(7), "The autogroup feature"): between groups
    a process's own nice value has no effect. Not SCHED_IDLE, which is lower: with two busy processes a core, a helper
    that sleeps 50 ms woke up 1.9 s late one time in ten, and it must end within 2 s of the trainer; at nice 19 it was
    0.28 s, at most 0.53 s. Started at nice 19 it would need 10 to 20 s to import ZeroMQ there, not 0.4 s.
    """
    own = ("nice 19", lambda: os.setpriority(os.PRIO_PROCESS, 0, NICE))
    return _refused(own, ("nice 19 of its autogroup", _lower_autogroup))


def _lower_autogroup() -> None:
    if os.getsid(0) == os.getpid():  # else others share it
        with contextlib.suppress(FileNotFoundError):  # a kernel without it
            Path("/proc/self/autogroup").write_text(str(NICE))


def _refused(*steps: tuple[str, Callable[[], object]]) -> list[str]:
    refused = []
    for what, do in steps:
        try:
            do()
        except OSError as error:
            refused.append(f"{what}: {error.strerror}")
    return refused


class Trainer:
    """The training process `pid`, as its helper sees it.

    `start_time` and `program` are from `endpoint`, read in the trainer: they detect a reused pid and an exec.
    """

    def __init__(self, pid: int, start_time: int, program: str = "") -> None:
        from gpumon_agent import endpoint

        self._endpoint = endpoint
        self._pid = pid
        self._start_time = start_time
        self._program = program
        self._descriptor: int | None = None
        self._poll = select.poll()
        if hasattr(os, "pidfd_open"):  # Python was built on Linux 5.3 or newer
            with contextlib.suppress(OSError):  # an older kernel, or no such process
                self._descriptor = os.pidfd_open(pid)
                self._poll.register(self._descriptor, select.POLLIN)
        self._has_ended = endpoint.start_time(pid) != start_time

    def fileno(self) -> int | None:
        """Readable once the trainer has ended, but not by exec. None if Linux (< 5.3) or Python has no pidfd."""
        return self._descriptor

    def ended(self, *, wrote: bool = False) -> bool:
        """Whether the trainer has ended, or runs another program now.

        `wrote`: it has written since the last call. Then /proc is not read, which costs as much as reading the events:
        an exec, and without a pidfd any end, is noticed once it stops writing.
        """
        if self._descriptor is not None and self._poll.poll(0):
            self._has_ended = True
        elif not wrote:
            self._has_ended = self._has_ended or self._is_gone() or self.runs_another()
        return self._has_ended

    def _is_gone(self) -> bool:
        return self._descriptor is None and self._endpoint.start_time(self._pid) != self._start_time

    def runs_another(self) -> bool:
        """After an exec: the process is alive, the training is not."""
        return self._program != "" and self._endpoint.program(self._pid) not in ("", self._program)
