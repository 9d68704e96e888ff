"""Steps whose hooks take notes are told as those whose hooks call the state machine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumon_agent import wire

SCRIPT = Path(__file__).with_name("noted.py")
Gpu = Callable[..., Any]


def told(virtual_gpu: Gpu, how: str, *args: object) -> tuple[list[Any], list[int], dict[str, int]]:
    """(events, peaks that the script read, what happened how often)"""
    ran = virtual_gpu(memory="4GiB").run(SCRIPT, how, *args)
    events, answers, failures, counted = json.loads(ran.stdout.splitlines()[-1])
    assert failures == []
    return events, answers, counted


@pytest.mark.parametrize("seed", [1, 2])
def test_random_steps_are_told_the_same(virtual_gpu: Gpu, native_reader: Path, seed: int) -> None:
    events, answers, counted = told(virtual_gpu, "notes", seed, 90)
    assert (events, answers) == told(virtual_gpu, "calls", seed, 90)[:2]
    assert ([], answers) == told(virtual_gpu, "bare", seed, 90)[:2]
    assert min(counted["_close_noted"], counted["leave_notes"]) > 20  # some steps end with calls, not all
    assert counted["caught"] > 5
    assert len(answers) > 10


def test_what_notes_could_get_wrong_is_told_the_same(virtual_gpu: Gpu, native_reader: Path) -> None:
    happens = ("resets_peaks", "runs_in_a_thread", "goes_backward_alone", "recomputes")
    happens += ("goes_backward_in_the_forward", "calls_the_model_in_its_backward")
    events, answers, counted = told(virtual_gpu, "notes", 0, 30, *happens)
    assert (events, answers) == told(virtual_gpu, "calls", 0, 30, *happens)[:2]
    assert ([], answers) == told(virtual_gpu, "bare", 0, 30, *happens)[:2]
    assert counted["leave_notes"] > 8
    assert len(answers) > 10


def train() -> None:
    """Prints of steps with notes: whether the batch is known to fit, before and after 8 MiB more are allocated; whether
    it had another outlook; steps with owners. Then: whether notes are taken after two steps and after three that had to
    give theirs up, after a long step, and later."""
    import time

    import torch

    import gpumon_agent
    from gpumon_agent.registry import REGISTRY

    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters())
    gpumon_agent.watch(model, optimizer)
    phases, governor = REGISTRY.agent.phases, REGISTRY.agent.governor

    def steps(count: int) -> None:
        for _ in range(count):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()

    steps(120)
    type(governor)._decide = lambda _: None
    governor.read_every, governor._ledger_at, governor._ledger_until_ns = 1, 1 << 62, 1 << 62
    phases.read_soon()
    steps(3)
    assert phases._noting
    fits = []
    for kept in (0, 1 << 23):
        held = torch.empty(kept, dtype=torch.uint8, device="cuda")
        steps(2)
        phases.catch_up()
        fits.append(phases.quiet_mark.fits(((8, 64),)))
        del held
    outlooks = []
    phases._on_batch = lambda *batch: outlooks.append(batch) or (False, True)
    phases._judge_due_ns = 0
    steps(8)
    phases.catch_up()
    closed: list[int] = []
    phases._step_closes = closed.append
    type(governor).reads_ahead, governor._ledger_at = 9, governor.steps + 2  # a ledger comes too late for step 3
    steps(6)
    phases.catch_up()
    print(fits, phases._noting, (0, ((8, 64),), 2048) in [batch[1:4] for batch in outlooks], closed)
    phases.leave_notes()
    governor._ledger_at, governor.ledger = 1 << 62, False
    notes = []
    for phases._left in (2, 3):  # steps in a row whose notes were given up
        notes.append(phases._may_note())
    phases._left = 0
    time.sleep(0.11)
    steps(1)
    notes.append(phases._noting)
    steps(2)
    notes.append(phases._noting)
    print(notes)


def test_a_batch_with_notes_is_looked_at_once_more_is_allocated_or_a_second_has_gone(
    virtual_gpu: Gpu, native_reader: Path
) -> None:
    """And steps that were noted have no owners, even if some were due."""
    assert virtual_gpu(memory="4GiB").run(train).stdout.splitlines()[-2:] == [
        "[True, False] True True []",
        "[True, False, False, True]",
    ]


def test_no_notes_are_taken_where_the_backward_computes_parts_of_the_forward_again(
    virtual_gpu: Gpu, native_reader: Path
) -> None:
    events, _, counted = told(virtual_gpu, "notes", 0, 4, "recomputes_always")
    assert events == told(virtual_gpu, "calls", 0, 4, "recomputes_always")[0]
    assert {fields["flags"] for _, fields in events if fields.get("phase") == "backward"} == {wire.RECOMPUTED}
    assert "_do_noted" not in counted


@pytest.mark.parametrize("what", ["names_a_phase", "has_another_optimizer"])
def test_what_ends_the_notes_is_told_the_same(virtual_gpu: Gpu, native_reader: Path, what: str) -> None:
    events, answers, counted = told(virtual_gpu, "notes", 0, 4, what)
    assert (events, answers) == told(virtual_gpu, "calls", 0, 4, what)[:2]
    assert counted["_do_noted"] > 0
