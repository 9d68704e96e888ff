"""LBFGS's step against PyTorch's allocator, on the virtual GPU, by the numbers of the same problem on the CPU."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from gpumon.analysis.estimate.lbfgs import Lbfgs
from gpumon.analysis.estimate.model import ModelTensors, Tensor
from gpumon.analysis.estimate.simulator import SimulatedAllocator
from gpumon.analysis.estimate.traced import AllocationRecorder, PhaseBytes, trace
from gpumon.analysis.estimate.workload import OptimizerChoice, Workload

SHAPES = [(20_000, 300), (300,), (900, 300), (900,), (300, 900), (7, 300), (7,)]
SMALL = [(7, 5), (5,), (4, 7), (7,), (5, 7), (7, 5), (7,)]
"""The same problem on the CPU: what it decides does not ask how large it is."""
CASES = [
    "lbfgs,history_size=5,max_iter=4",
    "lbfgs,history_size=2,max_iter=2",  # its `max_eval` ends it after one iteration
    "lbfgs,history_size=2,max_iter=8,max_eval=6",
    "lbfgs,history_size=3,max_iter=20,line_search_fn=strong_wolfe",
]
STEPS = 4


def measure(shapes: str, small: str, cases: str, steps: str) -> None:
    """Of each case and step: the peak after the closure's first run, what stands at the end, and the pairs kept."""
    import json

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    numbers = []

    class Decided(TorchDispatchMode):
        """Numbers read from the CPU are noted; on the virtual GPU, which has none, the same ones are read."""

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is not torch.ops.aten._local_scalar_dense.default:
                return function(*args, **(kwargs or {}))
            if args[0].is_cuda:
                return numbers.pop(0)
            numbers.append(function(*args))
            return numbers[-1]

    def run(device: str, settings: dict[str, object], module: bool = False) -> list[tuple[int, ...]]:
        random = torch.Generator().manual_seed(0)
        batch, wide, wider = (4, 7, 9) if device == "cpu" else (4000, 1000, 3000)
        given = json.loads(small if device == "cpu" else shapes)
        parameters = [torch.nn.Parameter(torch.randn(shape, generator=random).to(device)) for shape in given]
        if module:
            model = torch.nn.Sequential(torch.nn.Linear(wide, wider), torch.nn.GELU(), torch.nn.Linear(wider, wide))
            inputs = torch.randn((batch, wide), generator=random).to(device)
            parameters = list(model.to(device).parameters())
        optimizer = torch.optim.LBFGS(parameters, **settings)
        called = 0

        def closure() -> torch.Tensor:
            nonlocal called
            called += 1
            optimizer.zero_grad()
            if module:
                output = model(inputs)
                loss = output.pow(2).sum()
                loss.backward()
            elif device == "cpu":
                loss = sum(((p**2 - 1) ** 2).mean() + (torch.cos(9 * p) * torch.sin(2 * p)).mean() for p in parameters)
                loss.backward()
            else:
                loss = torch.zeros((), device=device)
                for parameter in parameters:
                    parameter.grad = torch.empty_like(parameter)
            if called == 1 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            return loss

        found = []
        for _ in range(int(steps)):
            called = 0
            with Decided():
                optimizer.step(closure)
            if device == "cuda":
                (state,) = optimizer.state.values()
                figures = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
                found.append((*figures, len(state["old_dirs"])))
        return found

    for case in json.loads(cases):
        given = dict(setting.split("=") for setting in case.split(",")[1:])
        settings = {name: int(value) if value.isdigit() else value for name, value in given.items()}
        run("cpu", settings)
        print(json.dumps(run("cuda", settings)), flush=True)
        assert not numbers
    torch.cuda.empty_cache()
    run("cpu", {"history_size": 2, "max_iter": 5}, module=True)
    print(json.dumps(run("cuda", {"history_size": 2, "max_iter": 5}, module=True)))


def computed(case: str, steps: int = STEPS) -> list[tuple[int, int, int]]:
    """The first steps, one after the other."""
    memory, work = AllocationRecorder(SimulatedAllocator()), Workload(optimizer=OptimizerChoice.parse(case))
    sizes = [4 * Tensor("", shape).count for shape in SHAPES]
    for size in sizes:
        memory.take(size, "weights")
    gradients = [memory.take(size, "gradients") for size in sizes]

    def closure() -> None:
        for gradient in gradients:
            memory.drop(gradient)
        gradients[:] = [memory.take(size, "gradients") for size in sizes]

    optimizer = Lbfgs(memory, work, sizes, closure)
    found = []
    for _ in range(steps):
        closure()
        memory.close("backward")
        optimizer.step()
        memory.close("optimizer")
        found.append((memory.phases[-1].peak, memory.phases[-1].end, len(optimizer._pairs)))
    return found


def traced() -> list[PhaseBytes]:
    """The module that `measure` ends with."""
    from torch import empty, nn

    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(1000, 3000), nn.GELU(), nn.Linear(3000, 1000))

    work = Workload(4000, optimizer=OptimizerChoice.parse("lbfgs,history_size=2,max_iter=5"))
    return trace(made, lambda batch: empty(batch, 1000), work, lambda output: output.pow(2).sum())


def test_each_step_is_the_allocator_s_and_an_estimate_is_of_one_with_a_full_history(
    virtual_gpu: Callable[..., Any],
) -> None:
    from gpumon.analysis.estimate.from_module import FromTensors

    run = virtual_gpu(profile="a100-40").run
    printed = run(measure, json.dumps(SHAPES), json.dumps(SMALL), json.dumps(CASES), STEPS, timeout=250).stdout
    flat = sum(4 * Tensor("", shape).count for shape in SHAPES)
    wrong = []
    *lines, of_module = printed.splitlines()
    for case, line in zip(CASES, lines, strict=True):
        measured, ours = json.loads(line), computed(case)
        assert [pairs for *_, pairs in ours] == [pairs for *_, pairs in measured], case
        assert f"history_size={measured[-1][-1]}," in case
        tensors = tuple(Tensor(str(number), shape) for number, shape in enumerate(SHAPES))
        work = Workload(optimizer=OptimizerChoice.parse(case))
        full = FromTensors.of(ModelTensors("test", tensors)).play(work).phases[-1]
        steps = [*zip(range(1, STEPS + 1), ours, measured, strict=True), ("full", (full.peak, full.end), measured[-1])]
        for step, (peak, end, *_), (truth, left, _) in steps:
            # a line search that ends before its bracket has two ends keeps so many tensors fewer
            fewer = round((peak - truth) / flat) if "wolfe" in case and step in (1, 2) else 0
            for what, mine, theirs in (("peak", peak - fewer * flat, truth), ("end", end, left)):
                if abs(mine / theirs - 1) > 0.005 or not 0 <= fewer <= 4:
                    wrong.append(
                        f"{case}: step {step}, {what} {mine} for {theirs} ({100 * (mine / theirs - 1):+.2f} %)"
                    )
    (*_, (peak, _, pairs)), last = json.loads(of_module), traced()[-1]
    if pairs != 2 or abs(last.peak / peak - 1) > 0.005:
        wrong.append(f"traced: {last.peak} for {peak}, {pairs} pairs ({last.at_peak})")
    assert not wrong, "\n".join(wrong)


def test_without_settings_it_is_pytorch_s() -> None:
    """Both tell in six steps: the history is full by then, and so many pairs come with each."""
    from torch.optim import LBFGS

    usual = inspect.signature(LBFGS).parameters
    said = ",".join(f"{name}={usual[name].default}" for name in ("history_size", "max_iter"))
    assert computed("lbfgs", 6) == computed(f"lbfgs,{said}", 6)
