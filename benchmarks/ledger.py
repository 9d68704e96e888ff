"""What the ledger of a step costs: `python benchmarks/ledger.py [--seconds 5] [--write FILE]`.

One watched training on the virtual GPU; our functions are timed from outside, in the training's thread.

loop       a boundary read again and again after an optimizer step: the processor's caches are warm
in steps   the boundaries of every fourth step, after training has filled the caches with its own; the optimizer's
           boundary sums again what the others take from the cache
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from statistics import mean, median
from typing import Any, ClassVar

from common import options, write

from gpumon import virtual_gpu

PARAMETERS = (24, 200, 1_000)
OPTIMIZERS = ("SGD", "Adam")
EVERY = 4
PHASES = ("between", "forward", "backward", "optimizer")
BREAKS_DOWN = ", peak"
COLUMNS = ("loop", "loop, optimizer", *PHASES, PHASES[2] + BREAKS_DOWN, "walks", "step")
NOTE = """Time of the training's thread, in µs. Of a boundary: medians, in a loop (of a backward, then of an optimizer
phase) and in steps, by phase; `peak`: one sampled step in two breaks down its peak. `walks`: of a step's graph, `step`:
all of it, both as means; once a second a step reports its layers. Linear layers of 64 × 64; SGD has momentum.
"""


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row (5)")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(int(args.child[0]), args.child[1], float(args.child[2]))
        return
    rows = [NOTE, f"| parameters | optimizer | {' | '.join(COLUMNS)} |", f"|--:|---|{'--:|' * len(COLUMNS)}"]
    for parameters in PARAMETERS:
        for optimizer in OPTIMIZERS:
            command = [sys.executable, __file__, "--child", str(parameters), optimizer, str(args.seconds)]
            environment = virtual_gpu.environment() | {"GPUMON_NATIVE": "on"}
            said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            virtual_gpu.remove_session(environment["VGPU_SESSION"])
            took = json.loads(said.splitlines()[-1])
            figures = [f"{took[column]:,.0f}" if column in took else "" for column in COLUMNS]
            rows.append(f"| {parameters:,} | {optimizer} | {' | '.join(figures)} |")
    write("What the ledger of a step costs", "\n".join(rows) + "\n", args.write)


class Took:
    """In no variable of the training's: the ledger reads those."""

    us: ClassVar[defaultdict[str, list[float]]] = defaultdict(list)
    step: ClassVar[list[float]] = [0.0]
    boundary: ClassVar[list[Any]] = []


def measure() -> None:
    """Times the functions of a step's accounts, and samples every fourth step."""
    from gpumon_agent.attribution.accounts import Accounts
    from gpumon_agent.governor import Governor

    def timed(name: str) -> None:
        function: Any = getattr(Accounts, name)

        def call(*arguments: Any) -> Any:
            began = time.thread_time_ns()
            result = function(*arguments)
            us = (time.thread_time_ns() - began) / 1000
            Took.step[0] += us
            label = name
            if name == "boundary":
                Took.boundary[:] = arguments
                label = arguments[2] + (BREAKS_DOWN if arguments[0]._peak.wanted else "")
            Took.us[label].append(us)
            return result

        setattr(Accounts, name, call)

    def choose(self: Governor, now_ns: int, *, may_rest: bool) -> None:
        self.quiet, self.quiet_left = False, 0
        self.ledger, self.ledger_at_end_only = self.steps % EVERY == 0, False

    for name in ("boundary", "begin_step", "forward_ends", "backward_begins", "close_step"):
        timed(name)
    Governor._choose = choose  # type: ignore[method-assign]


def child(parameters: int, kind: str, seconds: float) -> None:
    import torch

    import gpumon_agent

    measure()
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(parameters // 2)]).cuda()
    optimizer: Any = torch.optim.Adam(model.parameters())
    if kind == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.ones(32, 64, device="cuda")
    gpumon_agent.watch(model, optimizer)

    def steps(seconds: float) -> list[float]:
        """The costs of the sampled ones."""
        costs = []
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            Took.step[0] = 0.0
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            costs.append(Took.step[0])
        return [cost for cost in costs if cost]

    for _ in range(2 * EVERY):
        steps(0.0001)
    Took.us.clear()
    result = {"step": mean(steps(seconds))}
    result |= {column: median(Took.us[column]) for column in COLUMNS if column in Took.us}
    result["walks"] = mean(Took.us["forward_ends"]) + mean(Took.us["backward_begins"])
    accounts, number, _, *rest = Took.boundary
    accounts._peak.wanted = accounts._layers_wanted = False
    for column, phase in (("loop", "backward"), ("loop, optimizer", "optimizer")):
        Took.us.clear()
        for _ in range(200):
            accounts.boundary(number, phase, *rest)
        result[column] = median(Took.us[phase])
    print(json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
