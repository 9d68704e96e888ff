"""What the agent costs a training run: `python benchmarks/overhead.py [--write benchmarks/overhead.md]`.

Without CUDA it runs on the virtual GPU: the host's work is real, kernels take no time.
Methods, each within one process and one loop:

boundary   Every boundary of a training loop is timed with caches as cold as training leaves them. About half of them,
           at random, are timed whole; the others time a raw `torch._C._cuda_memoryStats` first and then do the work.
           Longer steps leave colder caches, so there are three step lengths.
step       Blocks of steps in rounds of three, in random order: the agent off (its hooks return at once), off again
           (A/A: the machine's noise), and on. Reported is the median over the rounds of the differences within a round,
           with its 95 % interval (bootstrap of rounds).
growth     Resident memory over many boundaries, with the publisher running and no viewer.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from statistics import median, quantiles
from typing import Any

from common import interval, options, percent, write
from common import rounds as paired

BLOCK = 8
BOUNDARY_STEPS = 400
STEPS_MS = (1.0, 3.0, 20.0)
NOTE = """A boundary is the end of a phase, where the agent reads the allocator. A raw read is one call of
`torch._C._cuda_memoryStats`. Off: the agent's hooks return at once; off again against off is the machine's noise.
"from" and "to" are the 95 % interval of the median.
"""
ROW = "| {:<44} | {:>12} | {:>12} | {:>12} |"


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--rounds", type=int, default=200, help="rounds of blocks of the step measurement (200)")
    parser.add_argument("--boundaries", type=int, default=1_000_000, help="boundaries of the growth measurement (10⁶)")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return measure(args)
    from gpumon import virtual_gpu

    where = "on a GPU"
    environment = dict(os.environ)
    import torch

    if not torch.cuda.is_available():
        where = "on the virtual GPU"
        environment = virtual_gpu.environment()
    try:
        table = subprocess.run(
            [sys.executable, __file__, "--child", *sys.argv[1:]],
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
    finally:
        if "VGPU_SESSION" in environment:
            virtual_gpu.remove_session(environment["VGPU_SESSION"])
    machine = f"Measured {where}, torch {torch.__version__}, {os.cpu_count()} CPUs"
    write("What the agent costs", f"{NOTE}\n{table}", args.write, machine)


# ---------------------------------------------------------------------------------------------------------- training


class Training:
    """Linear layers; a step takes about `step_ms` of host time."""

    def __init__(self, step_ms: float) -> None:
        import torch

        self.torch = torch
        layers = 4
        while True:
            self._build(layers)
            self.run(20)
            took = 1000 * min(self.run(10) for _ in range(4)) / 10
            if took > 0.9 * step_ms or layers > 2000:
                break
            layers = int(layers * min(4.0, max(1.1, step_ms / took)))
        self.layers = layers

    def _build(self, layers: int) -> None:
        torch = self.torch
        self.model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers))).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=True)
        self.batch = torch.ones(32, 64, device="cuda")

    def run(self, steps: int) -> float:
        """Seconds."""
        began = time.perf_counter()
        for _ in range(steps):
            self.model(self.batch).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.perf_counter() - began


def measure(args: argparse.Namespace) -> None:
    for step_ms in STEPS_MS:
        training = Training(step_ms)
        header = f"a step of {step_ms:g} ms: {training.layers} layers, 4 boundaries"
        table((header, "p50", "p90", "p99"), boundary(training))
    header = f"{args.rounds} rounds of blocks of {BLOCK} steps"
    table((header, "median", "from", "to"), share(training, args.rounds))
    table(("resident memory, MiB", "before", "after", "growth"), growth(args.boundaries))


def table(head: tuple[str, ...], rows: Iterator[str]) -> None:
    print(ROW.format(*head), ROW.format("-" * 44, *["-" * 11 + ":"] * 3), *rows, "", sep="\n")


def boundary(training: Training) -> Iterator[str]:
    """Whole boundaries and raw reads, mixed in one loop."""
    os.environ["GPUMON_GOVERNOR"] = "off"
    from gpumon_agent import agent as agents

    agent = agents.running("overhead")
    agent.adopt(training.model, training.optimizer)
    agent.governor.ledger = False
    raw_read = agent.devices._cuda._peaks.read  # type: ignore[union-attr]
    whole: list[int] = []
    raw: list[int] = []
    close = agent.phases._close
    clock = time.perf_counter_ns
    chance = random.Random(0)

    def timed(*args: Any) -> None:
        if chance.random() < 0.5:
            began = clock()
            close(*args)
            whole.append(clock() - began)
        else:
            began = clock()
            raw_read(0)
            raw.append(clock() - began)
            close(*args)

    training.run(20)
    agent.phases._close = timed  # type: ignore[method-assign]
    training.run(BOUNDARY_STEPS)
    agent.phases._close = close  # type: ignore[method-assign]
    agents.stop()
    yield _row("one raw read of the allocator, µs", raw)
    yield _row("a boundary, raw read included, µs", whole)
    own = median(whole) - median(raw)
    yield ROW.format("the agent's own work, µs", f"{own / 1e3:.1f}", "", "")
    yield ROW.format("a boundary ÷ a raw read", f"{median(whole) / median(raw):.2f}", "", "")


def share(training: Training, rounds: int) -> Iterator[str]:
    """Relative difference within a round: off/off and off/on, with the governor on."""
    os.environ.pop("GPUMON_GOVERNOR", None)
    from gpumon_agent import agent as agents

    agent = agents.running("overhead")
    agent.adopt(training.model, training.optimizer)
    training.run(300)  # past the governor's first decisions
    kinds = ["off", "off again", "on"]

    def block(kind: str) -> tuple[float, float]:
        agent.hooks.fires = kind == "on"
        # the governor must not count the blocks that are off as part of the step
        agent.phases._step_opened_ns = time.monotonic_ns()
        training.run(1)
        cpu = time.thread_time()
        wall = training.run(BLOCK)
        return 1000 * wall / BLOCK, 1000 * (time.thread_time() - cpu) / BLOCK

    found = list(paired({kind: partial(block, kind) for kind in kinds}, rounds))
    measured = {kind: [each[kind] for each in found] for kind in kinds}
    agent.hooks.fires = True
    every = agent.governor.read_every, agent.governor.ledger_every
    agents.stop()
    for clock, name in enumerate(("wall", "CPU of the thread")):
        for kind in kinds[1:]:
            values = percent(*([each[clock] for each in measured[way]] for way in ("off", kind)))
            yield ROW.format(f"{kind} against off: {name}, %", *(f"{value:+.2f}" for value in interval(values, median)))
        alone = [each[clock] for each in measured["off"]]
        yield ROW.format(f"a step, off: {name}, ms", *(f"{value:.2f}" for value in interval(alone, median)))
    yield ROW.format("steps between reads: allocator, owners", *map(str, every), "")


def growth(boundaries: int) -> Iterator[str]:
    """Boundaries as fast as possible, long after queue and history are full."""
    os.environ["GPUMON_GOVERNOR"] = "off"
    import torch

    from gpumon_agent import agent as agents
    from gpumon_agent.allocator.cpu import resident_bytes

    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    agent = agents.running("overhead")
    agent.adopt(model, optimizer)
    agent.governor.ledger = False
    phases = agent.phases

    def steps(count: int) -> int:
        for _ in range(count):
            phases.forward_begins(1, gradients=True, trains=True, inputs=lambda: (8, [(2, 4)]))
            phases.forward_ends(1, gradients=True, aborted=False)
            phases.engine_begins()
            phases.engine_ends(aborted=False)
            phases.optimizer_begins(optimizer)
            phases.optimizer_ends(optimizer, in_engine=False)
        time.sleep(0.2)
        return resident_bytes() or 0

    before = steps(boundaries // 40)
    after = steps(boundaries // 4)
    dropped = agent.recorder.dropped
    agents.stop()
    mib = [f"{value / 2**20:.1f}" for value in (before, after, after - before)]
    yield ROW.format(f"{boundaries:,} boundaries ({dropped} events dropped)", *mib)


def _row(name: str, values: list[int]) -> str:
    cuts = quantiles(values, n=100)
    return ROW.format(name, *(f"{cuts[p - 1] / 1e3:.1f}" for p in (50, 90, 99)))


if __name__ == "__main__":
    main()
