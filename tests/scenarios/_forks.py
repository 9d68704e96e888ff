"""Runs scripts as processes of their own that share one import of torch: reads a job a line, forks, answers a line.

A job is {"argv": [script, argument, ...], "env": {name: value}, "ranks": n, "timeout": seconds, "out": folder}. Each
rank's output goes to OUT/<rank>.out and OUT/<rank>.err; several ranks get torchrun's variables. The answer is
{"codes": [exit code, negative if a signal ended it], "seconds": wall time, "rss": [peak bytes of each rank]}.

What is forked has torch imported and nothing of CUDA begun, so each process gets its own context, as if started alone.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

# imported once for every fork; an optimizer's first step would otherwise import the second each time
import torch
import torch._dynamo


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def become(job: dict[str, Any], rank: int, port: int) -> None:
    """Turn this forked process into the job's rank; returns when the script has ended."""
    signal.alarm(job["timeout"])
    out = Path(job["out"])
    for number, name in ((0, os.devnull), (1, out / f"{rank}.out"), (2, out / f"{rank}.err")):
        descriptor = os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(job["env"])
    if job["ranks"] > 1:
        world = str(job["ranks"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    sys.argv = job["argv"]
    sys.path[0] = str(Path(job["argv"][0]).parent)
    runpy.run_path(job["argv"][0], run_name="__main__")


def serve() -> None:
    assert not torch.cuda.is_initialized(), "a fork of this process could not use CUDA"
    for line in sys.stdin:
        job = json.loads(line)
        port = free_port() if job["ranks"] > 1 else 0
        started = time.monotonic()
        pids = []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if pid == 0:
                become(job, rank, port)
                return
            pids.append(pid)
        ends = {pid: os.wait4(pid, 0) for pid in pids}
        answer = {
            "codes": [os.waitstatus_to_exitcode(ends[pid][1]) for pid in pids],
            "seconds": round(time.monotonic() - started, 3),
            "rss": [ends[pid][2].ru_maxrss * 1024 for pid in pids],
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
