"""Whatever comes over the wire, within its types: everything that is made of it ends, and is harmless to a terminal."""

from __future__ import annotations

import json

import hostile
import msgspec
import pytest
from hypothesis import given
from prometheus_client import CollectorRegistry, generate_latest
from watched import START_NS, Run

from gpumon.analysis import Reporter
from gpumon.analysis.job import job
from gpumon.export import jsonl
from gpumon.export.objects import Objects
from gpumon.export.prometheus import JobReports, Jobs
from gpumon.session.store import SessionStore
from gpumon.tui.once import picture
from gpumon.tui.styles import ASCII, UNICODE
from gpumon.tui.view import choose
from gpumon_agent import wire

DEADLINE_S = 30
MANY = hostile.examples(40)


def shown(messages: list[wire.Received]) -> str:
    """Report, picture, JSON and metrics of a session, as one text."""
    store, objects = SessionStore(), Objects()
    made: list[str] = []
    for received in messages:
        store.apply(received)
        for stated in objects.take(received):
            line = jsonl.line(stated.object).decode()
            json.loads(line, parse_constant=pytest.fail)
            made.append(line)
    frame = store.frame(messages[-1].unix_ns)
    reports = Reporter().report(frame)
    for columns, glyphs in ((60, ASCII), (80, UNICODE), (140, UNICODE)):
        made.append(picture(choose(frame, reports, None, None), columns, glyphs))
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Jobs(lambda: [JobReports("train.py", "0", frame, reports)]))
    made.append(generate_latest(registry).decode())
    return "".join(made)


@given(hostile.sessions())
@MANY
def test_whatever_an_agent_says_is_shown_and_harmless(messages: list[wire.Received]) -> None:
    with hostile.within(DEADLINE_S):
        assert hostile.harm_in(shown(messages)) == []


@given(hostile.changed_runs())
@MANY
def test_a_run_with_impossible_figures_is_shown_and_harmless(messages: list[wire.Received]) -> None:
    with hostile.within(DEADLINE_S):
        assert hostile.harm_in(shown(messages)) == []


def test_a_ledger_far_above_the_device_is_drawn() -> None:
    run = Run(total=1 << 30).hello().model().steps(0, 3)
    most = 1 << 60
    for at, received in enumerate(run.events):
        if isinstance(received.event, wire.Ledger):
            ledger = msgspec.structs.replace(
                received.event, weights=most, requested=most, allocated=most, reserved=most
            )
            run.events[at] = msgspec.structs.replace(received, event=ledger)
    with hostile.within(DEADLINE_S):
        assert "weights" in shown(run.events)


def test_a_verdict_of_a_newer_agent_is_shown_in_its_own_word() -> None:
    run = Run().hello().model().steps(0, 12)
    run.say(wire.Outlook(12, 0, run.t_ns, 1 << 30, 1 << 30, 1 << 30, "backward", "perhaps"), numbered=True)
    assert "needs 1.00 GiB: perhaps" in shown(run.events)


def test_missing_ranks_are_counted_as_far_as_one_machine_can_hold_them() -> None:
    run = Run(rank=0).hello(world_size=wire.RANKS_MAX).steps(0, 2)
    store = SessionStore()
    for received in run.events:
        store.apply(received)
    with hostile.within(DEADLINE_S):
        standing = job(store.frame(START_NS))
    assert len(standing.ranks) == 4_096
    assert standing.elsewhere == wire.RANKS_MAX - 4_096


def test_a_world_size_beyond_every_job_is_refused_with_the_hello() -> None:
    hello = msgspec.msgpack.decode(wire.encode_event(Run().hello(world_size=10**15).events[0].event))
    with pytest.raises(wire.WireError, match="Expected `int` <= 1048576"):
        hostile.decoded("ab", 0, hello, -1)


def test_what_was_refused_is_said_once_for_each_kind_and_the_rest_is_shown() -> None:
    run = Run().hello().model().steps(0, 3)
    phase = msgspec.msgpack.decode(wire.encode_event(run.events[2].event))
    phase[7] = 1 << 61  # allocated
    before = len(run.events)
    for seq in range(run.seq, run.seq + 100):
        run.events.append(hostile.decoded(run.source, run.events[-1].unix_ns, phase, seq))
    store = SessionStore()
    for received in run.events:
        store.apply(received)
    frame = store.frame(run.events[before].unix_ns)
    assert [record.step for record in frame.ranks[0].steps] == [0, 1, 2]
    assert [notice.text for notice in frame.ranks[0].notices] == [
        "a message of kind 'phase' was refused, for it breaks the protocol's bounds: "
        "Expected `int` <= 1152921504606846976 - at `$[7]`"
    ]
    assert frame.ranks[0].unix_ns(frame.ranks[0].notices[0].t_ns) == run.events[before].unix_ns
