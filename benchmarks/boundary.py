"""What one boundary between phases costs: `python benchmarks/boundary.py [--write benchmarks/boundary.md]`.

Without CUDA it runs on the virtual GPU: the host's work is real, kernels take no time.

boundary   Boundaries of a training loop are timed with caches as cold as training leaves them: all but those at which a
           forward begins, where a forecast is made. About half of them, at random, are timed whole; the others time one
           `torch._C._cuda_memoryStats` first and then do the work. Longer steps leave colder caches, so there are three
           step lengths.
readers    One read of the allocator by each reader, after a step of 3 ms and in a tight loop.
growth     Resident memory over many boundaries, with the publisher running and no viewer.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median, quantiles
from typing import Any

from common import options, write

from gpumon_agent.allocator import native

BOUNDARY_STEPS = 400
LOOP = 20_000
STEPS_MS = (1.0, 3.0, 20.0)
NOTE = """A boundary is the end of a phase, where the agent reads the allocator, natively if the native reader is built.
PyTorch's own reader is one call of `torch._C._cuda_memoryStats`, in the same loop.
"""
ROW = "| {:<44} | {:>12} | {:>12} | {:>12} |"


def main() -> None:
    parser = options(__doc__, write=True)
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
    write("What a boundary costs", f"{NOTE}\n{table}", args.write, machine)


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
    table(("one read, µs", "after a step", "in a loop", ""), readers(Training(STEPS_MS[1])))
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
    reader = "native" if agent.devices.native else "PyTorch's"
    whole: list[int] = []
    raw: list[int] = []
    close = agent.phases._close
    clock = time.perf_counter_ns
    chance = random.Random(0)

    def timed(*args: Any, tells: bool = True) -> None:
        if not tells:  # a forward begins: the forecast of its batch is between this and the sending
            close(*args, tells=False)
        elif chance.random() < 0.5:
            began = clock()
            close(*args)
            whole.append(clock() - began)
        else:
            began = clock()
            raw_read(0)
            raw.append(clock() - began)
            close(*args)

    training.run(20)
    agent.phases._close = timed  # type: ignore[method-assign, assignment]
    training.run(BOUNDARY_STEPS)
    agent.phases._close = close  # type: ignore[method-assign]
    agents.stop()
    yield _row("PyTorch's own reader, µs", raw)
    yield _row(f"a boundary, read by the {reader} reader, µs", whole)
    yield ROW.format("a boundary ÷ PyTorch's own reader", f"{median(whole) / median(raw):.2f}", "", "")


def readers(training: Training) -> Iterator[str]:
    torch = training.torch
    ways: dict[str, Callable[[], object]] = {
        "torch.cuda.memory_allocated()": torch.cuda.memory_allocated,
        "torch._C._cuda_memoryStats(0)": partial(torch._C._cuda_memoryStats, 0),
    }
    torch.cuda.reset_peak_memory_stats()  # then nothing of the stopped agent is around torch's readers
    found = native.load()
    if found is not None:
        peaks = native.Peaks()
        ways["the native reader"] = lambda: found(0, native.Figures(), peaks, 0)
    clock = time.perf_counter_ns
    for name, read in ways.items():
        cold = []
        for _ in range(BOUNDARY_STEPS):
            training.run(1)
            began = clock()
            read()
            cold.append(clock() - began)
        began = clock()
        for _ in range(LOOP):
            read()
        yield ROW.format(name, f"{median(cold) / 1e3:.1f}", f"{(clock() - began) / LOOP / 1e3:.2f}", "")


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
