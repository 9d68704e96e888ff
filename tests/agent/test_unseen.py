"""A program that records what is done with its tensors sees nothing of the agent's reads."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from gpumon_agent.unseen import unseen

VirtualGpu = Callable[..., Any]


def recording(device: str, watched: bool) -> None:
    """Prints what a TorchFunctionMode, a tensor subclass and a TorchDispatchMode see of a training loop, in order."""
    import contextlib
    import io
    import json

    import torch
    from torch import nn
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
    from torch.utils.checkpoint import checkpoint

    seen: list[str] = []

    def name(function: object) -> str:
        of = getattr(function, "__self__", None)  # the descriptor of an attribute
        return f"{getattr(of, '__name__', '')}.{getattr(function, '__name__', function)}"

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(f"mode {name(function)} {sorted(each.__name__ for each in types)}")
            return function(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(f"operator {function}")
            return function(*args, **(kwargs or {}))

    class Noted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(f"subclass {name(function)}")
            if any(type(mode) is Operators for mode in _get_current_dispatch_mode_stack()):
                # torch 2.4 makes no subclass of a result there
                with torch._C.DisableTorchFunctionSubclass():
                    return function(*args, **(kwargs or {}))
            return super().__torch_function__(function, types, args, kwargs or {})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
            self.first.weight = nn.Parameter(self.first.weight.detach().as_subclass(Noted))

        def forward(self, batch: object) -> object:
            return self.last(checkpoint(self.first, batch["x"], use_reentrant=False).relu())

    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    kept = []
    agent = None
    if watched:
        from gpumon_agent import agent as agents
        from gpumon_agent.leaks import census

        census.SLICE_NS = 50_000_000
        from gpumon_agent.allocator.cpu import StorageTracker

        tracker = StorageTracker() if device == "cpu" else None
        agent = agents.Agent(publish=False, tracker=tracker)
        agents.REGISTRY.agent = agent
        if tracker is not None:
            tracker.start()
        agents.on_outlook(lambda outlook: None)
    with Functions():
        if agent is not None:
            agents.watch(model, optimizer)
        file = io.BytesIO()
        plain = {key: value.detach().as_subclass(torch.Tensor) for key, value in model.state_dict().items()}
        torch.save(plain, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        model.load_state_dict(loaded)
        for step in range(40):
            data = torch.ones(2 + step % 3, 8, device=device)
            # outside the mode: torch 2.4 makes no subclass there
            batch = {"x": data.as_subclass(Noted) if step % 2 else data, "y": torch.ones(1, device=device)}
            with Operators() if step % 4 == 3 else contextlib.nullcontext():
                loss = (model(batch) - batch["y"]).pow(2).mean()
                kept.append(loss.detach())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if step % 10 == 9:
                model.eval()
                model(batch)
                model.train()
            if agent is not None and step == 5:
                assert agent.ask_census() is None
        if agent is not None:
            newest = agent.leaks.census.newest
            assert newest is not None
            assert newest.groups
            assert agent.accounts.ledgers or device == "cpu"
            agent.leave("stopped")
            assert not [each for each in agent.guard.failures.items() if each[1]]
    print(json.dumps(seen))


def makes_subclasses_in_a_mode() -> bool:
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    with Mode():
        try:
            torch.ones(1).as_subclass(torch.Tensor)
        except RuntimeError:
            return False
    return True


@pytest.mark.parametrize("device", ["cuda", "cpu"])  # the CPU with a tracker of its storages
def test_modes_and_subclasses_see_what_they_see_without_the_agent(virtual_gpu: VirtualGpu, device: str) -> None:
    def run(*, watched: bool) -> list[str]:
        done = virtual_gpu().run(recording, device, watched, env={"GPUMON_GOVERNOR": "off"})
        seen: list[str] = json.loads(done.stdout)
        return [each for each in seen if not each.startswith("mode .set_.")]  # torch.load's, under any dispatch mode

    if device == "cpu" and not makes_subclasses_in_a_mode():
        pytest.skip("this torch makes no tensor subclass under a dispatch mode, and the tracker is one")
    bare = run(watched=False)
    assert {each.split()[0] for each in bare} == {"mode", "operator", "subclass"}
    assert run(watched=True) == bare


def listening() -> None:
    """A function of the user's that is called as a batch enters forward, under a mode of the user's. It raises once."""
    import torch
    from torch.overrides import TorchFunctionMode

    import gpumon_agent

    class Refused(Exception):
        pass

    class Counts(TorchFunctionMode):
        negated = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.negated += function is torch.Tensor.neg
            return function(*args, **(kwargs or {}))

    mode = Counts()
    called = refused = 0

    def listen(outlook: object) -> None:
        nonlocal called
        torch.ones(1).neg()
        called += 1
        if called == 1:
            raise Refused

    model = torch.nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    gpumon_agent.watch(model, optimizer)
    gpumon_agent.on_outlook(listen)
    with mode:
        for step in range(100_000):  # until enough has been learnt
            try:
                model(torch.ones(1 + step % 7, 8, device="cuda")).sum().backward()
            except Refused:
                refused += 1
                torch.ones(1).neg()
            optimizer.step()
            optimizer.zero_grad()
            if called == 3:
                break
    print(called, refused, mode.negated)


def test_a_function_of_the_users_runs_with_the_users_modes(virtual_gpu: VirtualGpu) -> None:
    assert virtual_gpu().run(listening).stdout.split() == ["3", "1", "4"]


def test_modes_are_back_after_an_exception() -> None:
    torch = pytest.importorskip("torch")
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with Mode():
        with contextlib.suppress(KeyboardInterrupt), unseen()():
            torch.ones(1)
            raise KeyboardInterrupt
        torch.zeros(1)
    assert seen == [torch.zeros]
