"""What a viewer that comes and goes does to training's steps, and how soon one that comes late has seen everything.

    python benchmarks/attach.py [--rounds 10] [--window 3] [--after 0]

A training process on the CPU (one thread) notes when each of its steps ended. A round is three windows of equal length:
nobody watches, nobody watches, `gpumon attach` on a pty of 120×40 comes, draws and is quit with `q`. The first two tell
how much steps differ by themselves (A/A), the last two what a viewer changes (A/B); both as medians over the rounds of
the windows' median and 99th percentile. The training keeps another core than the viewer where there are two.

Then, when training is `--after` seconds old, a subscription: how long until the static picture and until the whole
history, and how many steps and seconds back that reaches; and the time to the first figures on a screen.
"""

from __future__ import annotations

import argparse
import array
import asyncio
import fcntl
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles

from startup import DATA, start

from gpumon import link
from gpumon_agent import wire

SCRIPT = """
import sys, time, torch
torch.set_num_threads(1)
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
with open(sys.argv[1], "wb", buffering=0) as times:
    while True:
        model(torch.randn(32, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.write(time.monotonic_ns().to_bytes(8, "little"))
        time.sleep(0.02)
"""


def durations(times: Path, began: int, ended: int) -> list[float]:
    """Milliseconds of the steps that lie between two moments of the monotonic clock."""
    marks = array.array("Q", times.read_bytes())
    inside = [mark for mark in marks if began <= mark <= ended]
    return [(b - a) / 1e6 for a, b in pairwise(inside)]


def watch(command: list[str], seconds: float) -> None:
    """A viewer on a terminal, quit by key after `seconds`."""
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.execv(command[0], command)

    def drain() -> None:
        while True:
            try:
                os.read(fd, 65536)
            except OSError:
                return

    threading.Thread(target=drain, daemon=True).start()
    time.sleep(seconds)
    os.write(fd, b"q")
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    if status:
        raise SystemExit(f"gpumon attach ended with status {status}")


def window(times: Path, work: float, viewer: list[str] | None = None) -> list[float]:
    began = time.monotonic_ns()
    if viewer is None:
        time.sleep(work)
    else:
        watch(viewer, work)
    return durations(times, began, time.monotonic_ns())


def p99(values: list[float]) -> float:
    return quantiles(values, n=100)[98]


def rounds(times: Path, count: int, seconds: float, viewer: list[str]) -> None:
    found = [[window(times, seconds), window(times, seconds), window(times, seconds, viewer)] for _ in range(count)]
    print(f"{f'{count} rounds of {seconds:g} s, a step':<34}{'median':>10}{'p99':>10}")
    for name, at in (("A, nobody watches, ms", 1), ("B, a viewer comes and goes, ms", 2)):
        print(f"{name:<34}{median(median(r[at]) for r in found):>10.2f}{median(p99(r[at]) for r in found):>10.2f}")
    for name, left, right in (("A/A, %", 0, 1), ("A/B, %", 1, 2)):
        changes = [[100 * (of(r[right]) / of(r[left]) - 1) for of in (median, p99)] for r in found]
        print(f"{name:<34}{median(c[0] for c in changes):>+10.2f}{median(c[1] for c in changes):>+10.2f}")


async def late(pid: int) -> None:
    """Prints how long a subscription takes to the picture and to the end of the history."""
    began = time.perf_counter()
    picture = 0.0
    steps: list[wire.Step] = []
    async for received in link.subscribe(link.resolve(str(pid))):
        if isinstance(received.event, wire.Hello) and not picture:
            picture = time.perf_counter() - began
        elif isinstance(received.event, wire.Step) and received.replayed:
            steps.append(received.event)
        elif isinstance(received.event, wire.Synced):
            break
    took = time.perf_counter() - began
    back = (time.monotonic_ns() - steps[0].t_ns) / 1e9
    print(f"static picture after {picture * 1000:.0f} ms, all of the history after {took * 1000:.0f} ms:")
    print(f"{len(steps):,} steps, from {steps[0].step:,} to {steps[-1].step:,}, the last {back:.0f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--window", type=float, default=3.0)
    parser.add_argument("--after", type=float, default=0.0, help="seconds of training before the late viewer comes")
    asked = parser.parse_args()
    gpumon = [sys.executable, "-m", "gpumon"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        script, times = Path(folder) / "train.py", Path(folder) / "times"
        script.write_text(SCRIPT)
        began = time.monotonic()
        train = subprocess.Popen([*gpumon, "run", "--track-cpu", str(script), str(times)])
        try:
            while not times.exists() or times.stat().st_size < 800:
                time.sleep(0.2)
            if hasattr(os, "sched_setaffinity") and len(cores := sorted(os.sched_getaffinity(0))) > 1:
                os.sched_setaffinity(train.pid, cores[:1])
                os.sched_setaffinity(0, cores[1:])  # and every viewer started from here
            attach = [*gpumon, "attach", str(train.pid)]
            rounds(times, asked.rounds, asked.window, attach)
            time.sleep(max(0.0, asked.after - (time.monotonic() - began)))
            age = time.monotonic() - began
            print(f"\na viewer comes {age:.0f} s after training began")
            asyncio.run(late(train.pid))
            shown = start(attach, DATA).screen
            print("no figures came" if shown is None else f"first figures on the screen {shown:.2f} s after `attach`")
        finally:
            train.kill()
            train.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
