"""Cost of the helper process, and what starting it, stopping it and being watched cost the training.

    python benchmarks/helper.py [--seconds 30] [--times 20] [--rounds 40]

First, each time in a new process that has imported torch and trained three steps: the time of `import gpumon_agent` and
`watch()`, until viewers can attach, and of the agent at exit. Bytecode is compiled beforehand, as in an installed
package.

Then a training process on the CPU does 20 steps per second of 5 phases. With no viewer, one, ten, and one that is
stopped, for `--seconds` each: the helper's CPU share and its proportional set size (PSS).

Then rounds of five windows of 1.5 s, in random order (no viewer twice: A/A): the training thread's time in
`Transport.flush` as a share of the step, with the 95 % interval of the differences within a round. Viewers can affect
the training only there: nothing else reads what the helper writes. A step's total time varies by more than this. The
training has its own core; helper and viewers use the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import mean, median

from common import cpu_s, interval, options, trimmed
from common import rounds as paired

AGENT = """
import atexit, json, time
import torch
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
def train():
    for _ in range(3):
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
train()
began, spent = time.perf_counter_ns(), time.thread_time_ns()
import gpumon_agent
gpumon_agent.watch(model, optimizer)
told = [time.perf_counter_ns() - began, time.thread_time_ns() - spent]
train()
import gpumon_agent.agent
gpumon_agent.agent.REGISTRY.agent.transport.wait_ready(30)
told.append(time.perf_counter_ns() - began)
began = time.perf_counter_ns()
gpumon_agent.agent.REGISTRY.agent._exit_reason._exit()
print(json.dumps([*told, time.perf_counter_ns() - began]))
"""
TRAINS = """
import json, os, sys, time
import torch
import gpumon_agent, gpumon_agent.agent
from gpumon_agent.transport.trainer import Transport
flush, flushed = Transport.flush, 0
def timed(self):
    global flushed
    began = time.thread_time_ns()
    flush(self)
    flushed += time.thread_time_ns() - began
Transport.flush = timed
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
gpumon_agent.watch(model, optimizer)
transport = gpumon_agent.agent.REGISTRY.agent.transport
transport.wait_ready(60)
print(json.dumps(transport._helper), flush=True)
x = torch.randn(32, 256)
while True:
    began, spent, flushed = time.perf_counter_ns(), time.thread_time_ns(), 0
    with gpumon_agent.phase("augment"):
        pass
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    os.write(1, b"%d %d\\n" % (time.thread_time_ns() - spent, flushed))
    time.sleep(max(0.0, 0.05 - (time.perf_counter_ns() - began) / 1e9))
"""
VIEWS = """
import asyncio, os, sys
from gpumon import link

async def view():
    async for _ in link.subscribe(link.resolve(sys.argv[1])):
        pass

async def views():
    "As many as the last line of the standard input says."
    loop, lines, tasks = asyncio.get_running_loop(), asyncio.Queue(), []
    loop.add_reader(0, lambda: lines.put_nowait(os.read(0, 64)))
    while line := await lines.get():
        for task in tasks:
            task.cancel()
        tasks = [loop.create_task(view()) for _ in range(int(line))]

asyncio.run(views())
"""
WAYS = {"none": (0, False), "none again": (0, False), "one": (1, False), "ten": (10, False), "stopped": (1, True)}
SETTLES_S = 0.5
WINDOW_S = 1.5


def starts(times: int) -> None:
    figures = []
    with tempfile.TemporaryDirectory() as compiled:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(times + 1):
            command = [sys.executable, "-c", AGENT]
            ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            figures.append(json.loads(ran.stdout))
    names = "watch() returns", "of it, thread's time", "viewers can attach", "exit"
    for name, each in zip(names, zip(*figures[1:], strict=True), strict=True):  # the first one compiles
        print(f"{name:<22} {median(each) / 1e6:7.1f} ms   {min(each) / 1e6:7.1f} to {max(each) / 1e6:7.1f} ms")


def pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Training:
    """20 steps per second, with some viewers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", TRAINS], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._steps = self._process.stdout
        self.helper: int = json.loads(self._steps.readline())
        os.set_blocking(self._steps.fileno(), False)
        command = [sys.executable, "-c", VIEWS, str(self._process.pid)]
        self._viewers = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(self._process.pid, cores[:1])
        for pid in (self.helper, self._viewers.pid):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores[1:] or cores)

    def watched(self, count: int, seconds: float, *, stopped: bool = False) -> list[tuple[int, int]]:
        """(thread time, time in `flush`) of each step, ns, with `count` viewers."""
        assert self._viewers.stdin is not None
        self._viewers.stdin.write(b"%d\n" % count)
        time.sleep(SETTLES_S)
        if stopped:
            os.kill(self._viewers.pid, signal.SIGSTOP)
        while self._steps.read(1 << 20):
            pass
        time.sleep(seconds)
        lines = (self._steps.read(1 << 20) or b"").split(b"\n")[1:-1]
        os.kill(self._viewers.pid, signal.SIGCONT)
        return [(int(thread), int(flushed)) for thread, flushed in map(bytes.split, lines)]

    def end(self) -> None:
        for process in (self._viewers, self._process):
            process.kill()
            process.wait()


def helps(training: Training, seconds: float) -> None:
    print(f"{'viewers':<12} {'of a core':>10} {'PSS':>10}")
    for name, (count, stopped) in WAYS.items():
        training.watched(count, 2, stopped=stopped)
        began, before = time.monotonic(), cpu_s(training.helper)
        training.watched(count, seconds, stopped=stopped)
        share = (cpu_s(training.helper) - before) / (time.monotonic() - began)
        print(f"{name:<12} {share:>9.2%} {pss(training.helper) / 2**20:>6.1f} MiB")


def unmoved(training: Training, rounds: int) -> None:
    calls = {way: partial(training.watched, count, WINDOW_S, stopped=stopped) for way, (count, stopped) in WAYS.items()}
    found = list(paired(calls, rounds))
    took = {way: [mean(flushed for _, flushed in each[way]) for each in found] for way in WAYS}
    alone = [mean(both) for both in zip(took["none"], took["none again"], strict=True)]
    step = mean(trimmed([float(thread) for thread, _ in each["none"]]) for each in found)
    print(f"a step {step / 1e6:.2f} ms of the thread, {mean(alone) / 1e6:.3f} ms of it in flush")
    for way in WAYS:
        before = took["none"] if way == "none again" else alone
        middle, low, high = interval([100 * (b - a) / step for a, b in zip(before, took[way], strict=True)])
        print(f"  in flush, {way:<12} {middle:>+8.3f} % of the step   {low:+.3f} to {high:+.3f}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    told = parser.parse_args()
    if told.times:
        starts(told.times)
    training = Training()
    try:
        if told.seconds:
            helps(training, told.seconds)
        if told.rounds:
            unmoved(training, told.rounds)
    finally:
        training.end()


if __name__ == "__main__":
    main()
