"""Commands that do not outlive the process that starts them.

`dies_with_parent` makes the kernel kill one process when its parent ends. Its children survive that, e.g. torchrun's
ranks. So `under_subreaper` runs the command under this file, started as a script. The subreaper adopts orphaned
descendants (PR_SET_CHILD_SUBREAPER), gets a signal when its parent ends, also by `kill -9` (PR_SET_PDEATHSIG), and then
kills all descendants. It forwards SIGINT and ends with the command's status or signal. Imports only the standard
library: with -I -S the script starts in a few milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)
PARENT_ENDED = signal.SIGHUP  # no other source: a new session has no terminal
HEARD = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, PARENT_ENDED)
KILLING_S = 10.0
HELPERS_S = 10.0
"""For helpers after the command's end. They end by themselves once every viewer has the last message."""

HELPER = b"gpumon_agent.transport"  # in the command line of an agent's helper (transport/trainer.py)
"""A process stuck in the kernel (a hung disk) may die later."""

_TIE = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"Error: {sys.argv[2]} could not be started: {error.strerror}.")
"""


def dies_with_parent(argv: Sequence[str]) -> list[str]:
    """`argv`, changed so that the kernel kills it when the thread that starts it ends, also by `kill -9`.

    Works for stopped processes too, but not for children. Linux only; elsewhere `argv` unchanged. PR_SET_PDEATHSIG (1,
    prctl(2)) survives exec.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *argv]


def under_subreaper(argv: Sequence[str]) -> list[str]:
    """`argv` under a process that ends with its status and kills all its descendants.

    Linux only; elsewhere `argv` unchanged.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def main(parent: int, argv: list[str]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, PARENT_ENDED)
    if os.getppid() != parent:  # the parent ended before PDEATHSIG was set
        sys.exit(1)
    child = os.fork()
    if child == 0:
        become(argv)
    status = None
    while status is None:
        number = signal.sigwait(HEARD)
        if number == signal.SIGCHLD:
            status = reap(child)
        elif number == signal.SIGINT:
            os.kill(child, signal.SIGINT)
        elif number == PARENT_ENDED:
            end_all()
            sys.exit(1)
        # SIGTERM goes to the whole process group, so the command has it already; wait for its end
    end_all(helpers_s=HELPERS_S)
    leave(status)


def become(argv: list[str]) -> NoReturn:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"Error: {ascii(argv[0])[1:-1]} could not be started: {error.strerror}.", file=sys.stderr, flush=True)
        os._exit(1)


def reap(child: int) -> int | None:
    """Reaps ended processes; the wait status of `child` if it ended."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == child:
            found = status


def end_all(helpers_s: float = 0.0) -> None:
    """Kills every descendant. Processes orphaned meanwhile become our children, for the next pass.

    Helpers of agents get `helpers_s` seconds to send what they still have: how the run ended is the last of it.
    """
    began = time.monotonic()
    while (below := descendants()) and time.monotonic() < began + helpers_s + KILLING_S:
        for pid in below:
            if time.monotonic() < began + helpers_s and is_helper(pid):
                continue
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap(0)
        time.sleep(0.01)


def is_helper(pid: int) -> bool:
    try:
        return HELPER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def descendants() -> list[int]:
    """Pids of descendants that have not ended."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state, parent, *_ = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except (OSError, ValueError):
                continue
            if state not in "ZX":
                parents[int(entry.name)] = int(parent)
    found = {os.getpid()}
    while below := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= below
    return sorted(found - {os.getpid()})


def leave(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has dumped its core, if any
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
