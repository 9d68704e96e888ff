"""Python processes forked from one that has torch imported: each is spared the two seconds that the import takes.

A script that returns, or exits with a number, ends as Python does: threads are joined, atexit's functions called. It
leaves out the two more seconds in which Python takes torch's modules apart; `whole` is for a test of those.

Run as a script this is that process: it reads a job a line, forks, and answers a line. A job is {"argv": [script,
argument, ...], "env": {name: value}, "ranks": n, "timeout": seconds, "whole": bool, "out": folder}. Each rank's output
goes to OUT/<rank>.out and OUT/<rank>.err; several ranks get torchrun's variables. The answer is {"codes": [exit code,
negative if a signal ended it], "seconds": wall time, "rss": [peak bytes of each rank]}.

What is forked has torch imported and nothing of CUDA begun, so each process gets its own context, as if started alone.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

READ_AT_START = ("PYTHON", "LD_", "TORCH", "PYTORCH", "OMP_", "MKL_", "OPENBLAS_", "KMP_")
"""Variables that Python, the loader or torch read before a script begins: with others than the server's, no fork."""

_FLUSH = ctypes.CDLL(None).fflush
"""What C and C++ have written."""


@dataclass(frozen=True)
class Forked:
    """How the processes of one job ended, by rank."""

    codes: tuple[int, ...]
    seconds: float
    rss: tuple[int, ...]
    out: tuple[str, ...]
    err: tuple[str, ...]


class Forks:
    """The client's side; the server starts with the first job, in that job's environment."""

    def __init__(self, python: str) -> None:
        self.python = python
        self._server: subprocess.Popen[str] | None = None
        self._began_with: dict[str, str] = {}
        self._one_at_a_time = threading.Lock()

    def can(self, env: Mapping[str, str]) -> bool:
        """Whether a fork in this environment is what a process started in it would be."""
        if self._server is None:
            return True
        names = {name for name in env.keys() | self._began_with.keys() if name.startswith(READ_AT_START)}
        return all(env.get(name) == self._began_with.get(name) for name in names)

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        out: Path,
        *,
        ranks: int = 1,
        timeout: float = 120,
        whole: bool = False,
    ) -> Forked:
        """Run a script to its end, once a rank; a process that takes longer than `timeout` is ended by SIGALRM."""
        job = {
            "argv": list(argv), "env": dict(env), "ranks": ranks, "timeout": timeout, "whole": whole, "out": str(out),
        }  # fmt: skip
        with self._one_at_a_time:
            return self._run(job, env, out, ranks)

    def _run(self, job: dict[str, Any], env: Mapping[str, str], out: Path, ranks: int) -> Forked:
        if not self.can(env):  # another environment needs a server of its own
            self.close()
            self._server = None
        if self._server is None:
            self._began_with = dict(env)
            self._server = subprocess.Popen(
                [self.python, __file__], env=self._began_with, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        try:
            assert self._server.stdin is not None
            assert self._server.stdout is not None
            print(json.dumps(job), file=self._server.stdin, flush=True)
            answer = json.loads(self._server.stdout.readline())
        except BaseException:  # the next job must not read this one's answer
            self._server.kill()
            self._server.communicate()
            self._server = None
            raise
        told = [[(out / f"{rank}.{kind}").read_text() for rank in range(ranks)] for kind in ("out", "err")]
        return Forked(tuple(answer["codes"]), answer["seconds"], tuple(answer["rss"]), tuple(told[0]), tuple(told[1]))

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _become(job: dict[str, Any], rank: int, port: int) -> None:
    """Turn this forked process into the job's rank; returns, or raises, where the interpreter itself is to end."""
    signal.setitimer(signal.ITIMER_REAL, job["timeout"])
    out = Path(job["out"])
    for number, name in ((0, os.devnull), (1, out / f"{rank}.out"), (2, out / f"{rank}.err")):
        descriptor = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(job["env"])
    if job["ranks"] > 1:
        world = str(job["ranks"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    sys.argv = job["argv"]
    sys.path[0] = str(Path(job["argv"][0]).parent)
    code = 0
    try:
        runpy.run_path(job["argv"][0], run_name="__main__")
    except SystemExit as error:
        if job["whole"] or not isinstance(error.code, int | None):
            raise
        code = (error.code or 0) & 0xFF
    if job["whole"]:
        return
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    _FLUSH(None)
    os._exit(code)


def _serve() -> None:
    # imported once for every fork; an optimizer's first step would otherwise import the second each time
    import torch
    import torch._dynamo

    assert not torch.cuda.is_initialized(), "a fork of this process could not use CUDA"
    for line in sys.stdin:
        job = json.loads(line)
        port = _free_port() if job["ranks"] > 1 else 0
        started = time.monotonic()
        pids = []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                _become(job, rank, port)
                return
            pids.append(pid)
        ends = {pid: os.wait4(pid, 0) for pid in pids}
        answer = {
            "codes": [os.waitstatus_to_exitcode(ends[pid][1]) for pid in pids],
            "seconds": round(time.monotonic() - started, 3),
            "rss": [ends[pid][2].ru_maxrss * 1024 for pid in pids],
        }
        print(json.dumps(answer), flush=True)
    os._exit(0)  # who closes it waits for it


if __name__ == "__main__":
    _serve()
