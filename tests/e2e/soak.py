"""Viewers by the hundred attach to one training process, leave, are stopped and are killed: nobody may crash.

    python tests/e2e/soak.py [--viewers 500] [--at-once 8] [--seed 0]

A training process (CPU, with the agent) runs `--steps` steps and ends in one of four ways; then the next one starts,
until all viewers had their turn. Each viewer is a process of its own and does one of:

- `leaves`: subscribes for a moment, closes its sockets and exits;
- `killed`: SIGKILL at a random moment, from before it connects to the middle of a snapshot;
- `stopped`: SIGSTOP for a while, so that the agent's queue for it fills, then SIGKILL or SIGCONT;
- `glances`: as `gpumon ls` does, again and again;
- `asks`: requests on the control socket, the reply not always awaited;
- `floods`: subscribes so often that the agent shuts it out, and binds another socket for everybody.

A training that ends in another way than it was meant to, or a viewer that dies by a signal nobody sent, is printed,
with what the kernel's log says of libzmq's threads, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import zmq

from gpumon import link
from gpumon_agent import wire

TRAINING = """
import os, signal, sys, time, torch
torch.set_num_threads(1)
end, steps = sys.argv[1], int(sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(20)])
optimizer = torch.optim.AdamW(model.parameters())
for step in range(steps):
    model(torch.randn(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.005)
if end == "raises":
    raise SystemExit(3)
if end == "interrupted":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
if end == "exits":
    os._exit(4)
"""
ENDS = {"returns": 0, "raises": 3, "interrupted": -signal.SIGINT, "exits": 4}
KINDS = {"leaves": 5, "killed": 6, "stopped": 2, "glances": 2, "asks": 2, "floods": 1}
START_S = 60.0
TIMEOUT_S = 120.0


def leaves(agent: link.DiscoveredJob, seconds: float) -> None:
    async def listen() -> None:
        async for _ in link.subscribe(agent.descriptors):
            pass

    async def listen_for_a_while() -> None:
        with contextlib.suppress(asyncio.TimeoutError, link.LinkError):
            await asyncio.wait_for(listen(), seconds)

    asyncio.run(listen_for_a_while())


def glances(agent: link.DiscoveredJob, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        link.glance(agent.descriptors)


def asks(agent: link.DiscoveredJob, seconds: float) -> None:
    async def ask() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(link.LinkError):
                request = wire.Request(random.choice(("census", "blocks")))
                await link.ask(agent.descriptors[0], request, random.choice((0.0, 0.01, 1.0)))

    asyncio.run(ask())


def floods(agent: link.DiscoveredJob, seconds: float) -> None:
    context = zmq.Context()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        socket = context.socket(zmq.SUB)
        socket.linger = 0
        socket.connect(agent.descriptors[0].endpoint)
        for _ in range(500):
            socket.subscribe(os.urandom(8))
        time.sleep(0.05)
        socket.close()
    context.term()


def view(kind: str, agent: link.DiscoveredJob, seconds: float) -> None:
    """What a viewer does, in its own process."""
    what = {"glances": glances, "asks": asks, "floods": floods}.get(kind, leaves)
    what(agent, 60.0 if kind in ("killed", "stopped") else seconds)


class Soak:
    def __init__(self, folder: Path, random_: random.Random, at_once: int, steps: int) -> None:
        self.folder = folder
        self.random = random_
        self.at_once = at_once
        self.steps = steps
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []

    def train(self, end: str, viewers: int) -> None:
        """One training process, and viewers for as long as it runs; `viewers` at most."""
        script = self.folder / "train.py"
        script.write_text(TRAINING)
        command = [sys.executable, "-m", "gpumon", "run", str(script), end, str(self.steps)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as training:
            agent = self._agent(training)
            alive: dict[int, tuple[str, list[tuple[float, int]]]] = {}
            left = viewers
            while agent is not None and training.poll() is None and (left or alive):
                if left and len(alive) < self.at_once:
                    pid, told = self._viewer(agent)
                    alive[pid] = told
                    left -= 1
                self._turn(alive)
                time.sleep(0.005)
            try:
                _, errors = training.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                training.kill()
                self.problems.append(f"the training ({end}) hung")
                return
            until = time.monotonic() + TIMEOUT_S
            while alive:
                self._turn(alive, over=time.monotonic() > until - TIMEOUT_S + 5)
                time.sleep(0.005)
            if training.returncode != ENDS[end] or "zmq" in errors.lower() or "assert" in errors.lower():
                self.problems.append(f"the training ({end}) ended with {training.returncode}: {errors[-2000:]}")
            self.done[f"training {end}"] += 1

    def _agent(self, training: subprocess.Popen[str]) -> link.DiscoveredJob | None:
        until = time.monotonic() + START_S
        while training.poll() is None and time.monotonic() < until:
            for job in link.jobs(link.discover()):
                if all(link.alive(descriptor) for descriptor in job.descriptors):
                    return job
            time.sleep(0.05)
        self.problems.append("no agent came up")
        return None

    def _viewer(self, agent: link.DiscoveredJob) -> tuple[int, tuple[str, list[tuple[float, int]]]]:
        """Forks one; the result tells which signals it is to get, and when."""
        kind = self.random.choices([*KINDS], [*KINDS.values()])[0]
        seconds = self.random.uniform(0.0, 1.0)
        seed = self.random.random()
        pid = os.fork()
        if pid == 0:
            random.seed(seed)
            try:
                view(kind, agent, seconds)
            finally:
                sys.stderr.flush()
                os._exit(0 if sys.exc_info()[0] is None else 1)
        now = time.monotonic()
        signals: list[tuple[float, int]] = []
        if kind == "killed":
            signals = [(now + self.random.uniform(0.0, 0.6), signal.SIGKILL)]
        elif kind == "stopped":
            stopped = now + self.random.uniform(0.0, 0.4)
            signals = [(stopped, signal.SIGSTOP), (stopped + 1.0, signal.SIGCONT), (stopped + 1.2, signal.SIGKILL)]
            if self.random.random() < 0.5:
                del signals[1]
        return pid, (kind, signals)

    def _turn(self, alive: dict[int, tuple[str, list[tuple[float, int]]]], *, over: bool = False) -> None:
        for pid, (kind, signals) in [*alive.items()]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del alive[pid]
                code = os.waitstatus_to_exitcode(status)
                self.done[kind] += 1
                if code not in (0, -signal.SIGKILL):
                    self.problems.append(f"a viewer that {kind} ended with {code}")
            elif signals and time.monotonic() > signals[0][0]:
                os.kill(pid, signals.pop(0)[1])
            elif over:
                os.kill(pid, signal.SIGKILL)


def kernel_log() -> Iterator[str]:
    """What the kernel wrote of crashes in libzmq's threads; nothing where its log cannot be read."""
    with contextlib.suppress(OSError):
        told = subprocess.run(["dmesg"], capture_output=True, text=True, check=False).stdout
        yield from (line for line in told.splitlines() if "ZMQbg" in line)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--viewers", type=int, default=500)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1500, help="of one training process")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    before = set(kernel_log())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        soak = Soak(Path(folder), random.Random(options.seed), options.at_once, options.steps)
        ends = 0
        began = time.monotonic()
        while (left := options.viewers - sum(soak.done[kind] for kind in KINDS)) > 0 and len(soak.problems) < 10:
            soak.train([*ENDS][ends % len(ENDS)], left)
            ends += 1
            done = ", ".join(f"{n} {what}" for what, n in sorted(soak.done.items()))
            print(f"{time.monotonic() - began:.0f} s: {done}", flush=True)
        problems = [*soak.problems, *(set(kernel_log()) - before)]
        for problem in problems:
            print("PROBLEM:", problem)
        return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
