"""Accuracy of estimates against the allocator: `python benchmarks/estimate.py [--write FILE]`.

truth     each scenario's script on the virtual GPU (or a real one): the maximum `memory_allocated` and
          `memory_reserved` of its steps. `gpumon dryrun` runs the same script, so it has no column.
tiers     the scenario's model, batch and loss as functions (tests/_shared/factories.py), given to each tier.
peers     other tools, installed into a folder for this run, given the same module and batch.

Errors are of the allocated peak; of several ranks the highest counts. Seconds are for one estimate in a process with
torch and the model's code imported. A scenario that a tool refuses has no figure. factories.UNSAID lists the scenarios
whose loop cannot be given as functions, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import MIB, options, write

ROOT = Path(__file__).parents[1]
SHARED = (ROOT / "tests", ROOT / "tests" / "_shared")
PEERS = ("accelerate", "deepspeed", "torch-kitsune")
NEEDED = ("hjson", "py-cpuinfo", "einops", "msgpack")  # what DeepSpeed's import needs beyond installed packages

COLUMNS = {
    "tier 1": "the model's tensors and the optimizer, without a forward",
    "tier 2": "traced without a GPU, as by `gpumon estimate --config` or `--model --input`",
    "MemTracker": "`torch.distributed._tools`, fake mode",
    "accelerate": "`accelerate estimate-memory`, training with Adam",
    "DeepSpeed": "`estimate_zero2_model_states_mem_needs`, one GPU, no offload",
    "kitsune": "torch-kitsune's `predict_memory`",
    "16 B": "16 bytes a parameter",
    "18 B": "18 bytes a parameter",
}
REFUSALS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """One tool on one scenario; no bytes if it refused."""

    scenario: str
    tool: str
    seconds: float
    peak: int | None = None
    reserved: int | None = None


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--only", nargs="+", metavar="SCENARIO", default=[], help="these scenarios only")
    parser.add_argument("--child", choices=["tiers", "peers", "tracker"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path[:0] = map(str, SHARED)
    if args.child:
        warnings.simplefilter("ignore")
        for answer in {"tiers": tiers, "peers": peers, "tracker": tracker}[args.child](args.only):
            print("\n" + json.dumps(vars(answer)), flush=True)
        return
    from factories import CASES

    names = args.only or list(CASES)
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder))
        truth = {name: run_scenario(name) for name in names}
        answers = [*child("tiers", names), *child("peers", names, folder), *child("tracker", names, on_device=True)]
    import torch

    by = {(answer.scenario, answer.tool): answer for answer in answers}
    text = "\n".join([*summary(truth, by), "", *table(truth, by)]) + "\n"
    where = "on a GPU" if torch.cuda.is_available() else "on the virtual GPU (a100-40)"
    load = f"load {os.getloadavg()[2]:.1f}"
    write("How accurate estimates are", text, args.write, f"Measured {where}, torch {torch.__version__}, {load}")


# --------------------------------------------------------------------------------------------------------- the truth


def device_environment(**options: Any) -> dict[str, str]:
    """With "cuda"."""
    import torch

    from gpumon import virtual_gpu

    return dict(os.environ) if torch.cuda.is_available() else virtual_gpu.environment(**options)


def leave(environment: dict[str, str]) -> None:
    from gpumon import virtual_gpu

    if "VGPU_SESSION" in environment and "VGPU_SESSION" not in os.environ:
        virtual_gpu.remove_session(environment["VGPU_SESSION"])


def run_scenario(name: str) -> Answer:
    from scenarios.catalogue import BY_NAME

    scenario = BY_NAME[name]
    environment = device_environment(**{**scenario.options, "memory": None})
    began = time.perf_counter()
    try:
        run = subprocess.run(scenario.command("--report"), env=environment, check=True, capture_output=True, text=True)
    finally:
        leave(environment)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('{"')]
    phases = [phase for line in lines if line.get("step") for phase in line.get("phases", [])]
    return Answer(
        name,
        "truth",
        time.perf_counter() - began,
        max(phase["allocated_peak"] for phase in phases),
        max(phase["reserved_peak"] for phase in phases),
    )


def install(folder: Path) -> None:
    """Installs the peers. One that fails has no answers."""
    for package in (*NEEDED, *PEERS):
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), package]
        subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=False)


def child(kind: str, names: list[str], folder: str = "", *, on_device: bool = False) -> list[Answer]:
    """Runs this file for one kind of tool and parses its output."""
    environment = device_environment(profile="a100-40") if on_device else dict(os.environ)
    if folder:  # after PYTHONPATH, before site-packages
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), folder)))
    command = [sys.executable, __file__, "--child", kind, "--only", *names]
    try:
        run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    finally:
        if on_device:
            leave(environment)
    return [Answer(**json.loads(line)) for line in run.stdout.splitlines() if line.startswith('{"scenario"')]


def asked(scenario: str, tool: str, answer: Callable[[], tuple[int, int | None]]) -> Answer:
    began = time.perf_counter()
    try:
        peak, reserved = answer()
    except REFUSALS as reason:
        print(f"{tool}, {scenario}: {type(reason).__name__}: {reason}", file=sys.stderr)
        return Answer(scenario, tool, time.perf_counter() - began)
    return Answer(scenario, tool, time.perf_counter() - began, peak, reserved)


# -------------------------------------------------------------------------------------------------------- our own


def tiers(names: list[str]) -> Iterator[Answer]:
    from factories import CASES

    from gpumon.analysis.estimate import from_module

    for name in names:
        case, work = CASES[name], workload(CASES[name])

        def from_tensors(case: Any = case, work: Any = work) -> tuple[int, int]:
            module = from_module.on_meta(case.factory)
            return figures(from_module.FromModule(module, case.factory).play(work).phases)

        def traced(case: Any = case, work: Any = work) -> tuple[int, int]:
            made = from_module.on_meta(case.factory)
            subject = from_module.FromModule(made, case.factory, case.batches, case.loss)
            how = {"built_on_device": case.built_on_device, "iterations": case.iterations}
            return figures(subject.traced(work, **how).phases)

        yield asked(name, "tier 1", from_tensors)
        yield asked(name, "tier 2", traced)


def workload(case: Any) -> Any:
    from gpumon.analysis.estimate.workload import PRECISIONS, OptimizerChoice, Workload

    return Workload(
        batch=case.batch,
        precision=PRECISIONS[case.precision],
        optimizer=OptimizerChoice.parse(case.optimizer),
        accumulation=case.accumulation,
        set_to_none=case.set_to_none,
        world_size=case.ranks,
        bucket_views=case.bucket_views,
        zero=case.zero,
        flat=case.flat,
    )


def figures(phases: Any) -> tuple[int, int]:
    return max(phase.peak for phase in phases), max(phase.reserved for phase in phases)


# ---------------------------------------------------------------------------------------------------------- others


def peers(names: list[str]) -> Iterator[Answer]:
    """Sums over the module as built on the host."""
    import torch
    from factories import CASES

    for name in names:
        case = CASES[name]
        module = case.factory()
        net = getattr(module, "net", module)
        count = sum(parameter.numel() for parameter in net.parameters())
        first = next(iter(torch.utils._pytree.tree_leaves(case.batches(case.batch))))

        def accelerate(net: Any = net, case: Any = case) -> tuple[int, None]:
            from accelerate.commands.estimate import estimate_training_usage
            from accelerate.utils import calculate_maximum_sizes

            kind = {"fp32": "float32", "bf16-autocast": "bfloat16", "fp16-autocast": "float16"}[case.precision]
            return max(estimate_training_usage(calculate_maximum_sizes(net)[0], kind).values()), None

        def deepspeed(count: int = count) -> tuple[int, None]:
            from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

            return estimate_zero2_model_states_mem_needs(count, cpu_offload=False)[1], None

        def kitsune(net: Any = net, case: Any = case, first: Any = first) -> tuple[int, None]:
            from kitsune.predict import predict_memory

            optimizer = "sgd" if case.optimizer.startswith("sgd") else "adamw"
            return predict_memory(net, tuple(first.shape[1:]), case.batch, optimizer=optimizer).total_bytes, None

        yield asked(name, "accelerate", accelerate)
        yield asked(name, "DeepSpeed", deepspeed)
        yield asked(name, "kitsune", kitsune)
        yield asked(name, "16 B", lambda count=count: (16 * count, None))
        yield asked(name, "18 B", lambda count=count: (18 * count, None))


def tracker(names: list[str]) -> Iterator[Answer]:
    """MemTracker as documented, for as many iterations as tier 2."""
    import torch
    from factories import CASES
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._pytree import tree_map

    def to_device(value: Any) -> Any:
        return value.to("cuda") if isinstance(value, torch.Tensor) else value

    def track(case: Any) -> tuple[int, None]:
        from gpumon.analysis.estimate.workload import OPTIMIZERS, OptimizerChoice

        wanted = OptimizerChoice.parse(case.optimizer)
        settings = {name: float(value) for name, value in wanted.settings} | {wanted.form: True}
        kinds = {"bf16-autocast": torch.bfloat16, "fp16-autocast": torch.float16}
        memory = MemTracker()
        with FakeTensorMode(allow_non_fake_inputs=True):
            with torch.device("cuda"):
                module = case.factory()
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            optimizer = getattr(torch.optim, OPTIMIZERS[wanted.name])(trained, **settings)
            memory.track_external(module, optimizer)
            with memory:
                for _ in range(case.iterations):
                    for _ in range(case.accumulation):
                        given = tree_map(to_device, case.batches(case.batch))
                        with torch.autocast("cuda", kinds.get(case.precision), enabled=case.precision in kinds):
                            output = module(**given) if isinstance(given, dict) else call(module, given)
                            loss = case.loss(output) if case.loss else output
                        loss.backward()
                        memory.reset_mod_stats()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=case.set_to_none)
                    del given, output, loss
        return memory.get_tracker_snapshot("peak")[torch.device("cuda:0")]["Total"], None

    for name in names:
        yield asked(name, "MemTracker", lambda name=name: track(CASES[name]))


def call(module: Any, given: Any) -> Any:
    return module(*given) if isinstance(given, tuple) else module(given)


# --------------------------------------------------------------------------------------------------------- the tables


def error(answer: Answer | None, truth: Answer, what: str = "peak") -> float | None:
    """0.01: one per cent too much."""
    said = getattr(answer, what) if answer is not None else None
    return None if said is None else said / getattr(truth, what) - 1


def summary(truth: dict[str, Answer], by: dict[tuple[str, str], Answer]) -> Iterator[str]:
    yield "Absolute errors of the allocated peak over the scenarios that the tool can estimate; seconds for each.\n"
    yield "| tool | what it is | scenarios | median | 90th percentile | worst | seconds, median |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for tool, what in COLUMNS.items():
        yield _summary_row(tool, what, truth, by, tool, "peak")
    yield _summary_row("tier 2, reserved", "tier 2, error of the reserved peak", truth, by, "tier 2", "reserved")
    seconds = median(answer.seconds for answer in truth.values())
    yield f"| tier 3 | the script itself, by `gpumon dryrun` | {len(truth)} | 0 | 0 | 0 | {seconds:.1f} |"


def _summary_row(
    title: str, what: str, truth: dict[str, Answer], by: dict[tuple[str, str], Answer], tool: str, figure: str
) -> str:
    found = [answer for name in truth if (answer := by.get((name, tool))) is not None and answer.peak is not None]
    errors = sorted(abs(error(answer, truth[answer.scenario], figure) or 0) for answer in found)
    if not errors:
        return f"| {title} | {what} | 0 | | | | |"
    seconds = median(answer.seconds for answer in found)
    worst, ninetieth = errors[-1], errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    cells = (f"{100 * value:.3f} %" for value in (median(errors), ninetieth, worst))
    took = f"{seconds:.2g}" if seconds >= 0.001 else "< 0.001"
    return f"| {title} | {what} | {len(errors)} | {' | '.join(cells)} | {took} |"


def table(truth: dict[str, Answer], by: dict[tuple[str, str], Answer]) -> Iterator[str]:
    yield "Errors of each scenario. An empty cell: the tool cannot estimate it.\n"
    yield f"| scenario | peak, MiB | reserved, MiB | {' | '.join(COLUMNS)} | tier 2, reserved |"
    yield f"|---|--:|--:|{'--:|' * (len(COLUMNS) + 1)}"
    for name, real in truth.items():
        offs = [error(by.get((name, tool)), real) for tool in COLUMNS]
        offs.append(error(by.get((name, "tier 2")), real, "reserved"))
        cells = [_percent(off) for off in offs]
        yield f"| {name} | {real.peak / MIB:,.1f} | {real.reserved / MIB:,.0f} | {' | '.join(cells)} |"  # type: ignore[operator]


def _percent(off: float | None) -> str:
    if off is None:
        return ""
    return "0" if off == 0 else f"{100 * off:+.3f} %" if abs(off) < 0.01 else f"{100 * off:+.1f} %"


if __name__ == "__main__":
    main()
