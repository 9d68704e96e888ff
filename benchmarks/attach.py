"""What a viewer that comes and goes does to training's steps, and how soon one that comes late has seen everything.

    python benchmarks/attach.py [--rounds 60] [--window 1.5] [--after 0]

A training process on the CPU (one thread) notes of each step its wall time, without the pause after it, and what its
thread and its process spent. A round is four windows of equal length in random order: nobody watches, nobody watches,
`gpumon attach` on a pty of 120×40 comes, draws and is quit with `q`, and the same with another training process, a
small one, to attach to. A window's figure is the mean of its steps without the largest tenth: a neighbour on a shared
machine makes those. Told is the mean over the rounds of the differences within a round, with its 95 % interval from
10,000 bootstrap resamples of whole rounds: between the two windows without a viewer (A/A: what the method cannot tell
apart), between them and the one with it (A/B), between them and the one whose viewer watches another process (A/C: what
any program of that size does to its neighbour on this machine), and between the two with a viewer (C/B: what being
watched adds). The thread's processor time does not count the time it waits for a core. Many short rounds rather than
few long ones, for a neighbour's load comes and goes in seconds. The training keeps another core than the viewer and the
other process where there are two.

Then, when training is `--after` seconds old, a subscription: how long until the static picture and until the whole
history, and how many steps and seconds back that reaches; and the time to the first figures on a screen.
"""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from common import drained, interval, on_terminal, options, percent, trimmed, verdict
from common import rounds as paired
from startup import DATA, start

from gpumon import link
from gpumon_agent import wire

SCRIPT = """
import struct, sys, time, torch
torch.set_num_threads(1)
width = int(sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
clocks = time.monotonic_ns, time.thread_time_ns, time.process_time_ns
with open(sys.argv[1], "wb", buffering=0) as times:
    while True:
        began = [clock() for clock in clocks]
        model(torch.randn(32, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ended = [clock() for clock in clocks]
        times.write(struct.pack("6Q", *began, *ended))
        time.sleep(1.28 / width)
"""


class Window(NamedTuple):
    """What the steps within it took."""

    wall_ms: float
    thread_ms: float
    """Of the training thread's processor time."""
    others: float
    """Processor time of the process's other threads (the agent's is the only one), as a share of the window."""
    steps: int


def measured(times: Path, began: int, ended: int) -> Window:
    """The steps between two moments of the monotonic clock."""
    steps = [step for step in struct.iter_unpack("6Q", times.read_bytes()) if began <= step[0] and step[3] <= ended]
    first, last = steps[0], steps[-1]
    others = (last[2] - first[2]) - (last[1] - first[1])
    return Window(
        trimmed([(step[3] - step[0]) / 1e6 for step in steps]),
        trimmed([(step[4] - step[1]) / 1e6 for step in steps]),
        others / (last[0] - first[0]),
        len(steps),
    )


def watch(command: list[str], seconds: float) -> None:
    """A viewer on a terminal, quit by key after `seconds`."""
    pid, fd = on_terminal(command)
    drained(fd)
    time.sleep(seconds)
    os.write(fd, b"q")
    _, status = os.waitpid(pid, 0)
    os.close(fd)
    if status:
        raise SystemExit(f"gpumon attach ended with status {status}")


def window(times: Path, seconds: float, viewer: list[str] | None = None) -> Window:
    began = time.monotonic_ns()
    if viewer is None:
        time.sleep(seconds)
    else:
        watch(viewer, seconds)
    return measured(times, began, time.monotonic_ns())


def rounds(times: Path, count: int, seconds: float, viewers: dict[str, list[str] | None]) -> None:
    ways = {name: partial(window, times, seconds, viewer) for name, viewer in viewers.items()}
    found = list(paired(ways, count))
    steps = sum(each.steps for each in found[0].values()) / len(viewers)
    title = f"{count} rounds of {seconds:g} s, some {steps:.0f} steps a window"
    print(f"{title:<52}{'mean':>9}   95 % interval")
    for field, name in (("thread_ms", "thread's processor time"), ("wall_ms", "wall time")):
        alone = [mean(getattr(each[name], field) for name in ("alone", "alone again")) for each in found]
        line = f"a step's {name}, nobody watches, ms"
        print(f"{line:<52}{mean(alone):>9.3f}")
        given = {name: [getattr(each[name], field) for each in found] for name in viewers}
        for what, before, after in (
            ("A/A, nobody watches twice, %", given["alone"], given["alone again"]),
            ("A/B, a viewer comes and goes, %", alone, given["watched"]),
            ("A/C, a viewer of another process does, %", alone, given["elsewhere"]),
            ("C/B, being the watched one, %", given["elsewhere"], given["watched"]),
        ):
            middle, low, high = interval(percent(before, after))
            print(f"  {what:<50}{middle:>+9.2f}   {low:+.2f} … {high:+.2f}   {verdict(low, high)}")
    for name in ("alone", "watched", "elsewhere"):
        middle, low, high = interval([100 * each[name].others for each in found])
        line = f"its other threads, {name}, % of a core"
        print(f"{line:<52}{middle:>9.2f}   {low:.2f} … {high:.2f}")


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
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--window", type=float, default=1.5)
    parser.add_argument("--after", type=float, default=0.0, help="seconds of training before the late viewer comes")
    asked = parser.parse_args()
    gpumon = [sys.executable, "-m", "gpumon"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        script, times = Path(folder) / "train.py", Path(folder) / "times"
        script.write_text(SCRIPT)
        began = time.monotonic()
        run = [*gpumon, "run", "--track-cpu", str(script)]
        train = subprocess.Popen([*run, str(times), "256"])
        other = subprocess.Popen([*run, os.devnull, "64"])
        try:
            while not times.exists() or times.stat().st_size < 4800:
                time.sleep(0.2)
            if hasattr(os, "sched_setaffinity") and len(cores := sorted(os.sched_getaffinity(0))) > 1:
                os.sched_setaffinity(train.pid, cores[:1])
                os.sched_setaffinity(other.pid, cores[1:])
                os.sched_setaffinity(0, cores[1:])  # and every viewer started from here
            attach = [*gpumon, "attach", str(train.pid)]
            elsewhere = [*gpumon, "attach", str(other.pid)]
            viewers = {"alone": None, "alone again": None, "watched": attach, "elsewhere": elsewhere}
            rounds(times, asked.rounds, asked.window, viewers)
            time.sleep(max(0.0, asked.after - (time.monotonic() - began)))
            age = time.monotonic() - began
            print(f"\na viewer comes {age:.0f} s after training began")
            asyncio.run(late(train.pid))
            shown = start(attach, DATA).screen
            print("no figures came" if shown is None else f"first figures on the screen {shown:.2f} s after `attach`")
        finally:
            for process in (train, other):
                process.kill()
                process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
