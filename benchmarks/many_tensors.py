"""What a model of very many tensors or modules costs in the first steps it is watched: each step beside a bare one's.

python benchmarks/many_tensors.py [--device cpu|cuda] [--steps N] [--rounds N] [--viewer] [MODEL …]

On a machine without a GPU, `python -m gpumon.virtual_gpu run -n 1 -p a100-40 -- python benchmarks/many_tensors.py
--device cuda`.

A round runs the same training bare, under `watch()` and under `gpumon run`, one after the other, each in a process of
its own. Of every step the least time of all rounds is taken, bare and watched, and told is the largest difference: what
the machine did meanwhile is in one round and not in the others. Own is the training thread's time within the agent's
functions, of the dearest step of any round, where `watch()` was called: it tells also where a machine's speed moves by
more than what is looked for. Memory is resident memory from before `watch()` to the last step, beyond what it grew by
in the bare process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, ROUNDS = 60, 3
WAYS = ("bare", "watch", "run")


def build(name: str, device: str) -> tuple[object, Callable[[], object], str]:
    """(the model, its loss, the optimizer's name)"""
    import torch
    from torch import nn

    few, many = torch.randn(8, 64, device=device), torch.ones(100_000, device=device)
    if name.startswith("100,000 parameters"):

        class Some(nn.Module):
            """As of a model most of which is frozen or not reached: 64 of its parameters get a gradient."""

            def __init__(self) -> None:
                super().__init__()
                self.all = nn.ParameterList(nn.Parameter(torch.ones(1 + at % 16)) for at in range(100_000))
                self.linear = nn.Linear(64, 64)

            def forward(self) -> torch.Tensor:
                return self.linear(few).sum() + sum(self.all[at].sum() for at in range(64))

        model: nn.Module = Some().to(device)
        return model, model, "adamw" if "AdamW" in name else "sgd"
    if name == "20,000 parameters, all trained":

        class All(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.all = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(20_000))

            def forward(self) -> torch.Tensor:
                return (torch.cat(list(self.all)) * many[:20_000]).sum()

        model = All().to(device)
        return model, model, "adamw"
    if name == "10,000 modules":
        blocks = [nn.Sequential(*(nn.Identity() for _ in range(98)), nn.Linear(64, 64)) for _ in range(100)]
        model = nn.Sequential(*blocks).to(device)
        return model, lambda: model(few).sum(), "adamw"
    if name == "1,000 layers":

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)
                self.act = nn.GELU()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + self.down(self.act(self.up(self.norm(x))))

        model = nn.Sequential(*(Layer() for _ in range(1000))).to(device)
        return model, lambda: model(few).sum(), "adamw"
    raise SystemExit(f"no model {name!r}")


MODELS = (
    "100,000 parameters", "100,000 parameters, AdamW", "20,000 parameters, all trained", "10,000 modules",
    "1,000 layers",
)  # fmt: skip


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def child(name: str, device: str, way: str, steps: int) -> None:
    """One training. Prints what each step took and how memory grew."""
    import torch

    torch.set_num_threads(1)
    model, loss, kind = build(name, device)
    assert isinstance(model, torch.nn.Module)
    own: list[float] = []
    if way == "watch":
        own = time_own_parts()
        import gpumon_agent.agent
    gc.collect()
    before = resident_mib()
    began = time.perf_counter()
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[kind](model.parameters(), lr=1e-3)
    if way == "watch":
        gpumon_agent.watch(model, optimizer)
    built = time.perf_counter() - began
    if os.environ.get("BENCHMARK_VIEWER"):
        time.sleep(3)  # until the viewer has found it
    took: list[tuple[float, float]] = []
    owns: list[float] = []
    for _ in range(steps):
        own.clear()
        wall, thread = time.perf_counter(), time.thread_time()
        value = loss()
        value.backward()  # type: ignore[attr-defined]
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        del value
        took.append((time.perf_counter() - wall, time.thread_time() - thread))
        owns.append(sum(own))
    told = {"took": took, "own": max(owns), "built": built, "grew": resident_mib() - before}
    print(json.dumps(told), flush=True)


def time_own_parts() -> list[float]:
    """To be called before the agent is imported: of each function that its guard protects, the thread's time."""
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


def run(name: str, device: str, way: str, steps: int, *, viewer: bool) -> dict[str, object]:
    command = [sys.executable]
    if way == "run":
        command += ["-m", "gpumon", "run", "--"]
        command += [sys.executable]
    command += [__file__, "--child", way, "--device", device, "--steps", str(steps), name]
    environment = dict(os.environ)
    if viewer:
        environment["BENCHMARK_VIEWER"] = "1"
    training = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    looks = None
    if viewer and way != "bare":
        looks = subprocess.Popen(
            [sys.executable, "-m", "gpumon", "attach", "--json"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    said, _ = training.communicate(timeout=600)
    if looks is not None:
        looks.terminate()
        looks.wait()
    line = next(line for line in reversed(said.splitlines()) if line.startswith("{"))
    found: dict[str, object] = json.loads(line)
    return found


def least(runs: list[dict[str, object]], clock: int) -> list[float]:
    return [1e3 * min(step) for step in zip(*([each[clock] for each in r["took"]] for r in runs), strict=True)]  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--viewer", action="store_true", help="`gpumon attach --json` from before the first step")
    parser.add_argument("--ways", default="watch,run")
    parser.add_argument("--child", choices=WAYS)
    options = parser.parse_args()
    if options.child:
        child(options.models[0], options.device, options.child, options.steps)
        return
    ways = ["bare", *options.ways.split(",")]
    title = f"{options.device}{', a viewer attached' if options.viewer else ''}, {options.steps} steps, ms"
    print(f"| {title} | way | bare step | largest excess, step | thread's | mean excess | own | built | MiB |")
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in options.models or MODELS:
        runs: dict[str, list[dict[str, object]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in ways:
                runs[way].append(run(name, options.device, way, options.steps, viewer=options.viewer))
        bare, bare_thread = least(runs["bare"], 0), least(runs["bare"], 1)
        grew = min(float(str(each["grew"])) for each in runs["bare"])
        built = min(float(str(each["built"])) for each in runs["bare"])
        for way in ways[1:]:
            more = [a - b for a, b in zip(least(runs[way], 0), bare, strict=True)]
            more_thread = [a - b for a, b in zip(least(runs[way], 1), bare_thread, strict=True)]
            top = max(range(len(more)), key=more.__getitem__)
            own = 1e3 * max(float(str(each["own"])) for each in runs[way])
            mine = min(float(str(each["grew"])) for each in runs[way]) - grew
            extra = 1e3 * (min(float(str(each["built"])) for each in runs[way]) - built)
            print(
                f"| {name} | {way} | {sorted(bare)[len(bare) // 2]:.1f} | {more[top]:.1f} (step {top}) "
                f"| {max(more_thread):.1f} | {sum(more) / len(more):.2f} | {own:.1f} | {extra:.0f} "
                f"| {mine:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
