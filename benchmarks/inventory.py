"""What it costs to count bytes by owner and to describe a model: medians and minima, on the CPU, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from gpumon_agent.allocator.cpu import StorageTracker, resident_bytes
from gpumon_agent.attribution import describe
from gpumon_agent.attribution.activations import Activations
from gpumon_agent.attribution.graph import GraphWalk, Places
from gpumon_agent.attribution.inventory import Inventory
from gpumon_agent.attribution.peak_breakdown import Block, compose


def line(what: str, measured: list[float]) -> None:
    ordered = sorted(measured)
    print(f"{what:<58} median {ordered[len(ordered) // 2] * 1e6:9.1f} µs   min {ordered[0] * 1e6:9.1f} µs")


def timed(act: Callable[[], object], times: int) -> list[float]:
    measured = []
    for _ in range(times):
        began = time.perf_counter()
        act()
        measured.append(time.perf_counter() - began)
    return measured


def slices(parts: Iterator[object]) -> list[float]:
    measured = []
    began = time.perf_counter()
    for _ in parts:
        measured.append(time.perf_counter() - began)
        began = time.perf_counter()
    return measured


def tracked(times: int) -> tuple[list[float], list[float]]:
    """The same small step without and with the tracker of storages, in turns."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.randn(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    without: list[float] = []
    under: list[float] = []
    timed(step, 10)
    for _ in range(times):
        without += timed(step, 1)
        tracker = StorageTracker()
        tracker.start()
        under += timed(step, 1)
        tracker.stop()
    return without, under


def graphs() -> None:
    """Walks over what 500 linear layers and 500 GELUs saved; a peak composed from the events of such a backward."""
    model = nn.Sequential(*(layer for _ in range(500) for layer in (nn.Linear(8, 8), nn.GELU())))
    output = model(torch.randn(2, 8))
    places = Places()
    places.add(0, model)
    line("a walk over the graph of 500 linear layers and 500 GELUs", timed(lambda: GraphWalk([output], places), 100))
    walk = GraphWalk([output], places)

    def note() -> None:
        Activations(lambda: places, print, limited=False).walk([output])

    line(f"the same, {len(walk.saved):,} tensors noted", timed(note, 100))
    events = [
        {"action": action, "addr": address, "size": 512}
        for address in range(1500)
        for action in ("alloc", "free_requested")
    ]
    before = {address: Block("weights", 512) for address in range(5000, 8000)}
    line(
        "a peak composed from 3,000 events and 3,000 blocks",
        timed(lambda: compose(events, 3000 * 512, before, before, {}, forward=False), 100),
    )


def main() -> None:
    device = torch.device("cpu")
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(500)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
    inventory = Inventory()
    inventory.watch(model, [optimizer])
    inventory.owners(device)
    line(
        "owners of 1,000 parameters, AdamW, in the middle of a step",
        timed(lambda: inventory.owners(device, fresh=False), 300),
    )
    line("the same at the end of a step", timed(lambda: inventory.owners(device), 300))
    large = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10_000)))
    line(
        "one slice of describing 10,000 modules",
        slices(describe.parts(large, [], index=0, revision=0, name="benchmark", found=True)),
    )
    graphs()
    line("resident memory", timed(resident_bytes, 1000))
    without, under = tracked(300)
    line("a step of 8 linear layers with AdamW, untracked", without)
    line("the same with every storage tracked", under)


if __name__ == "__main__":
    main()
