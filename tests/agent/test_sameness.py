"""Watched training is the same training: values, pickles, copies, graphs, lifetimes, and nothing left after stop()."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import time
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import gpumon_agent
from gpumon_agent import agent as agents


def python(script: str, folder: Path, *, env: dict[str, str] | None = None) -> str:
    import os

    path = folder / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder), **(env or {})},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


VALUES = """
import hashlib, io, os, random, sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
random.seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(16, 64), nn.Linear(64, 4), nn.Dropout(0.3)
    def forward(self, x):
        return self.b(self.drop(checkpoint(self.a, x, use_reentrant=False)))

device = os.environ.get("DEVICE", "cpu")
model = Net().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler(device, init_scale=4.0)
if os.environ.get("WATCHED"):
    import gpumon_agent
    gpumon_agent.watch(model, optimizer)
for step in range(30):
    for _ in range(2):
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(torch.randn(8, 16, device=device)).float().pow(2).mean()
        scaler.scale(loss / (0.0 if step == 7 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(repr(loss.item()), random.random())
    model.eval()
    with torch.no_grad():
        print(repr(model(torch.ones(1, 16, device=device)).sum().item()))
    model.train()
if device == "cuda":
    print(torch.cuda.max_memory_allocated(), hashlib.sha256(torch.cuda.get_rng_state().numpy().tobytes()).hexdigest())
state = [s[k] for s in optimizer.state.values() for k in sorted(s)]
for tensor in (*model.parameters(), torch.get_rng_state(), *state):
    print(hashlib.sha256(tensor.detach().cpu().numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("governor", ["on", "off"])  # off: every step is sampled, every graph walked
def test_losses_parameters_and_random_states_are_bit_identical(tmp_path: Path, governor: str) -> None:
    assert python(VALUES, tmp_path) == python(VALUES, tmp_path, env={"WATCHED": "1", "GPUMON_GOVERNOR": governor})


@pytest.mark.gpu
@pytest.mark.parametrize("governor", ["on", "off"])
def test_on_a_gpu_too(tmp_path: Path, governor: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU on this machine")
    env = {"DEVICE": "cuda", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    watched = python(VALUES, tmp_path, env={**env, "WATCHED": "1", "GPUMON_GOVERNOR": governor})
    assert python(VALUES, tmp_path, env=env) == watched


def saved(model: nn.Module) -> bytes:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("make", [pickle.dumps, saved])
def test_a_pickle_is_the_unwatched_one_to_the_byte(watch: Any, make: Any) -> None:
    model = nn.Linear(4, 4)
    model.register_forward_hook(print)
    before = make(model)
    watch(model)
    assert make(model) == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_is_not_watched(watch: Any, duplicate: Any) -> None:
    model = nn.Linear(4, 4)
    watch(model)
    ema = duplicate(model)
    ema(torch.ones(2, 4))
    assert watch.words() == []
    for name in ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called"):
        assert type(ema.__dict__[name]) is OrderedDict
        assert not ema.__dict__[name]


def test_a_shallow_copy_is_not_watched(watch: Any) -> None:
    model = nn.Linear(4, 4)
    watch(model)
    copy.copy(model)(torch.ones(2, 4))
    assert watch.words() == []


def test_an_averaged_model_makes_no_phases(watch: Any) -> None:
    model = nn.Linear(4, 4)
    watch(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    averaged(torch.ones(2, 4))
    assert watch.words() == []


def test_handles_from_before_still_remove_their_hooks(watch: Any) -> None:
    model = nn.Linear(4, 4)
    called = []
    before = model.register_forward_pre_hook(lambda m, a, k: called.append("before"), with_kwargs=True)
    watch(model)
    during = model.register_forward_hook(lambda m, a, o: called.append("during"))
    model(torch.ones(2, 4))
    assert called == ["before", "during"]
    before.remove()
    assert not model._forward_pre_hooks_with_kwargs.keys() - set(model._forward_pre_hooks)
    model(torch.ones(2, 4))
    assert called == ["before", "during", "during"]
    watch.agent.leave("stopped")
    model(torch.ones(2, 4))
    during.remove()
    model(torch.ones(2, 4))
    assert called == ["before", "during", "during", "during"]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning", "ignore:`torch.jit.script:DeprecationWarning")
def test_a_watched_model_can_be_scripted_and_has_no_hook_to_hand_on(watch: Any) -> None:
    model = nn.Linear(4, 4)
    watch(model)
    called: list[str] = []
    handle = model.register_forward_hook(lambda *_: called.append("the user's own"))
    assert len(model._forward_hooks.values()) == 1
    handle.remove()
    assert not model._forward_hooks.values()
    scripted = torch.jit.script(model)
    assert torch.equal(scripted(torch.ones(2, 4)), model(torch.ones(2, 4)))
    assert not called


def test_a_model_under_functional_transforms_is_watched_too(watch: Any) -> None:
    model = nn.Linear(4, 4)
    watch(model)
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, sample: Any) -> Any:
        return torch.func.functional_call(model, parameters, sample).sum()

    for _ in range(8):  # more often than a part may fail
        torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.ones(3, 4))
    model(torch.ones(2, 4)).sum().backward()
    assert watch.words()[0][-2:] == ["forward", "backward"]


def in_torch() -> dict[str, Any]:
    """Every place that the agent touches."""
    module = torch.nn.Module
    checkpoint = torch.utils.checkpoint
    names: list[tuple[Any, str]] = [
        (torch.autograd, "_engine_run_backward"),
        (torch.autograd.graph, "_engine_run_backward"),
        (torch.Tensor, "backward"),
        (torch.amp.GradScaler, "step"),
        (module, "compile"),
        (checkpoint.CheckpointFunction, "backward"),
        (checkpoint._recomputation_hook, "__init__"),
        (sys, "excepthook"),
        (sys, "exit"),
        (type(exit), "__call__"),
        (torch.cuda.CUDAGraph, "capture_begin"),
        (torch.cuda.CUDAGraph, "replay"),
        (torch.cuda, "make_graphed_callables"),
        (torch.cuda.graphs, "make_graphed_callables"),
    ]
    names += [(torch._C, f"_cuda_{name}") for name in ("memoryStats", "resetPeakMemoryStats")]
    names += [(torch._C, f"_cuda_{name}") for name in ("record_memory_history", "memorySnapshot", "isHistoryEnabled")]
    names += [(torch._C, f"_accelerator_{name}") for name in ("getDeviceStats", "resetPeakStats")]
    return {f"{owner!r}.{name}": getattr(owner, name, None) for owner, name in names} | {
        "registration": list(torch.nn.modules.module._global_module_registration_hooks),
        "optimizers": [*_global_optimizer_pre_hooks, *_global_optimizer_post_hooks],
    }


def test_stop_leaves_no_hook_and_no_wrapper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = nn.Linear(4, 4)
    dicts = {name: value for name, value in model.__dict__.items() if "hooks" in name}
    before = in_torch()
    gpumon_agent.watch(model)
    assert in_torch() != before
    model(torch.ones(2, 4))
    agent = agents.REGISTRY.agent
    assert agent is not None
    assert agent.transport.wait_ready(60)
    gpumon_agent.stop()
    assert in_torch() == before
    assert all(model.__dict__[name] is value and not value for name, value in dicts.items())
    assert agents.REGISTRY.agent is None
    until = time.monotonic() + 10
    while list((tmp_path / "gpumon").glob("[!o]*")) and time.monotonic() < until:
        time.sleep(0.05)  # the helper removes them as it ends
    assert [path.name for path in (tmp_path / "gpumon").rglob("*") if path.name != "oom"] == []


def test_nothing_is_kept_alive(watch: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    watch(model, optimizer)
    x = torch.ones(2, 4)
    for _ in range(3):
        output = model(x)
        loss = output.sum()
        loss.backward()
        optimizer.step()
    gc.disable()
    try:
        tensors = [weakref.ref(t) for t in (x, output, loss, model.weight.grad)]
        optimizer.zero_grad()
        del x, output, loss
        assert [ref() for ref in tensors] == [None] * 4
    finally:
        gc.enable()
    parts = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.weight)]
    del model, optimizer
    gc.collect()
    assert [ref() for ref in parts] == [None] * 3


def test_a_tensor_that_failed_in_forward_is_not_kept_alive(watch: Any) -> None:
    class Fails(nn.Linear):
        def forward(self, x: Any) -> Any:
            raise ValueError

    model = Fails(4, 4)
    watch(model)
    x = torch.ones(2, 4)
    with pytest.raises(ValueError):  # noqa: PT011
        model(x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_importing_the_agent_does_not_import_torch(tmp_path: Path) -> None:
    script = "import gpumon_agent, sys; assert 'torch' not in sys.modules and 'zmq' not in sys.modules"
    python(script, tmp_path)


def test_no_process_is_started_and_no_warning_is_shown_twice(tmp_path: Path) -> None:
    script = """
import sys, warnings
import gpumon_agent, torch
sys.addaudithook(lambda event, _: print(event) if event.startswith(("subprocess.", "os.fork", "os.posix_spawn")) else 0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
gpumon_agent.watch(model, optimizer)
for _ in range(3):
    warnings.warn("once for each place")
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
gpumon_agent.stop()
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == ""
    assert done.stderr.count("once for each place") == 2  # the warning, and the line it points at


def test_a_forked_child_is_inert_and_may_watch_for_itself(tmp_path: Path) -> None:
    script = """
import os, sys, torch
import gpumon_agent
from gpumon_agent import agent
model = torch.nn.Linear(4, 4)
gpumon_agent.watch(model)
model(torch.ones(2, 4))
pid = os.fork()
if pid == 0:
    last = agent.REGISTRY.agent.recorder.last_seq
    model(torch.ones(2, 4))
    assert agent.REGISTRY.agent.recorder.last_seq == last
    gpumon_agent.watch(model)
    assert agent.REGISTRY.agent.pid == os.getpid()
    assert agent.REGISTRY.agent.transport.wait_ready(5)
    model(torch.ones(2, 4))
    assert agent.REGISTRY.agent.recorder.last_seq > 0
    sys.stdout.flush()
    gpumon_agent.stop()
    assert type(model._forward_hooks) is not dict and not model._forward_hooks
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
model(torch.ones(2, 4))
assert not [f for f in agent.REGISTRY.agent.guard.failures.values() if f]
"""
    python(script, tmp_path)


def test_data_loader_workers_stay_as_they_were(tmp_path: Path) -> None:
    script = """
import threading, torch
import gpumon_agent
from gpumon_agent import agent

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        assert not agent.REGISTRY.agent.hooks.fires
        assert not [t for t in threading.enumerate() if "gpumon" in t.name]
        assert not torch.cuda.is_initialized()
        return torch.ones(4)

model = torch.nn.Linear(4, 4)
gpumon_agent.watch(model)
for x in torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork"):
    model(x)
"""
    python(script, tmp_path)


def test_the_traceback_of_an_uncaught_exception_is_untouched(tmp_path: Path) -> None:
    script = """
import os, torch
model = torch.nn.Linear(4, 4)
if os.environ.get("WATCHED"):
    import gpumon_agent; gpumon_agent.watch(model)
else:
    pass
class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise ValueError("mine")
Fails.apply(model(torch.ones(2, 4))).sum().backward()
"""
    path = tmp_path / "script.py"
    path.write_text(script)
    told = []
    for watched in ("", "1"):
        done = subprocess.run(
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path), "WATCHED": watched},
        )
        told.append((done.returncode, done.stdout, done.stderr))
    assert told[0] == told[1]
    assert "ValueError: mine" in told[0][2]


def test_a_mistake_in_watch_is_one_line_and_no_exception(capfd: pytest.CaptureFixture[str]) -> None:
    gpumon_agent.watch("model")
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "torch.nn.Module, not str" in told
