"""CUDA graphs: capture as any step, replays labelled as what they are, and said so once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

Gpu = Callable[..., Any]
CAPTURED = ["between", "forward", "backward", "optimizer"]


def train(parts: str) -> None:
    """Four eager steps, a capture of one step (or of its `parts`, each a graph), five replays; prints what was seen."""
    import json

    import torch

    from gpumon_agent import agent, wire

    watched = agent.Agent(publish=False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), capturable=True)
    watched.adopt(model, optimizer)
    x = torch.randn(8, 64, device="cuda")

    def gradients() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            gradients()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2 if parts == "two graphs" else 1)]
    with torch.cuda.graph(graphs[0]):
        gradients()
        if parts == "whole":
            optimizer.step()
    if parts == "two graphs":
        with torch.cuda.graph(graphs[1]):
            optimizer.step()
    for _ in range(5):
        x.copy_(torch.randn(8, 64))
        for graph in graphs:
            graph.replay()
        if parts == "eager optimizer":
            optimizer.step()
    watched.phases.finish()
    watched.leave("stopped")
    assert not hasattr(torch.cuda.CUDAGraph.replay, "__wrapped__")
    events = [event for _, event in watched.recorder.drain()]
    steps: dict[int, list[Any]] = {}
    for phase in (e for e in events if isinstance(e, wire.Phase)):
        known = phase.allocated_peak is not None
        steps.setdefault(phase.step, []).append((phase.phase, bool(phase.flags & wire.INFERRED), known))
        assert phase.allocated is not None
        assert phase.reserved_peak is not None
    closed = sum(isinstance(e, wire.Step) for e in events)
    notices = [e.text for e in events if isinstance(e, wire.Notice)]
    print(json.dumps([list(steps.values()), closed, notices, watched.guard.failures]))


@pytest.mark.parametrize(
    ("parts", "replayed", "closed"),
    [
        ("whole", ["between", "graph replay"], 10),
        ("two graphs", ["between", "graph replay", "between", "graph replay"], 10),
        ("eager optimizer", ["between", "graph replay", "optimizer"], 9),
    ],
)
def test_a_replay_is_a_window_of_its_own_without_a_peak(
    virtual_gpu: Gpu, parts: str, replayed: list[str], closed: int
) -> None:
    said = virtual_gpu().run(train, parts, env={"GPUMON_GOVERNOR": "off"}).stdout
    steps, steps_closed, notices, failures = json.loads(said)
    seen = [[phase for phase, _, _ in step] for step in steps]
    assert seen[1:4] == [CAPTURED] * 3
    if parts == "eager optimizer":  # the capture ends in the middle of a step
        assert seen[4] == [*CAPTURED[:3], *replayed]
        assert seen[5:] == [replayed] * 4
    else:
        assert seen[4] == CAPTURED
        assert seen[5:] == [replayed] * 5
    assert steps_closed == closed
    for phase, inferred, known in (window for step in steps for window in step):
        assert inferred == (phase == "graph replay")
        assert known == (phase != "graph replay")
    assert len(notices) == 1
    assert "CUDA graph is replayed" in notices[0]
    assert not any(failures.values())


def train_graphed(how: str) -> None:
    """Eight steps whose forward and backward are graphs inside; prints the phases seen and the notices."""
    import json
    import warnings

    import torch

    from gpumon_agent import agent, wire

    warnings.simplefilter("ignore")
    watched = agent.Agent(publish=False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched.adopt(model, optimizer)
    x = torch.randn(8, 64, device="cuda", requires_grad=how == "callables")
    if how == "compiled":
        call = torch.compile(model, mode="reduce-overhead")
    else:
        call = torch.cuda.make_graphed_callables(model, (x,))
    for _ in range(8):
        call(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    watched.phases.finish()
    events = [event for _, event in watched.recorder.drain()]
    phases = [[e.phase for e in events if isinstance(e, wire.Phase) and e.step == step] for step in range(8)]
    overlapped = any(e.flags & wire.OVERLAPPED for e in events if isinstance(e, wire.Phase))
    notices = [e.text for e in events if isinstance(e, wire.Notice)]
    print(json.dumps([phases, overlapped, notices, watched.guard.failures]))


@pytest.mark.parametrize("how", ["callables", "compiled"])
def test_replays_inside_phases_belong_to_them(virtual_gpu: Gpu, how: str) -> None:
    gpu = virtual_gpu()
    if how == "compiled" and gpu.run("import triton", check=False).returncode:
        pytest.skip("torch.compile for CUDA needs triton, which is not beside this torch")
    said = gpu.run(train_graphed, how, env={"GPUMON_GOVERNOR": "off"}).stdout
    phases, overlapped, notices, failures = json.loads(said)
    assert phases == [["load", *CAPTURED[1:]], *[CAPTURED] * 7]
    assert not overlapped
    assert ["CUDA graph is replayed" in notice for notice in notices] == [True]
    assert not any(failures.values())
