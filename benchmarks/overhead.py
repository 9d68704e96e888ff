"""What gpumon costs a training, measured from outside: `python benchmarks/overhead.py [--rounds 5] [--write FILE]`.

Each way of running the same training is a process of its own, and all ways take turns in random order:

bare, bare again     without any monitor, twice (A/A): the difference is the machine's noise
hooks                two empty hooks on the model, which take torch off its fastest path
gpumon               `gpumon_agent.watch()`, the governor on
gpumon, viewer       the same, followed by `gpumon attach --json`
gpumon, all read     GPUMON_GOVERNOR=off: every phase of every step is read, owners included
TraceML              its automatic mode, `trace_step` around each step (traceml-ai from PyPI, installed for this run)
history              `torch.cuda.memory._record_memory_history()`

Steps of 0.4 to 100 ms of linear layers; `rollout`: 300 forwards without gradients, then a step; `modules`: a thousand
small modules. Measured per step, after a second and 160 steps of warming up: CPU time of the training's thread, of its
process, and wall time. Reported is the median over the rounds of the difference to bare in the same round, with its
95 % interval (bootstrap of rounds). The training has the first core; its helper and the viewer have the others, or the
same one with `--one-core`. A row is void if the A/A's interval is wider than a third of what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import interval, options, percent, rounds, write

BARE = ("bare", "bare again")
WAYS = (*BARE, "hooks", "gpumon", "gpumon, viewer", "gpumon, all read", "TraceML", "history")
LAYERS = {"0.4 ms": 12, "1 ms": 26, "4.5 ms": 120, "20 ms": 560, "100 ms": 2800}
KINDS = (*LAYERS, "rollout", "modules")
WARM_STEPS = 160  # gpumon reads the first 100
CLOCKS = ("thread CPU", "process CPU", "wall")
TRACEML = "traceml-ai"
NOTE = """CPU and wall time of a step more than without a monitor, each way in processes of its own that take turns: the
median of the rounds, with its 95 % interval. `bare again` is the machine's noise: where its interval is wide, the rows
below it say little. On the virtual GPU kernels take no time, so every step is bound by the host. `gpumon, all read`
reads every phase and every owner in each step (`GPUMON_GOVERNOR=off`).
"""


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--rounds", type=int, default=5, help="processes per row (5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured in each process (3)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    parser.add_argument("--one-core", action="store_true", help="helper and viewer on the training's core")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        way, kind = args.child
        return child(way, kind, args.seconds)
    with environment("TraceML" in args.ways) as known:
        lines = [line for kind in args.kinds for line in table(kind, args, known)]
    write("What gpumon costs a training", "\n".join([NOTE, *lines]), args.write)


def table(kind: str, args: argparse.Namespace, known: Mapping[str, str]) -> Iterator[str]:
    ways: dict[str, Callable[[], list[float]]] = {
        way: partial(measured, way, kind, args, known) for way in dict.fromkeys((*BARE, *args.ways))
    }
    found = list(rounds(ways, args.rounds))
    alone = [median(each["bare"][clock] for each in found) for clock in range(len(CLOCKS))]
    step = ", ".join(f"{name} {value:.3f} ms" for name, value in zip(CLOCKS, alone, strict=True))
    yield f"| {kind}: bare {step} | thread CPU, % | process CPU, % | wall, % |"
    yield "|---|--:|--:|--:|"
    for way in list(ways)[1:]:
        cells = []
        for clock in range(len(CLOCKS)):
            middle, low, high = interval(
                percent([each["bare"][clock] for each in found], [each[way][clock] for each in found]), median
            )
            cells.append(f"{middle:+.1f} ({low:+.1f} to {high:+.1f})")
        yield f"| {way} | {' | '.join(cells)} |"
    yield ""


def measured(way: str, kind: str, args: argparse.Namespace, known: Mapping[str, str]) -> list[float]:
    """ms per step by each of `CLOCKS`, in a new process."""
    script, arguments = [__file__], ["--child", way, kind, "--seconds", str(args.seconds)]
    if way == "TraceML":
        script = ["-m", "traceml_ai.launcher.cli", "run", __file__, "--mode", "summary", "--args"]
    command = [sys.executable, *script, *arguments]
    env = {**known, "GPUMON_GOVERNOR": "off" if way == "gpumon, all read" else "on"}
    cores = sorted(os.sched_getaffinity(0))
    env["OVERHEAD_CORES"] = json.dumps([cores[:1], cores[:1] if args.one_core else cores[1:] or cores])
    with tempfile.TemporaryDirectory() as folder:
        env["OVERHEAD_RESULT"] = str(Path(folder) / "result.json")
        ran = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
        if ran.returncode:
            sys.exit(f"{way}, {kind}: {ran.stderr[-2000:]}")
        answer: list[float] = json.loads(Path(env["OVERHEAD_RESULT"]).read_text())
    return answer


@contextlib.contextmanager
def environment(with_traceml: bool) -> Iterator[dict[str, str]]:
    """A GPU's, real or virtual, with TraceML on the path."""
    import torch

    from gpumon import virtual_gpu

    virtual = not torch.cuda.is_available()
    known = virtual_gpu.environment() if virtual else dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        if with_traceml:
            subprocess.run(
                [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "-t", folder, TRACEML], check=True
            )
            known["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, known.get("PYTHONPATH"))))
        try:
            yield known
        finally:
            if virtual:
                virtual_gpu.remove_session(known["VGPU_SESSION"])


# ------------------------------------------------------------------------------------------------------- the training


def child(way: str, kind: str, seconds: float) -> None:
    own, others = json.loads(os.environ["OVERHEAD_CORES"])
    os.sched_setaffinity(0, others)  # what the agent starts inherits it
    import torch

    layers = LAYERS.get(kind, 12)
    modules = [torch.nn.Linear(64, 64) for _ in range(layers)]
    if kind == "modules":
        modules = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.0)) for _ in range(333)]
    model = torch.nn.Sequential(*modules).cuda()
    batch = torch.ones(32, 8 if kind == "modules" else 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    step_scope: Callable[[], AbstractContextManager[Any]] = nullcontext
    viewer = None
    if way == "hooks":
        model.register_forward_pre_hook(lambda *_: None)
        model.register_forward_hook(lambda *_: None)
    elif way.startswith("gpumon"):
        import gpumon_agent

        gpumon_agent.watch(model, optimizer)
        if way == "gpumon, viewer":
            viewer = subprocess.Popen(
                [sys.executable, "-m", "gpumon", "attach", "--json", str(os.getpid())], stdout=subprocess.DEVNULL
            )
    elif way == "TraceML":
        traceml_ai = importlib.import_module(TRACEML.replace("-", "_"))
        traceml_ai.init()
        step_scope = partial(traceml_ai.trace_step, model)
    elif way == "history":
        torch.cuda.memory._record_memory_history()
    os.sched_setaffinity(0, own)

    def run(for_s: float, least: int = 0) -> list[float]:
        steps, began = 0, [time.thread_time(), time.process_time(), time.perf_counter()]
        while time.perf_counter() - began[2] < for_s or steps < least:
            for _ in range(8):
                with step_scope():
                    if kind == "rollout":
                        with torch.no_grad():
                            for _ in range(300):
                                model(batch)
                    model(batch).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                steps += 1
        ended = [time.thread_time(), time.process_time(), time.perf_counter()]
        return [1000 * (b - a) / steps for a, b in zip(began, ended, strict=True)]

    run(1.0, WARM_STEPS)
    Path(os.environ["OVERHEAD_RESULT"]).write_text(json.dumps(run(seconds)))
    if viewer is not None:
        viewer.terminate()
        viewer.wait()


if __name__ == "__main__":
    main()
