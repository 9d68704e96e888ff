"""torch.compile in its forms: the same graphs, no more recompiles, fullgraph fine, and phases nevertheless."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STEP = ["between", "forward", "backward", "optimizer"]
CASES = {
    "wrapped, watched before": STEP,
    "wrapped, watched after": STEP,
    "in place, watched before": STEP,
    "in place, watched after": STEP,
    "submodule, watched before": STEP,
    "function, watched before": ["forward inferred", "backward", "optimizer"],
    "with breaks, watched before": STEP,
}

SCRIPT = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

watched, *cases = sys.argv[1:]

class Net(torch.nn.Sequential):
    def forward(self, x):
        x = checkpoint(self[0], x, use_reentrant=False)
        if breaks:
            torch._dynamo.graph_break()
        return self[2](self[1](x))

answers = {}
for case in cases:
    form, order = case.split(", watched ")
    breaks = form == "with breaks"
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Net(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = dict(backend="aot_eager", fullgraph=not breaks)
    agent = None

    def watch(model):
        global agent
        if watched == "yes":
            from gpumon_agent.agent import Agent
            agent = Agent(publish=False)
            agent.adopt(model, optimizer)

    if order == "before":
        watch(model)
    called = model
    if form in ("wrapped", "with breaks"):
        called = torch.compile(model, **options)
    elif form == "in place":
        model.compile(**options)
    elif form == "function":
        called = torch.compile(lambda x: model(x).relu(), **options)
    elif form == "submodule":
        model[0] = torch.compile(model[0], **options)
    if order == "after":
        watch(called)
    losses = []
    for step in range(5):
        loss = called(torch.full((2 + step // 3, 8), 0.1 * step)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(repr(loss.item()))
    words = []
    if agent is not None:
        from gpumon_agent import wire
        for _, event in agent.recorder.drain():
            if isinstance(event, wire.Phase) and event.step == 2:
                words.append(event.phase + (" inferred" if event.flags & wire.INFERRED else ""))
        assert not [f for f in agent.guard.failures.values() if f], agent.guard.failures
        agent.leave("stopped")
    counted = {key: dict(counters[key]) for key in ("stats", "graph_break", "frames", "aot_autograd", "unimplemented")}
    answers[case] = [losses, counted, words]
print(json.dumps(answers))
"""


def answers(folder: Path, watched: str) -> dict[str, Any]:
    path = folder / "script.py"
    path.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(path), watched, *CASES], capture_output=True, text=True, timeout=300, check=False
    )
    if watched == "no" and "symbolically trace a dynamo-optimized function" in done.stderr:
        pytest.skip("this torch cannot compile a checkpoint in these forms, watched or not")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("compile")
    return answers(folder, "no"), answers(folder, "yes")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES)
def test_values_graphs_and_recompiles_are_the_same(both: tuple[dict[str, Any], dict[str, Any]], case: str) -> None:
    unwatched, watched = both[0][case], both[1][case]
    assert watched[:2] == unwatched[:2]
    assert unwatched[1]["stats"]


@pytest.mark.parametrize(("case", "phases"), CASES.items())
def test_phases_are_seen_around_compiled_code(
    both: tuple[dict[str, Any], dict[str, Any]], case: str, phases: list[str]
) -> None:
    assert both[1][case][2] == phases


QUIET = """
import json, sys
import torch
from torch._dynamo.utils import counters

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
agent = None
if sys.argv[1] == "yes":
    from gpumon_agent import governor
    from gpumon_agent.agent import Agent
    governor.READ_FIRST, governor.READ_AGAIN_NS = 4, 1 << 61
    governor.Governor._decide = lambda self: None
    agent = Agent(publish=False)
    agent.adopt(model, optimizer)
    agent.governor.read_every = agent.governor.ledger_every = 10**9

def step(x):
    loss = model(x).sum()
    loss.backward()
    return loss.detach() + 1

for _ in range(12):
    step(torch.ones(2, 8))
    optimizer.step()
if agent is not None:
    assert agent.phases.quiet_mark.idle
compiled = torch.compile(step, backend="eager")
for _ in range(3):
    compiled(torch.ones(2, 8))
    optimizer.step()
if agent is not None:
    assert agent.phases.quiet_mark.idle
print(json.dumps({key: dict(counters[key]) for key in ("stats", "graph_break", "frames", "unimplemented")}))
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("native", ["on", "off"])
def test_graphs_of_quiet_steps_and_the_frames_counted_are_the_same(
    tmp_path: Path, native: str, request: pytest.FixtureRequest
) -> None:
    if native == "on":
        request.getfixturevalue("native_reader")
    path = tmp_path / "script.py"
    path.write_text(QUIET)
    bare, watched = (
        subprocess.run(
            [sys.executable, str(path), watched], capture_output=True, text=True, timeout=100, check=True,
            env={**os.environ, "GPUMON_NATIVE": native},
        ).stdout
        for watched in ("no", "yes")
    )  # fmt: skip
    assert watched == bare
    assert json.loads(bare)["frames"]["total"] > 2
