"""What a model of 100,000 parameters costs in the first watched steps: each step against a bare one.

    python benchmarks/many_tensors.py [--steps 30] [--rounds 8]

A round runs the same training on the CPU bare and under `watch()`, each in its own process. For every step the minimum
over all rounds is taken, bare and watched, which removes noise; the result is the largest difference. `own` is the
training thread's time in agent functions, in the most expensive step of any round. Memory is the growth of resident
memory from before `watch()` to the last step, minus the bare process's.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import threading
import time
from typing import Any

from common import MIB, options, resident_bytes

PARAMETERS, TRAINED = 100_000, 64


def child(way: str, steps: int) -> None:
    """One training. Prints step times and memory growth."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    batch = torch.randn(8, 64)

    class Some(nn.Module):
        """Like a mostly frozen or unused model: 64 of its parameters get a gradient."""

        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(nn.Parameter(torch.ones(1 + at % 16)) for at in range(PARAMETERS))
            self.linear = nn.Linear(64, 64)

        def forward(self) -> torch.Tensor:
            return self.linear(batch).sum() + sum(self.all[at].sum() for at in range(TRAINED))

    model = Some()
    own: list[float] = []
    if way == "watch":
        own = time_own_parts()
        import gpumon_agent.agent
    gc.collect()
    before = resident_bytes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if way == "watch":
        gpumon_agent.watch(model, optimizer)
    took: list[float] = []
    owns: list[float] = []
    for _ in range(steps):
        own.clear()
        began = time.perf_counter()
        model().backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(1e3 * (time.perf_counter() - began))
        owns.append(1e3 * sum(own))
    print(json.dumps({"took": took, "own": max(owns), "grew": (resident_bytes() - before) / MIB}))


def time_own_parts() -> list[float]:
    """Must be called before the agent is imported. Returns the thread's time in each guarded agent function."""
    from gpumon_agent import guard

    spent: list[float] = []
    inside = False
    protect, training = guard.Guard.protect, threading.get_ident()

    def timed_protect(self: guard.Guard, *arguments: Any, **settings: Any) -> Any:
        function = protect(self, *arguments, **settings)

        def timed(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside or threading.get_ident() != training:
                return function(*args, **kwargs)
            inside, began = True, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                inside = False
                spent.append(time.thread_time() - began)

        return timed

    guard.Guard.protect = timed_protect  # type: ignore[method-assign]
    guard.protect = guard.guard.protect
    return spent


def run(way: str, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", way, "--steps", str(steps)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--child", choices=("bare", "watch"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(asked.child, asked.steps)
        return
    runs = [{way: run(way, asked.steps) for way in ("bare", "watch")} for _ in range(asked.rounds)]
    bare, watched = ([min(step) for step in zip(*(each[way]["took"] for each in runs), strict=True)]
                     for way in ("bare", "watch"))  # fmt: skip
    grew = [min(each[way]["grew"] for each in runs) for way in ("bare", "watch")]
    print(f"a bare step, ms                {sorted(bare)[len(bare) // 2]:.1f}")
    print(f"most that a step took more, ms {max(b - a for a, b in zip(bare, watched, strict=True)):.1f}")
    print(f"the agent's own, at most, ms   {max(each['watch']['own'] for each in runs):.1f}")
    print(f"resident memory, MiB more      {grew[1] - grew[0]:.1f}")


if __name__ == "__main__":
    main()
