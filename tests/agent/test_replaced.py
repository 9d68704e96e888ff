"""What the agent replaces is in patching.LIST, all of it, and it is little: counted by identity, in every mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from gpumon_agent import patching

MOST = 15
FOR_OLDER_TORCH = {
    name for name, each in patching.LIST.items() if each.where.startswith(("only where torch has no", "before torch"))
}
SCRIPT = """
import atexit, builtins, gc, json, os, signal, sys, threading, types, warnings
import torch, torch._dynamo, torch.utils.checkpoint
try:
    import safetensors.torch
except ImportError:
    pass
mode = sys.argv[1]
OTHERS = ("sys", "builtins", "gc", "os", "signal", "threading", "warnings", "atexit", "safetensors.torch")

def attributes():
    found = {}
    for name, module in list(sys.modules.items()):
        if name in OTHERS or name == "torch" or name.startswith("torch."):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if issubclass(type(value), type) and str(value.__module__).startswith(("torch", "_sitebuiltins")):
                    for inner, attribute in list(vars(value).items()):
                        found[f"{value.__module__}.{value.__qualname__}.{inner}"] = attribute
    for inner, attribute in vars(type(exit)).items():
        found[f"_sitebuiltins.Quitter.{inner}"] = attribute
    return found

def ours(value):
    if type(value) in (staticmethod, classmethod, types.MethodType):
        value = value.__func__
    return type(value) is types.FunctionType and "gpumon_agent" in value.__code__.co_filename

device = "cuda" if "gpu" in mode else "cpu"
STATE = (int, float, str, bytes, type(None))  # a counter of hooks, whether a mode is on
before = {name: value for name, value in attributes().items() if type(value) not in (bool, *STATE)}
changed, mine = set(), set()

def look():
    now = attributes()
    changed.update(name for name, value in before.items() if now.get(name) is not value)
    mine.update(name for name, value in now.items() if ours(value))

class Net(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if looks:
            look()
        return y

class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        if looks:
            look()
        return gradient

looks = False
model = Net(64, 64).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
if "watch" in mode:
    import gpumon_agent
    gpumon_agent.watch(model, optimizer)
for step in range(12):
    looks = step in (0, 1, 5, 6, 7, 11)
    if step == 5 and mode != "bare" and "bare" not in mode:
        from gpumon_agent import agent
        agent.REGISTRY.agent.ask_census()
    y = model(torch.randn(8, 64, device=device))
    kept.append(y.detach())
    Looks.apply(y).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if looks:
        look()
during = sorted(changed), sorted(mine)
if "bare" not in mode:
    import gpumon_agent
    from gpumon_agent import agent
    assert agent.REGISTRY.agent is not None, "it was not watched"
    assert not any(agent.REGISTRY.agent.guard.failures.values()), agent.REGISTRY.agent.guard.failures
    gpumon_agent.stop()
after = attributes()
print(json.dumps({
    "changed": during[0],
    "ours": during[1],
    "left": sorted(name for name, value in after.items() if ours(value)),
    "still changed": sorted(name for name, value in before.items() if after.get(name) is not value),
}))
"""
PEAKS = {name for name in patching.LIST if name.endswith(("Stats", "DeviceStats"))}
HISTORY = {name for name in patching.LIST if "history" in name.lower() or name.endswith("Snapshot")}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    kept: dict[str, dict[str, set[str]]] = {}

    def seen(mode: str, environment: dict[str, str] | None = None) -> dict[str, set[str]]:
        if mode not in kept:
            folder = tmp_path_factory.mktemp("replaced")
            script = folder / "script.py"
            script.write_text(SCRIPT)
            launch = ["-m", "gpumon", "run"] if "run" in mode else []
            launch += ["--track-cpu"] if "track" in mode else []
            done = subprocess.run(
                [sys.executable, *launch, str(script), mode],
                env={**os.environ, **(environment or {}), "XDG_RUNTIME_DIR": str(folder), "GPUMON_GOVERNOR": "off"},
                capture_output=True,
                text=True,
                timeout=400,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            kept[mode] = {key: set(value) for key, value in json.loads(done.stdout.splitlines()[-1]).items()}
        return kept[mode]

    return seen


@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["watch", "run", "run track", "watch gpu", "run gpu"])
def test_all_that_is_replaced_is_in_the_list_and_goes_at_stop(mode: str, seen: Any, request: Any) -> None:
    environment = None
    if "gpu" in mode:
        environment = request.getfixturevalue("virtual_gpu")().environment
    bare = seen("bare gpu" if "gpu" in mode else "bare", environment)
    watched = seen(mode, environment)
    assert watched["ours"]
    assert watched["ours"] <= set(patching.LIST)
    if "watch" in mode:  # under `gpumon run` the agent was there before the script could look
        assert watched["changed"] - bare["changed"] == watched["ours"]
    assert watched["still changed"] - bare["still changed"] - PEAKS - HISTORY <= watched["ours"]
    assert watched["left"] <= PEAKS | HISTORY
    if "gpu" not in mode:
        assert watched["left"] == set()


@pytest.mark.timeout(1800)
def test_all_modes_together_replace_few(seen: Any, virtual_gpu: Any) -> None:
    environment = virtual_gpu().environment
    modes = {"watch": None, "run": None, "run track": None, "watch gpu": environment, "run gpu": environment}
    replaced = {name for mode, variables in modes.items() for name in seen(mode, variables)["ours"]}
    counted = {name for name in replaced if not name.startswith("safetensors.")}  # no attribute of torch or Python
    assert len(counted - FOR_OLDER_TORCH) <= MOST, sorted(counted)
    assert len(FOR_OLDER_TORCH) <= 4


def test_nothing_can_be_replaced_that_is_not_in_the_list() -> None:
    patches = patching.Patches()
    with pytest.raises(KeyError, match=r"sys\.exit is not in patching\.LIST"):
        patches.replace(sys, "exit", print)
    assert sys.exit is not print


def test_the_list_names_what_exists_or_says_where(tmp_path: Path) -> None:
    for each in patching.LIST.values():
        assert each.why
        assert each.noticed
        assert each.restored
