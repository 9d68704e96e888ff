"""Forwards that turn out to have been an evaluation: the step's record calls them so, with their ledgers."""

from __future__ import annotations

import msgspec
import pytest
from synthetic import STEP_NS, Run, apply

from gpumon_agent import wire


def evaluates(run: Run, step: int) -> list[wire.Event]:
    """A step that begins with two forwards no backward used, around one of an evaluation that said it is one."""
    events = run.step_events(step)
    forward = next(event for event in events if isinstance(event, wire.Phase) and event.phase == "forward")
    ledger = next(event for event in events if isinstance(event, wire.Ledger) and event.phase == "forward")
    before = forward.t_ns - STEP_NS // 4
    first: list[wire.Event] = []
    for at, (name, index) in enumerate((("forward", 0), ("eval", 0), ("forward", 1))):
        first.append(msgspec.structs.replace(forward, phase=name, index=index, t_ns=before + at))
        first.append(msgspec.structs.replace(ledger, phase=name, index=index, requested=1000 + at))
    rest = [
        msgspec.structs.replace(event, index=2)
        if isinstance(event, (wire.Phase, wire.Ledger)) and event.phase == "forward"
        else msgspec.structs.replace(event, phases=7, evaluated=(0, 1))
        if isinstance(event, wire.Step)
        else event
        for event in events
    ]
    return first + rest


def test_what_was_merged_stays_as_many() -> None:
    run = Run(sampled_every=1)
    events = evaluates(run, 0)
    forward = next(event for event in events if isinstance(event, wire.Phase) and event.phase == "forward")
    merged = msgspec.structs.replace(forward, phase="eval", index=299, flags=wire.MERGED, t_ns=forward.t_ns + 3)
    closes = msgspec.structs.replace(events[-1], phases=8) if isinstance(events[-1], wire.Step) else None
    assert closes is not None
    record = apply(run.picture(), [run.received(event, 0) for event in (*events[:6], merged, *events[6:-1], closes)])
    phases = record.frame(0).ranks[0].steps[0].phases
    assert [phase.index for phase in phases if phase.phase == "eval"] == [0, 1, 2, 301]


@pytest.mark.parametrize("late", [False, True], ids=["in order", "its beginning comes late"])
def test_forwards_that_were_an_evaluation_are_called_so(late: bool) -> None:
    run = Run(sampled_every=1)
    events = [run.received(event, 0) for event in evaluates(run, 0)]
    if late:
        events = events[3:] + events[:3]
    record = apply(run.picture(), events).frame(0).ranks[0].steps[0]
    assert record.whole
    told = [(phase.phase, phase.index) for phase in record.phases if phase.phase in ("forward", "eval")]
    assert told == [("eval", 0), ("eval", 1), ("eval", 2), ("forward", 0)]
    ledgers = {(each.phase, each.index): each.requested for each in record.ledgers if each.phase in ("forward", "eval")}
    assert [ledgers["eval", index] for index in range(3)] == [1000, 1001, 1002]
    assert set(ledgers) == set(told)
