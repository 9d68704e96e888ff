"""Runs a public script as it is and counts what it does: `_public_truth.py FOLDER SCRIPT [ARGUMENT …]`.

A forward is one of a module with parameters that is called from outside every other one. Not counted are a part of
such a module that is called by itself later (`model.decode(x)`), and what a module that no optimizer updates does in
training mode and without a graph (a target network). A model is what such modules are part of, if they have a graph.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "cases"))

import _count
import torch
from torch.nn.modules import module as modules
from torch.optim.optimizer import register_optimizer_step_pre_hook

import gpumon_agent

_open: list[Any] = []
_roots: dict[int, torch.nn.Module] = {}  # called from outside, held: an id is one module's
_graphs: dict[int, torch.nn.Module] = {}  # those that were with a graph
_parts: set[int] = set()  # what is in them
_beside: list[tuple[int, int]] = []  # of a root that may be a target network: its event, and whose
_updated: set[int] = set()  # parameters


def _begins(module: torch.nn.Module, args: Any) -> None:
    if not _open and (next(module.parameters(), None) is None or id(module) in _parts):
        return  # a loss, an activation, a part
    if not _open:
        _count._forward_begins(module, args)
        inner = module.module if hasattr(module, "module") else module  # of DistributedDataParallel
        if id(module) not in _roots:
            _roots[id(module)] = module
            _parts.update(id(each) for each in module.modules() if each is not module and each is not inner)
        if torch.is_grad_enabled():
            _graphs[id(inner)] = inner
        elif module.training:
            _beside.append((len(_count.events), id(module)))
    _open.append(module)


def _ended(module: torch.nn.Module, args: Any, output: Any) -> None:
    if _open and _open[-1] is module:
        _open.pop()
        if not _open:
            _count._forward_ended(module, args, output)


def _steps(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    _updated.update(id(p) for group in optimizer.param_groups for p in group["params"])


def _whole(module: torch.nn.Module) -> torch.nn.Module:
    """What it is part of, as an agent that has a critic and an actor."""
    every = [
        each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module) and not hasattr(each, "module")
    ]
    return next((each for each in every if any(child is module for child in each.children())), module)


def _marks(step: Any) -> Any:
    """gpumon_agent.step() ends an update by hand, where a script calls it."""

    def marked() -> None:
        _count.events.append("optimizer")
        step()

    return marked


def _settle() -> None:
    for at, whose in reversed(_beside):
        if _updated and not any(id(p) in _updated for p in _roots[whose].parameters()):
            del _count.events[at]
    wholes = {id(whole): whole for whole in map(_whole, _graphs.values())}
    _count.models += [
        {"name": type(each).__name__, "parameters": sum(p.numel() for p in each.parameters())}
        for each in wholes.values()
    ]


if __name__ == "__main__":
    folder, script, *arguments = sys.argv[1:]
    modules.register_module_forward_pre_hook(_begins)
    modules.register_module_forward_hook(_ended, always_call=True)
    register_optimizer_step_pre_hook(_steps)
    atexit.register(_settle)  # before the count is written: the last one registered runs first
    gpumon_agent.step = _marks(gpumon_agent.step)
    os.chdir(folder)
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(folder, script).parent)
    sys.path.append(folder)  # as where the repository is installed
    runpy.run_path(script, run_name="__main__")
