"""Runs a command on a terminal of its own, and returns what came to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from typing import Any


def in_pty(
    command: list[str], environment: dict[str, str], *, until: str = "", times: int = 1, **pipes: Any
) -> tuple[int, str, str]:
    """Exit code, what came through a pipe for stdout, and what came to the terminal.

    Ends by itself, or by ctrl-c once `until` came `times` times.
    """
    master, slave = os.openpty()
    process = subprocess.Popen(
        command, env=environment, stderr=slave, start_new_session=True, **{"stdin": slave, "stdout": slave, **pipes}
    )
    os.close(slave)
    raw, deadline = b"", time.monotonic() + 300
    while True:
        assert time.monotonic() < deadline, raw
        ended = process.poll() is not None
        ready = bool(select.select([master], [], [], 0.1)[0])
        if ready:
            try:
                raw += os.read(master, 65536)
            except OSError:  # the last process on the terminal has ended
                break
        elif ended:
            break
        if until and raw.count(until.encode()) >= times:
            process.send_signal(signal.SIGINT)
            until = ""
    out = process.stdout.read().decode() if process.stdout is not None else ""
    if process.stdout is not None:
        process.stdout.close()
    os.close(master)
    return process.wait(60), out, raw.decode(errors="replace")
