"""Commands that do not outlive the process that starts them.

`dies_with_parent` lets the kernel kill one process when its parent ends. That does not reach its children: torchrun's
ranks would live on. So `under_subreaper` runs the command under this file, started as a script. The subreaper adopts
orphaned descendants (PR_SET_CHILD_SUBREAPER). It gets a signal when its parent ends, `kill -9` included
(PR_SET_PDEATHSIG), and then kills every descendant. It passes SIGINT on, and ends with the command's status or signal.
Imports only the standard library: the script starts with -I -S, in a few milliseconds.
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
PARENT_ENDED = signal.SIGHUP  # nobody else sends it: no terminal stands behind a session of its own
HEARD = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, PARENT_ENDED)
KILLING_S = 10.0
"""A process in the kernel's hands (a hung disk) dies later than one waits."""

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
    """`argv` such that the kernel kills it when the thread that starts it ends, `kill -9` included.

    Also where it is stopped, when nothing that it would have to do itself helps. It reaches this one process, not its
    children. On Linux; elsewhere `argv` as it is. PR_SET_PDEATHSIG (1, prctl(2)) outlives exec.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *argv]


def under_subreaper(argv: Sequence[str]) -> list[str]:
    """`argv` under a process that ends with its status and leaves nothing of what it started.

    On Linux; elsewhere `argv` as it is.
    """
    if sys.platform != "linux":
        return list(argv)
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *argv]


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def main(parent: int, argv: list[str]) -> NoReturn:
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, PARENT_ENDED)
    if os.getppid() != parent:  # it had ended before it could be told
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
        # SIGTERM is sent to the whole process group: the command has it already, and its end is waited for
    end_all()
    leave(status)


def become(argv: list[str]) -> NoReturn:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"Error: {ascii(argv[0])[1:-1]} could not be started: {error.strerror}.", file=sys.stderr, flush=True)
        os._exit(1)


def reap(child: int) -> int | None:
    """Buries who has ended; the wait status of `child` if it was among them."""
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


def end_all() -> None:
    """Kills every descendant. Who is orphaned meanwhile becomes our own child, and is found at the next look."""
    until = time.monotonic() + KILLING_S
    while (below := descendants()) and time.monotonic() < until:
        for pid in below:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        reap(0)
        time.sleep(0.01)


def descendants() -> list[int]:
    """Pids below this process that have not ended."""
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
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has left its core, if any
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
