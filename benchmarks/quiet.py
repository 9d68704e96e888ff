"""What a watched step costs after the first hundred, within one process: `python benchmarks/quiet.py [--write FILE]`.

The hooks of one watched training are taken out and put back, for blocks of steps in turns (out, in, in, out): memory
layout and machine are the same for both. Blocks are short, because the machine's speed drifts: with 20 ms instead of
320 ms the interval is a third as wide. `out again` is the A/A: nothing is put back.

quiet      steps that are not read: only the hooks cost
all read   every phase of every step, without owners
watched    as usual: some steps are read, some with their owners
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import OrderedDict
from statistics import median
from typing import Any

from common import interval, options, write

from gpumon import virtual_gpu
from gpumon.cli import native_reader

LAYERS = {"0.4 ms": 12, "4.5 ms": 120, "20 ms": 560}
WAYS = ("out again", "quiet", "watched", "all read")
FAR = 1 << 62
BLOCK_US = 20_000
NOTE = """Wall time per step, in µs: the median over the blocks without hooks, the mean difference with its 95 %
interval (bootstrap of blocks), and its share of the step. Linear layers on the virtual GPU, SGD.
"""


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each row (60)")
    parser.add_argument("--kinds", nargs="+", choices=LAYERS, default=list(LAYERS), metavar="KIND")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child[0], int(args.child[1]), float(args.child[2]))
        return
    try:
        native_reader.build()
    except native_reader.NotBuilt as reason:
        print(f"{reason}: a read takes four times as long", file=sys.stderr)
    rows = [NOTE, "| step | | without hooks, µs | costs, µs | share of the step |", "|---|---|--:|--:|--:|"]
    for kind in args.kinds:
        for way in args.ways:
            command = [sys.executable, __file__, "--child", way, str(LAYERS[kind]), str(args.seconds)]
            environment = virtual_gpu.environment() | {"GPUMON_NATIVE": "on"}
            said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            virtual_gpu.remove_session(environment["VGPU_SESSION"])
            bare, differences = json.loads(said.splitlines()[-1])
            middle, low, high = interval(differences)
            share = " to ".join(f"{100 * each / bare:+.1f}" for each in (low, high))
            rows.append(
                f"| {kind} | {way} | {bare:,.0f} | {middle:+.1f} ({low:+.1f} to {high:+.1f}) "
                f"| {100 * middle / bare:+.1f} % ({share}) |"
            )
    write("What a quiet step costs", "\n".join(rows) + "\n", args.write)


def child(way: str, layers: int, seconds: float) -> None:
    import torch
    from torch.optim import optimizer as optimizers

    import gpumon_agent
    from gpumon_agent.governor import Governor
    from gpumon_agent.registry import REGISTRY

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(layers)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.ones(32, 64, device="cuda")
    engine = torch.autograd._engine_run_backward
    gpumon_agent.watch(model, optimizer)
    phases = REGISTRY.agent.phases
    watched = torch.autograd._engine_run_backward
    dicts = {name: hooks for name, hooks in vars(model).items() if name.startswith("_forward_") and hooks is not None}
    registries: tuple[Any, ...] = optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks
    registered = [dict(each) for each in registries]

    def put(*, in_place: bool) -> None:
        torch.autograd._engine_run_backward = watched if in_place else engine
        for name, hooks in dicts.items():
            vars(model)[name] = hooks if in_place else OrderedDict()
        for registry, hooks in zip(registries, registered, strict=True):
            registry.clear()
            registry.update(hooks if in_place else {})

    def later(by_ns: int) -> None:
        """What is due at some time is due later: time without hooks does not count."""
        for owner, names in (
            (phases, ("_until_ns", "_look_due_ns", "_ends_due_ns")),
            (phases._governor, ("until_ns", "_ledger_until_ns")),
        ):
            for name in names:
                setattr(owner, name, getattr(owner, name) + by_ns)
        phases._set_due()

    def run(steps: int) -> float:
        began = time.perf_counter_ns()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        return (time.perf_counter_ns() - began) / steps / 1000

    run(200)
    while not phases.quiet:
        run(1)
    if way == "all read":
        governor = phases._governor
        Governor._decide = lambda self: None
        governor.read_every, governor._ledger_at, governor._ledger_until_ns = 1, FAR, FAR
        phases.read_soon()
    steps = max(1, round(BLOCK_US / run(50)))
    settling = max(1, steps // 4)  # hooks just put back have left the caches
    bare, differences = [], []
    ends = time.monotonic() + seconds
    hooked, out_since_ns = True, 0
    while time.monotonic() < ends:
        block = []
        for wanted in (False, True, True, False):
            if wanted != hooked:
                phases._count_quiet()
                put(in_place=wanted and way != "out again")
                hooked = wanted
                now_ns = time.monotonic_ns()
                if not hooked:
                    out_since_ns = now_ns
                else:
                    later(now_ns - out_since_ns)
                phases._step_opened_ns = now_ns  # the steps without hooks are none
                for boundary, device, _ in phases.readers or ():
                    boundary(device)  # nor are their peaks
                if way == "quiet" and phases.quiet:
                    phases.quiet_mark.left, phases._until_ns = FAR, FAR
                    phases._set_due()
                run(settling)
            block.append(run(steps))
        bare += [block[0], block[3]]
        differences.append((block[1] + block[2] - block[0] - block[3]) / 2)
    print(json.dumps([median(bare), differences]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
