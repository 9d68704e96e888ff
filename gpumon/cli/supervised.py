"""Runs a command as a child, with a second process beside it that has something to say after its end.

The child ends, and is ended, as if it were this process: it gets the signals that are sent here, it dies with it, and
its exit code or signal becomes this process's own. What a terminal sends goes to the child directly: it is in the same
process group.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from gpumon.cli.printing import say
from gpumon.cli.subreaper import PR_SET_PDEATHSIG, leave, prctl

PASSED_ON = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM,
)  # fmt: skip
SLICE_S = 0.1
_WAITED_FOR = (signal.SIGCHLD, *PASSED_ON)


def supervise(become: Callable[[], NoReturn], beside: Callable[[int], Sequence[str]], patience_s: float) -> NoReturn:
    """`become`: what the child does. `beside`: the other process's command, given the child's pid.

    Each line of its stdout is said on stderr, once the child has ended; it has `patience_s` for that.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before that
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        become()
    other = subprocess.Popen(
        beside(child),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C is for the training
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    )
    status = _wait(child)
    _hear(other, patience_s)
    leave(status)


def _wait(child: int) -> int:
    """Until the child ends; the wait status."""
    while True:
        heard = signal.sigwaitinfo(_WAITED_FOR)
        if heard.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return status
        elif heard.si_code <= 0:  # sent by a process; the terminal's own have reached the child already
            os.kill(child, heard.si_signo)


def _hear(other: subprocess.Popen[bytes], patience_s: float) -> None:
    """Says what the other process says, until it ends, the time is over, or a signal comes."""
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.close()
    end = time.monotonic() + patience_s
    heard = b""
    while time.monotonic() < end and not signal.sigpending() & set(PASSED_ON):
        if not select.select([other.stdout], [], [], SLICE_S)[0]:
            continue
        piece = os.read(other.stdout.fileno(), 1 << 16)
        *lines, heard = (heard + piece).split(b"\n")
        for line in lines:
            say(line.decode(errors="replace"), err=True)
        if not piece:
            break
    other.kill()
    other.wait()
