"""What the agent says as a batch enters forward, before the allocator fails: to viewers, terminal, disk and user."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scenarios.catalogue import OLDER_TORCH, WITHOUT_WORKSPACES

from gpumon_agent import wire
from gpumon_agent.shape_model.model import ShapeModel
from gpumon_agent.shape_model.outlook import Outlooks

Gpu = Callable[..., Any]


def train() -> None:
    """Batches of many lengths, one that the user refuses, one that runs out of memory. Prints what was seen."""
    import json
    import time

    import torch

    import gpumon_agent
    from gpumon_agent import agent as agents
    from gpumon_agent import wire

    class TooLong(Exception):
        pass

    told: list[wire.Outlook] = []
    refuses = [True]

    def listen(outlook: wire.Outlook) -> str:
        told.append(outlook)
        if outlook.verdict == wire.OOM_AHEAD and refuses[0]:
            raise TooLong(str(outlook.step))
        return "ignored"

    torch.cuda.set_per_process_memory_fraction(0.9)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    gpumon_agent.watch(model, optimizer)
    gpumon_agent.on_outlook(listen)
    agent = agents.REGISTRY.agent
    assert agent is not None
    kept: list[wire.NumberedEvent] = []
    follow = agent.outlooks.follow

    def noted(event: wire.NumberedEvent) -> None:
        kept.append(event)
        follow(event)

    agent.outlooks.follow = noted  # type: ignore[method-assign]

    def batch(rows: int) -> None:
        optimizer.zero_grad()
        # kept until here, a long batch would be the highest that stands in the next step
        model(torch.zeros(rows, 256, device="cuda")).square().sum().backward()
        optimizer.step()

    def until(step: int) -> None:
        """It has been learnt."""
        end = time.monotonic() + 120
        while time.monotonic() < end and not any(isinstance(e, wire.Step) and e.step >= step for e in list(kept)):
            time.sleep(0.01)

    peaks = {}
    for step in range(24):
        torch.cuda.reset_peak_memory_stats()
        batch(500 + 2_000 * (step * 7 % 11))
        peaks[step] = torch.cuda.max_memory_allocated()
        if step:
            until(step - 1)
    agent.budget[0] = 500 << 20
    reached: list[str] = []
    x = torch.zeros(90_000, 256, device="cuda")
    try:
        model(x)
        reached.append("forward")
    except TooLong as error:
        reached.append(f"refused {error}")
    del x
    batch(500)
    refuses[0] = False
    try:
        batch(300_000)
    except torch.OutOfMemoryError:
        reached.append("out of memory")
    torch.cuda.empty_cache()
    batch(500)
    failures = {name: count for name, count in agent.guard.failures.items() if count}
    gpumon_agent.stop()
    seen = {
        "reached": reached,
        "failures": failures,
        "peaks": peaks,
        "told": [(o.step, o.next_peak, o.low, o.high, o.verdict, o.headroom, o.t_ns) for o in told],
        "sent": [(e.step, e.verdict) for e in kept if isinstance(e, wire.Outlook)],
        "oom": [(e.step, e.t_ns) for e in kept if isinstance(e, wire.Oom)],
        "room": agent.budget[0],
        "limits": agent.outlooks.limits,
        "settings": agent._hello().settings,
    }
    print(json.dumps(seen))


def test_it_is_said_before_it_fails(virtual_gpu: Gpu, tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    gpu = virtual_gpu(memory="1024MiB", context="450MiB")
    settings = {"GPUMON_GOVERNOR": "off", "GPUMON_OUTLOOK": "print", "GPUMON_OOM_DIR": str(reports)}
    done = gpu.run(train, env={**settings, **WITHOUT_WORKSPACES})
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["failures"] == {}
    by_step = {step: rest for step, *rest in seen["told"]}

    # learnt by shape: from the first round of lengths on, every one is known to half a percent
    for step in range(12, 24):
        peak, low, high, verdict, headroom, _ = by_step[step]
        assert abs(peak / seen["peaks"][str(step)] - 1) < 0.005, (step, peak, seen["peaks"][str(step)])
        assert low <= seen["peaks"][str(step)] <= high
        assert (verdict, headroom) == ("fits", None)  # nobody told what the device has

    # what the user's function raises ends the model's call; what it returns does not
    assert seen["reached"] == ["refused 24", "out of memory"]
    assert [step for step, verdict in seen["sent"] if verdict == "oom-ahead"] == [24, 25]
    oom_step, oom_ns = seen["oom"][0]
    assert oom_step == 25
    given_up, taken = [rest for step, *rest in seen["told"] if step == 25]
    assert given_up[3] == "oom-ahead"
    assert given_up[4] < 0
    assert given_up[5] < oom_ns
    assert taken[3] == "fits"

    # the observer's own figures tell what the process can have from then on
    assert 500 << 20 < seen["room"] <= 574 << 20
    assert done.stderr.count("will not fit") == 2
    if not OLDER_TORCH:  # before 2.6 torch does not tell it
        assert seen["settings"]["memory_fraction:0"] == "0.900000"
        assert abs(seen["limits"]["0"] - 0.9 * (1 << 30)) <= 1
    (kept,) = [json.loads(path.read_text()) for path in reports.glob("ahead-*.json")]
    assert kept["verdict"] == "oom-ahead"
    assert "gpumon: " in done.stderr
    assert "not affected" not in done.stderr


def test_of_many_steps_that_are_alike_the_last_teach_nothing(monkeypatch: Any) -> None:
    learned: list[int] = []
    monkeypatch.setattr(ShapeModel, "learn", lambda self, step, *_: learned.append(step) or False)
    outlooks = Outlooks(lambda _: None, {})

    def step(number: int, peak: int) -> None:
        outlooks.noted(number, [(2, 4)])
        outlooks.follow(wire.Phase(number, wire.FORWARD, 0, 0, number, 1, 50, peak, 60, 60))
        outlooks.follow(wire.Step(number, number, 1))

    for number in range(100):
        step(number, 70)
    assert learned == list(range(64))
    step(100, 71)
    step(101, 70)
    assert learned[64:] == [100, 101]
