"""The snapshot of an out-of-memory tells in which step and phase each block was allocated, if events were recorded."""

from __future__ import annotations

import json
import pickle
from typing import Any

from .conftest import Place


def keeps_a_block_of_each_forward(records):
    import torch

    model = torch.nn.Linear(256, 256, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if records:
        torch.cuda.memory._record_memory_history()
    kept = []
    while True:
        loss = model(torch.ones(8, 256, device="cuda")).sum()
        loss.backward()
        with torch.autograd.profiler.record_function("mine"):
            optimizer.step()
        kept.append(torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))


def snapshot(place: Place, records: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the file, what `gpumon snapshot` says of its device)"""
    failed = place.train(keeps_a_block_of_each_forward, records, GPUMON_OOM_SNAPSHOT="1", GPUMON_GOVERNOR="off")
    assert "OutOfMemoryError" in failed.stderr
    (path,) = place.reports.glob("snapshot-*")
    done = place.gpumon("snapshot", str(path), "--json")
    assert done.returncode == 0, done.stderr
    with path.open("rb") as file:
        held = pickle.load(file)  # our own
    (device,) = json.loads(done.stdout)["devices"]
    return held, device


def test_blocks_are_marked_by_step_and_phase(place: Place) -> None:
    held, device = snapshot(place, True)
    marked = {part["name"]: part["bytes"] for part in device["peak"]["by_mark"]}
    large = {name for name, size in marked.items() if size >= 100 << 20}
    assert held["gpumon"] == {"step": 6, "phase": "between"}  # a block is allocated after its step: the first in step 1
    assert large == {f"step {step}, between" for step in range(1, 6)}
    times = [each["time_us"] for each in held["external_annotations"]]
    assert times == sorted(times)
    names = {each["name"] for each in held["external_annotations"]}
    assert {"step 1, forward", "step 1, backward", "step 1, optimizer"} <= names
    assert any("Optimizer.step" in name for name in names)  # torch's own are left


def test_without_events_nothing_is_annotated(place: Place) -> None:
    held, device = snapshot(place, False)
    assert not held.get("external_annotations")
    assert device["peak"] is None
