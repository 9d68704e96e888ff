"""What the ledger of a step costs: `python benchmarks/ledger.py [--seconds 5] [--write FILE]`.

One watched training on the virtual GPU; our functions are timed from outside, in the training's thread.

loop       a boundary read again and again after an optimizer step: the processor's caches are warm
in steps   the boundaries of every fourth step, after training has filled the caches with its own; the optimizer's
           boundary sums again what the others take from the cache
yardstick  a step of 12 linear layers without gpumon, in processes of their own directly before and after each row
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
YARDSTICK_LAYERS = 12
COLUMNS = ("loop", "loop, optimizer", *PHASES, PHASES[2] + BREAKS_DOWN, "walks", "step", "yardstick")
SHARE = "largest ÷ yardstick"
NOTE = """Time of the training's thread, in µs. Of a boundary: medians, in a loop (of a backward, then of an optimizer
phase) and in steps, by phase; `peak`: one sampled step in two breaks down its peak. `walks`: of a step's graph, `step`:
all of it, both as means; once a second a step reports its layers. Linear layers of 64 × 64; SGD has momentum.
`yardstick`: a step of 12 such layers with SGD, without gpumon, directly before and after the row; `largest`: of the
four boundaries in steps.
"""


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row (5)")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        seconds, *row = args.child
        say(child(float(seconds), int(row[0]), row[1]) if row else yardstick(float(seconds)))
        return
    titles = "parameters", "optimizer", *COLUMNS, SHARE
    rows = [NOTE, f"| {' | '.join(titles)} |", f"|--:|---|{'--:|' * (len(titles) - 2)}"]
    for parameters in PARAMETERS:
        for optimizer in OPTIMIZERS:
            before = started(args.seconds / 2)
            took = started(args.seconds, parameters, optimizer)
            after = started(args.seconds / 2)
            took["yardstick"] = (before["yardstick"] + after["yardstick"]) / 2
            figures = [f"{took[column]:,.0f}" if column in took else "" for column in COLUMNS]
            figures.append(f"{max(took[phase] for phase in PHASES) / took['yardstick']:.2f}")
            rows.append(f"| {parameters:,} | {optimizer} | {' | '.join(figures)} |")
    write("What the ledger of a step costs", "\n".join(rows) + "\n", args.write)


def started(*arguments: object) -> Any:
    """What a child says with these."""
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    environment = virtual_gpu.environment() | {"GPUMON_NATIVE": "on"}
    said = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    virtual_gpu.remove_session(environment["VGPU_SESSION"])
    return json.loads(said.splitlines()[-1])


def say(result: dict[str, float]) -> None:
    print(json.dumps(result), flush=True)
    os._exit(0)


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


def training(layers: int, kind: str) -> tuple[Any, Any, Any]:
    """(model, optimizer, batch)"""
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(layers)]).cuda()
    optimizer: Any = torch.optim.Adam(model.parameters())
    if kind == "SGD":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return model, optimizer, torch.ones(32, 64, device="cuda")


def yardstick(seconds: float) -> dict[str, float]:
    """The median of a step."""
    model, optimizer, batch = training(YARDSTICK_LAYERS, "SGD")
    costs = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        began = time.thread_time_ns()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        costs.append((time.thread_time_ns() - began) / 1000)
    return {"yardstick": median(costs[len(costs) // 4 :])}  # the first ones load


def child(seconds: float, parameters: int, kind: str) -> dict[str, float]:
    import gpumon_agent

    measure()
    model, optimizer, batch = training(parameters // 2, kind)
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
    return result


if __name__ == "__main__":
    main()
