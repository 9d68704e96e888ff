"""Reading a function's variables changes no dict that the program holds, and keeps nothing alive.

`frame_ways.py` holds such dicts in every way there is. Its results are compared with a bare run: for frames.py alone
under every Python that is installed, and for training with the agent, whose ledger and census read frames.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumon_agent import frames

HERE = Path(__file__).parent
AGENT = HERE.parents[1] / "agent"
NEWEST = 14


def pythons() -> list[str]:
    """Of pyenv, and those on the path."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {}
    for minor in range(10, NEWEST + 1):
        places = [*versions.glob(f"3.{minor}.*/bin/python"), *map(Path, os.get_exec_path())]
        for place in places:
            path = place if place.name == "python" else place / f"python3.{minor}"
            if path.is_file() and "shims" not in path.parts:
                found[minor] = str(path)
                break
    found[sys.version_info[1]] = sys.executable
    return sorted(found.values())


def alone(python: str, mode: str) -> str:
    done = subprocess.run(
        [python, str(HERE / "frame_ways.py"), mode],
        env={**os.environ, "PYTHONPATH": str(AGENT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("python", pythons())
def test_a_dict_of_a_frames_variables_stays_as_it_is(python: str) -> None:
    assert json.loads(alone(python, "look")) == json.loads(alone(python, "bare"))


@pytest.mark.parametrize("python", pythons())
def test_what_is_read_is_what_the_variables_are(python: str) -> None:
    alone(python, "read")


def training(folder: str, watched: bool, census: bool) -> None:
    """Prints what the program sees in its dicts. A look is two steps of training, or, with `census`, a census while all
    the ways wait, each in a thread of its own."""
    import json
    import sys
    import threading

    sys.path.insert(0, folder)
    import frame_ways
    import torch

    from gpumon_agent import agent as agents
    from gpumon_agent.leaks import census as censuses

    censuses.SLICE_NS = 100_000_000
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    agent = None
    if watched:
        agent = agents.Agent(publish=False)
        agents.REGISTRY.agent = agent
        agent.adopt(model, optimizer)

    def step() -> None:
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def steps() -> None:
        step()
        step()

    def take_census() -> None:
        assert agent is not None
        before = agent.leaks.census.newest
        assert agent.ask_census() is None
        newest = before
        while newest is before or newest is None or newest.cut:
            step()
            newest = agent.leaks.census.newest

    def freed(look: object) -> bool:
        big = torch.empty(100 << 20, dtype=torch.uint8, device="cuda")
        look()
        before = torch.cuda.memory_allocated()
        del big
        return before - torch.cuda.memory_allocated() == 100 << 20

    if not census:
        result = frame_ways.ways(steps)
        result["freed"] = freed(steps)
    else:
        lock = threading.Condition()
        waiting, results, number = [0], {}, [0]
        ways = list(frame_ways.WAYS)

        def look() -> None:
            with lock:
                mine = number[0]
                waiting[0] += 1
                lock.notify_all()
                lock.wait_for(lambda: number[0] > mine)

        def run(way: object) -> None:
            try:
                results[way.__name__] = way(look)
            finally:
                with lock:
                    ways.remove(way)
                    lock.notify_all()

        threads = [threading.Thread(target=run, args=(way,)) for way in frame_ways.WAYS]
        for thread in threads:
            thread.start()
        while True:
            with lock:
                lock.wait_for(lambda: waiting[0] == len(ways))
                if not ways:
                    break
                if watched:
                    take_census()
                waiting[0] = 0
                number[0] += 1
                lock.notify_all()
        for thread in threads:
            thread.join()
        result = results | {"freed": freed(take_census if watched else steps)}
    if agent is not None:
        agent.leave("stopped")
        assert not [each for each in agent.guard.failures.items() if each[1]]
    print(json.dumps(result, sort_keys=True))


@pytest.mark.torch
@pytest.mark.parametrize("census", [False, True], ids=["ledger", "census"])
def test_training_sees_the_same_dicts_with_the_agent(virtual_gpu: Callable[..., Any], *, census: bool) -> None:
    def run(*, watched: bool) -> Any:
        env = {"GPUMON_GOVERNOR": "off"}
        return json.loads(virtual_gpu().run(training, str(HERE), watched, census, env=env).stdout)

    assert run(watched=True) == run(watched=False)


def test_nobody_else_reads_the_variables_of_frames() -> None:
    agent = AGENT / "gpumon_agent"
    reads = {
        path.relative_to(agent).name
        for path in agent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "f_locals"
    }
    assert reads == {"frames.py"}


def test_of_a_deep_recursion_the_innermost_200_frames_are_read() -> None:
    def called(depth: int) -> list[Any]:
        return called(depth - 1) if depth else [*frames.outwards(sys._getframe())]

    assert {frame.f_code.co_name for frame in called(300)} == {"called"}
    assert len(called(300)) == 200
