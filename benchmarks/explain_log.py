"""`gpumon explain --log` on logs of 200 MB: seconds and the largest resident memory, kind by kind.

    python benchmarks/explain_log.py [MEGABYTES]

Goal: at most 10 s and 300 MB each. The logs are synthetic and are removed again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat
from pathlib import Path

MESSAGE = (
    b"Traceback (most recent call last):\n"
    b'  File "/home/me/train.py", line 58, in step\n    loss.backward()\n'
    b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.49 GiB "
    b"of which 900.00 MiB is free. "
    b"Of the allocated memory 36.90 GiB is allocated by PyTorch, and 1.48 GiB is reserved by "
    b"PyTorch but unallocated.\n"
)
LINE = b"[2026-01-01 00:00:00,000][train][INFO] - step %9d: loss 0.12345, 3.03 it/s, memory 35.1 GiB of 39.5\n"
BAR = "\rEpoch 3:  12%|█▏        | 120/1000 [00:40<04:50,  3.03it/s]".encode()
WORDS = b"Killed SIGKILL exitcode : -1 DataLoader worker (pid 1) exited INTERNAL_ERROR shared memory x\n"


def lines(size: int) -> Iterator[bytes]:
    each = len(LINE % 0)
    yield from (LINE % at for at in range(size // each))


KINDS: dict[str, Callable[[int], Iterable[bytes]]] = {
    "message at the start": lambda size: chain((MESSAGE,), lines(size)),
    "message at the end": lambda size: chain(lines(size), (MESSAGE,)),
    "no message": lines,
    "a message every 40 kB": lambda size: (b"".join(lines(40_000)) + MESSAGE for _ in range(size // 40_500)),
    "nothing but messages": lambda size: repeat(MESSAGE, size // len(MESSAGE)),
    "nothing but weak signs": lambda size: chain((MESSAGE,), repeat(WORDS, size // len(WORDS))),
    "one line": lambda size: chain(repeat(b"x" * 1_000_000, size // 1_000_000), (MESSAGE,)),
    "one line of a message": lambda size: repeat(MESSAGE.replace(b"\n", b" "), size // len(MESSAGE)),
    "binary": lambda size: (random.Random(at).randbytes(1_000_000) for at in range(size // 1_000_000)),
    "progress bars": lambda size: chain(repeat(BAR, size // len(BAR)), (b"\n", MESSAGE)),
}


def main() -> None:
    size = int(sys.argv[1] if len(sys.argv) > 1 else 200) * 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "train.log")
        for kind, make in KINDS.items():
            with log.open("wb") as file:
                file.writelines(make(size))
            began = time.monotonic()
            command = [sys.executable, "-m", "gpumon", "explain", "--log", log]
            child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            _, status, used = os.wait4(child.pid, 0)
            took = time.monotonic() - began
            cpu_s = used.ru_utime + used.ru_stime
            code = os.waitstatus_to_exitcode(status)
            print(f"{kind:<24} {took:6.1f} s  {cpu_s:6.1f} s CPU  {used.ru_maxrss / 1024:6.0f} MiB  exit code {code}")


if __name__ == "__main__":
    main()
