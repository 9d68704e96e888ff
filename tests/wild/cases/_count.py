"""What a case counts of itself: forwards of its models, backwards, optimizer steps, and the allocator's highest moment.

The truth is written as JSON to $WILD_TRUTH.RANK as the process ends, or at `write()` where a process has no such end.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

events: list[str] = []
"""forward, eval, backward, optimizer: each as it ended"""
models: list[dict[str, Any]] = []
_depth = 0
_inside = 0  # a model's forward: what is differentiated there is a tracer's or the model's own business
_steps: int | None = None
_told = False  # with its rank


def root(*modules: torch.nn.Module, trained: bool = True) -> None:
    """Count the forwards of these. One that is not `trained` (an average of the weights) is no model of its own."""
    for module in modules:
        if trained:
            model(module)
        module.register_forward_pre_hook(_forward_begins)
        module.register_forward_hook(_forward_ended)


def model(module: torch.nn.Module) -> None:
    """A model that is trained: the whole, where a part of it is called."""
    models.append({"name": type(module).__name__, "parameters": sum(p.numel() for p in module.parameters())})


def method(module: torch.nn.Module, name: str) -> None:
    """Count the calls of this method of a model as its forwards: training goes in there."""
    inner = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        _forward_begins(module, args)
        output = inner(*args, **kwargs)
        _forward_ended(module, args, output)
        return output

    setattr(module, name, call)


def step() -> None:
    """A step of a case that has no optimizer's end of its own: one that acts inside backward."""
    global _steps
    _steps = (_steps or 0) + 1


def said(text: object) -> None:
    """A line of the first rank's own output, which must be the same when it is watched."""
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"case: {text}\n")
        sys.stdout.flush()


def write(**more: Any) -> None:
    """The truth so far; the last one stays. A process that has written it with its rank does not as it ends, too."""
    global _told
    if "WILD_TRUTH" not in os.environ or not (events or more) or (_told and not more):
        return
    _told = bool(more)
    steps = sum(1 for a, b in zip(events, [*events[1:], ""], strict=True) if a == "optimizer" and b != "optimizer")
    peaks = [torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())]
    truth = {
        "rank": int(os.environ.get("RANK", more.pop("rank", 0))),
        "steps": steps if _steps is None else _steps,
        "events": events,
        "models": models,
        "peak": max(peaks, default=0),
        **more,
    }
    with open(f"{os.environ['WILD_TRUTH']}.{truth['rank']}", "w") as file:
        json.dump(truth, file)


def _forward_begins(module: torch.nn.Module, args: Any) -> None:
    global _inside
    _inside += 1


def _forward_ended(module: torch.nn.Module, args: Any, output: Any) -> None:
    global _inside
    _inside -= 1
    # within a backward it is a recomputation; within itself, Lightning's training_step in place of forward
    if not _depth and not _inside:
        events.append("forward" if torch.is_grad_enabled() else "eval")


def _counted(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _depth
        _depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            _depth -= 1
            if not _depth and not _inside:
                events.append("backward")

    return call


def _stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _depth and not _makes_state():
        events.append("optimizer")


def _makes_state() -> bool:
    """Whether a distributed checkpoint has the optimizer step, with gradients of zero, for state to load into."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "_init_optim_state":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


torch.Tensor.backward = _counted(torch.Tensor.backward)  # type: ignore[method-assign]
torch.autograd.backward = _counted(torch.autograd.backward)
torch.autograd.grad = _counted(torch.autograd.grad)
register_optimizer_step_post_hook(_stepped)
if "WILD_TRUTH" in os.environ:
    atexit.register(write)
