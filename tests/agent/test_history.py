"""What the user reads of the allocator's blocks and its history is what an unwatched run reads, at every moment."""

from __future__ import annotations

import json
from typing import Any

import pytest


def train(watched: bool, steps: int, form: str, begins: int) -> None:
    """Leaks a tensor a step. Prints what each of torch's readers says, twice a step; and the step in which it began to
    record, with `form`. `begins`: that step; 0: the first in which the agent keeps stacks."""
    import hashlib
    import inspect
    import json
    import pickle
    import sys
    import tempfile
    from pathlib import Path

    import torch
    from torch import nn

    agent = None
    if watched:
        from gpumon_agent import agent as agents
        from gpumon_agent import wire

        agent = agents.REGISTRY.agent = agents.Agent("test", publish=False)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    if agent is not None:
        agent.adopt(model, optimizer)
    memory = torch.cuda.memory
    raw_enabled = getattr(torch._C._cuda_isHistoryEnabled, "__wrapped__", torch._C._cuda_isHistoryEnabled)
    raw = getattr(torch._C._cuda_memorySnapshot, "__wrapped__", torch._C._cuda_memorySnapshot)
    nothing = (None,) if "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters else ()
    own = Path(__file__).name
    forms = {
        "all": lambda: memory._record_memory_history(stacks="python"),
        "c++": lambda: memory._record_memory_history(max_entries=300),
        "alloc": lambda: memory._record_memory_history(context="alloc", stacks="python"),
        "state": lambda: memory._record_memory_history("state", stacks="python"),
        "no stacks": lambda: memory._record_memory_history(context=None),
        "legacy": lambda: memory._record_memory_history(
            True, trace_alloc_max_entries=1000, trace_alloc_record_context=True
        ),
    }

    def stack(of):
        # hooks make torch.nn take another way, so only the script's own lines are compared; None: no such key
        frames = of.get("frames")
        return frames and [[f["line"], f["name"]] for f in frames if Path(f["filename"]).name == own]

    def tidy(snapshot):
        kept = {key for key in snapshot if key not in ("segments", "device_traces")}
        known = {}

        def number(address):
            return known.setdefault(address, len(known))

        return [
            sorted(kept),
            [
                [
                    {key: value for key, value in segment.items() if key not in ("address", "blocks", "frames")},
                    stack(segment),
                    [
                        (b["address"] - segment["address"], b["size"], b["requested_size"], b["state"], stack(b), *b)
                        for b in segment["blocks"]
                    ],
                ]
                for segment in snapshot["segments"]
            ],
            [
                [
                    (event["action"], event["size"], number(event.get("addr")), stack(event), *sorted(event))
                    for event in trace
                ]
                for trace in snapshot["device_traces"]
            ],
        ]

    read = []
    stacks_on = stacks_kept = found = 0

    def look(step, *, closely=False):
        nonlocal stacks_on, stacks_kept
        stacks_on += raw_enabled()
        stacks_kept += any(block.get("frames") for s in raw(*nothing)["segments"] for block in s["blocks"])
        snapshot = tidy(memory._snapshot())
        told = [step, torch._C._cuda_isHistoryEnabled(), snapshot]
        told.append(tidy({"segments": torch.cuda.memory_snapshot(), "device_traces": []}))
        if closely:
            with tempfile.TemporaryDirectory() as folder:
                memory._dump_snapshot(f"{folder}/it")
                told.append(tidy(pickle.loads(Path(folder, "it").read_bytes())))
            read.append(told)
        else:
            read.append([step, told[1], hashlib.sha256(json.dumps(told).encode()).hexdigest()])

    if form == "from the start":
        memory._record_memory_history(stacks="python")
    leaked = []
    began = None
    last = steps - 1
    for step in range(steps):
        batch = torch.randn(16, 64, device="cuda")
        hidden = model(batch)
        leaked.append(torch.empty(512, device="cuda"))
        if form in forms and began is None and (step == begins if begins else watched and step > 10 and raw_enabled()):
            began = step
            last = min(last, step + 29)
            forms[form]()
        look(step, closely=began is not None and step < began + 2)
        hidden.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if began is not None and step == began + 20:
            del leaked[:]  # also those that were made before it began
            hidden = batch = None
            torch.cuda.empty_cache()
        look(step, closely=step == last)
        if agent is not None:
            events = [event for _, event in agent.recorder.drain()]
            newest = agent.leaks.census.newest
            found += newest is not None and any((group.where or "").startswith(own) for group in newest.groups)
            found += any(isinstance(event, wire.Ledger) and event.peak for event in events)
        if step == last:
            break
    if form == "and ends":
        memory._record_memory_history(None)
    if agent is not None:
        agent.leave("stopped")
        print([part for part, times in agent.guard.failures.items() if times], file=sys.stderr)
    look(steps, closely=True)
    print(json.dumps({"read": read, "began": began, "on": stacks_on, "kept": stacks_kept, "found": found}))


def ran(virtual_gpu: Any, watched: bool, steps: int, form: str, begins: int = 0) -> dict[str, Any]:
    completed = virtual_gpu().run(train, watched, steps, form, begins, env={"GPUMON_GOVERNOR": "off"})
    if watched:
        assert completed.stderr.splitlines()[-1] == "[]", completed.stderr
    told: dict[str, Any] = json.loads(completed.stdout)
    return told


def same(watched: dict[str, Any], bare: dict[str, Any]) -> None:
    assert len(watched["read"]) == len(bare["read"])
    for mine, theirs in zip(watched["read"], bare["read"], strict=True):
        assert mine == theirs


def test_readers_tell_what_they_tell_in_a_bare_run_while_a_leak_is_looked_for(virtual_gpu: Any) -> None:
    watched = ran(virtual_gpu, True, 400, "never")
    assert watched["on"]
    assert watched["kept"] > 300
    assert watched["found"]
    bare = ran(virtual_gpu, False, 400, "never")
    assert not bare["on"]
    assert not bare["kept"]
    same(watched, bare)


@pytest.mark.parametrize(
    ("form", "begins"),
    [
        ("all", 0), ("c++", 0), pytest.param("all", 50, marks=pytest.mark.long),
        pytest.param("alloc", 50, marks=pytest.mark.long), ("state", 50), ("no stacks", 50), ("legacy", 50),
    ],
)  # fmt: skip
def test_a_history_that_the_user_begins_has_the_users_events_alone(virtual_gpu: Any, form: str, begins: int) -> None:
    watched = ran(virtual_gpu, True, 80, form, begins)
    assert watched["kept"]
    assert watched["began"]
    same(watched, ran(virtual_gpu, False, 80, form, watched["began"]))


def test_a_history_recorded_from_the_start_is_complete(virtual_gpu: Any) -> None:
    same(ran(virtual_gpu, True, 40, "from the start"), ran(virtual_gpu, False, 40, "from the start"))
