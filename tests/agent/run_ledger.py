"""Runs a scenario as the shim would, and beside the agent's ledgers prints what a walk of the test's own finds.

python run_ledger.py SCRIPT ARGS…: JSON lines {"phase": …}, {"ledger": …, "walked": … or null}, {"peak": …}.
The walk knows nothing of the agent: it looks among all of the process's objects for optimizers, and counts storages by
their addresses.
"""

from __future__ import annotations

import atexit
import gc
import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpumon_agent import agent as agents
from gpumon_agent import shim, wire
from gpumon_agent.hooks import model_discovery

WALKED = ("forward", "backward", "optimizer")


def tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from tensors(each)


def walked() -> dict[str, int]:
    """Bytes on the device by owner, from the optimizers of this process and the modules around what they update."""
    import torch

    objects = gc.get_objects()  # their classes are asked, for a dead weak proxy answers isinstance() by raising
    optimizers = [each for each in objects if issubclass(type(each), torch.optim.Optimizer)]
    updated = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
    modules = [
        each
        for each in objects
        if issubclass(type(each), torch.nn.Module) and any(id(p) in updated for p in each.parameters())
    ]
    whole = {id(below): below for each in modules for below in each.modules()}.values()
    parameters = [p for module in whole for p in module.parameters(recurse=False)]
    owners = {
        "weights": parameters,
        "buffers": [b for module in whole for b in module.buffers(recurse=False)],
        "optimizer": [t for each in optimizers for t in tensors(dict(each.state))],
        "gradients": [
            each.grad
            for each in (*parameters, *(each for each in objects if type(each) is torch.Tensor and each.is_leaf))
            if each.grad is not None
        ],
    }
    del objects
    seen: set[int] = set()
    sizes = {}
    for owner, held in owners.items():
        sizes[owner] = 0
        for tensor in held:
            whole_tensor = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
            for part in (getattr(each, "_local_tensor", each) for each in whole_tensor):
                address = part.untyped_storage().data_ptr()
                if part.is_cuda and address not in seen:
                    seen.add(address)
                    sizes[owner] += part.untyped_storage().nbytes()
    return sizes


def main(script: str, *args: str) -> None:
    sys.path.insert(0, str(Path(script).parent))
    import _report

    agent = agents.REGISTRY.agent = agents.Agent(publish=False)
    model_discovery.install(shim._ToAgent())
    events: list[wire.NumberedEvent] = []
    found: dict[tuple[int, str, int], dict[str, int]] = {}

    def drain() -> None:
        events.extend(event for _, event in agent.recorder.drain())

    original = _report.Report.__call__

    def look(report: _report.Report, phase: str, **more: Any) -> None:
        drain()
        newest = next((e for e in reversed(events) if isinstance(e, wire.Ledger) and not e.peak), None)
        if newest is not None and newest.phase == phase and phase in WALKED:
            found[newest.step, newest.phase, newest.index] = walked()
        original(report, phase, **more)

    _report.Report.__call__ = look  # type: ignore[method-assign]

    def dump() -> None:
        agent.phases.finish()
        drain()
        for event in events:
            if isinstance(event, (wire.Ledger, wire.Phase)):
                kind = "phase" if isinstance(event, wire.Phase) else "peak" if event.peak else "ledger"
                told = msgspec.to_builtins({kind: msgspec.structs.asdict(event)})
                if kind == "ledger":
                    told["walked"] = found.get((event.step, event.phase, event.index))
                print(json.dumps(told))
        print(json.dumps({"failures": [name for name, count in agent.guard.failures.items() if count]}), flush=True)

    atexit.register(dump)
    gc.freeze()  # what was imported is not looked through at each reading point
    sys.argv = [script, *args]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
