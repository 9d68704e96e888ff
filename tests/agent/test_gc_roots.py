"""Where a census begins to look, as it is found: nothing of those who called stays alive by it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")


class Batch:
    """Stands for what a caller has in a variable."""


def test_looking_at_the_callers_frames_keeps_none_of_them():
    from gpumon_agent.leaks.gc_roots import beside
    from gpumon_agent.leaks.object_children import Files

    def forward() -> weakref.ref[Batch]:
        batch = Batch()
        assert beside(Files(), ())
        return weakref.ref(batch)

    gc.disable()  # a cycle would wait for it
    try:
        assert forward()() is None
    finally:
        gc.enable()


def outputs() -> None:
    """Two models in turns, so that steps close, and censuses go on, within a forward's hooks; its output is let go."""
    import weakref

    import torch

    from gpumon_agent import agent

    watched = agent.Agent(publish=False)
    models = [torch.nn.Linear(64, 64).cuda() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        watched.adopt(model, optimizer)
    steps = 0

    def now_and_then(*_: object) -> bool:
        nonlocal steps
        steps += 1
        return steps % 20 == 10

    census = watched.leaks.census
    census.growth_trigger.step_closed = now_and_then  # type: ignore[method-assign]
    kept = taken = 0
    for step in range(1500):
        model, optimizer = models[step % 2], optimizers[step % 2]
        output = model(torch.empty(2, 64, device="cuda"))
        loss = output.sum()
        reference = weakref.ref(output)
        del output
        kept += reference() is not None
        taken += census.at_work
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()
    print(kept, taken)


def test_a_frame_that_ended_is_not_taken_for_one_of_our_own(virtual_gpu: Callable[..., Any]) -> None:
    """Which its caller would hold then, and that with all its callers, a forward's among them."""
    kept, taken = map(int, virtual_gpu().run(outputs, env={"GPUMON_GOVERNOR": "off"}).stdout.split())
    assert taken > 50
    assert kept == 0
