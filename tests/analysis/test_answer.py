"""The answer: the worst state of a job, who is to blame, when, and what to do, the same in every outlet."""

from __future__ import annotations

from itertools import pairwise

import pytest
from leaking import census, group, leaking
from msgspec.structs import replace
from msgspec.structs import replace as replace_growth
from synthetic import GIB, MIB, Run

from gpumon.analysis import Reporter
from gpumon.analysis.answer import NOBODY, Answer, When, Who, answer, line, worst
from gpumon.analysis.forecast.headroom import steps_to_full
from gpumon.analysis.types import KEPT, Growth
from gpumon.export.objects import Objects
from gpumon.session.store import SessionStore
from gpumon_agent import wire


def said_of(run: Run, steps: int, *more: wire.Event) -> Answer:
    store = SessionStore()
    for received in run.stream(steps, host_every=1):
        store.apply(received)
    for event in more:
        store.apply(run.received(event, steps))
    frame = store.frame(run.unix_ns(steps))
    return answer(frame, Reporter().report(frame))


def test_nobody_is_unknown() -> None:
    assert answer(SessionStore().frame(0), ()) == NOBODY
    assert NOBODY.state == "unknown"


def test_a_healthy_run_is_ok_and_says_what_is_left() -> None:
    said = said_of(Run(total=40 * GIB), 40)
    assert (said.state, said.when) == ("ok", None)
    assert "is left" in said.what


def test_without_the_room_on_the_device_it_is_unknown() -> None:
    run, store = Run(), SessionStore()
    for received in run.stream(40, host_every=0):
        store.apply(received)
    frame = store.frame(run.unix_ns(40))
    assert answer(frame, Reporter().report(frame)).state == "unknown"


def test_little_left_is_tight() -> None:
    run = Run()
    said = said_of(Run(total=run.context + run.peak(30) + 20 * MIB), 40)
    assert said.state == "tight"
    assert said.do


def test_a_leak_names_the_variable_the_line_and_when_memory_is_full() -> None:
    run = leaking(4 * MIB, census(25, group(24, bytes=24 * 4 * MIB)), total=2 * GIB)
    store, reporter = SessionStore(), Reporter()
    for received in run.stream(60, host_every=1):
        store.apply(received)
    frame = store.frame(run.unix_ns(60))
    reports = reporter.report(frame)
    said = answer(frame, reports)
    found = next(each for each in reports[0].findings if each.code == "tensor-leak")
    forecast = reports[0].devices[0].forecast
    assert said.state == "leak"
    assert said.who is not None
    assert found.holder is not None
    assert found.holder.startswith(said.who.variable or "?")
    assert f"{said.who.file}:{said.who.line}" == found.where
    assert said.do == found.remedy
    assert forecast is not None
    assert forecast.growth == KEPT
    assert said.when is not None
    assert said.when.steps == forecast.steps_to_oom
    assert forecast.steps_to_oom == 169
    assert "full in about 170 steps, at" in line(said)


def test_a_leak_has_grown_since_it_was_counted() -> None:
    """The census counted 24 tensors; by now it is one a step since step 2."""
    run = leaking(4 * MIB, census(25, group(24, bytes=24 * 4 * MIB)), total=2 * GIB)
    said = said_of(run, 60)
    assert 220 * MIB < said.bytes < 240 * MIB
    assert f"{said.bytes / MIB:.1f} MiB so far" in said.what


def test_a_batch_that_will_not_fit_is_worse_than_a_leak_and_still_names_it() -> None:
    run = leaking(4 * MIB, census(25, group(24, bytes=24 * 4 * MIB)), total=2 * GIB)
    ahead = wire.Outlook(60, 0, run.time_ns(60), 3 * GIB, 3 * GIB, 3 * GIB, "backward", wire.OOM_AHEAD, -GIB)
    said = said_of(run, 60, ahead)
    assert said.state == "will-not-fit"
    assert "1.00 GiB more than available" in said.what
    assert said.who is not None
    assert said.who.variable


def test_full_is_room_over_growth_with_the_interval_of_the_pace() -> None:
    growth = Growth("allocated", True, 5, per_step=10.0, low=5.0, high=20.0)
    assert steps_to_full(100, growth) == (11, 4, 23)
    assert steps_to_full(-1, growth) == (0, 0, 0)
    assert steps_to_full(100, replace_growth(growth, low=0.0)) == (11, 4, None)  # it may never come to that
    assert steps_to_full(100, growth, shrinks=10.0) == (6, 3, 9)  # others take as much again
    assert steps_to_full(100, None) is None
    assert steps_to_full(100, None, shrinks=10.0) == (11, 10, 12)


def test_a_leak_too_slow_for_the_peaks_to_show_has_a_time_to_full_too() -> None:
    """4 MiB every 40th step: no trend in the forecast's window, but growth is confirmed over the whole run."""
    run, store, reporter = Run(kept=lambda step: 4 * MIB * (step // 40), total=40 * GIB), SessionStore(), Reporter()
    for received in run.stream(500, host_every=5):
        store.apply(received)
        if isinstance(received.event, wire.Step):
            rank = store.rank(run.nonce, received.unix_ns)
            assert rank is not None
            (device,) = reporter.rank(rank).devices
    forecast = device.forecast
    assert forecast is not None
    assert forecast.growth == KEPT
    assert forecast.headroom is not None
    assert forecast.steps_to_oom == pytest.approx(forecast.headroom / (4 * MIB / 40), rel=0.05)


def test_an_out_of_memory_that_training_survived_is_none() -> None:
    run = Run(total=40 * GIB)
    oom = wire.Oom(30, "forward", 0, run.time_ns(30), 9 * GIB, 40 * GIB, GIB, 30 * GIB, 31 * GIB, "CUDA …")
    assert said_of(run, 40, oom).state == "ok"
    assert said_of(run, 40, replace(oom, step=40)).state == "out-of-memory"


@pytest.mark.parametrize("reason", ["finished", "exception", "signal", "lost"])
def test_an_end_carries_its_cause(reason: str) -> None:
    run = Run(total=40 * GIB)
    said = said_of(run, 40, wire.Goodbye(reason, run.time_ns(40), 40, "forward", "ValueError: no"))
    assert said.state == "ended"
    assert "ValueError: no" in said.what


STATES = ["out-of-memory", "ended", "will-not-fit", "leak", "tight", "unknown", "ok"]


@pytest.mark.parametrize(("worse", "better"), pairwise(STATES))
def test_the_worst_rank_speaks(worse: str, better: str) -> None:
    one, other = (
        Answer(state, "", Who(rank), bytes=1)  # type: ignore[arg-type]
        for rank, state in enumerate((better, worse))
    )
    assert worst([one, other]).state == worse
    assert worst([other, one]).state == worse


def test_a_rank_that_finished_says_nothing_while_another_one_runs() -> None:
    assert worst([Answer("ended", "finished"), Answer("ok", "fits")]).state == "ok"
    assert worst([Answer("ended", "killed", bytes=1), Answer("ok", "fits")]).state == "ended"


def test_of_two_that_leak_the_one_that_is_full_first_speaks_and_goes_on_speaking() -> None:
    late, soon = Answer("leak", "", Who(0), When(200)), Answer("leak", "", Who(1), When(100))
    assert worst([late, soon]) is soon
    assert worst([late, soon], late) is late  # ranks that leak alike do not take turns
    assert worst([late, soon], Answer("tight", "", Who(0))) is soon


def test_json_states_it_once_and_again_when_it_changes() -> None:
    run = leaking(4 * MIB, census(25, group(24, bytes=24 * 4 * MIB)), total=2 * GIB)
    made = Objects()
    said = [stated.object for received in run.stream(60, host_every=1) for stated in made.take(received)]
    kinds = [each["type"] for each in said]
    assert kinds[:3] == ["hello", "model", "answer"]
    states = [(each["state"], each["who"]) for each in said if each["type"] == "answer"]
    assert all(before != after for before, after in pairwise(states))
    assert states[-1][0] == "leak"
    assert len(states) < 8


def test_four_findings_are_evidence_enough() -> None:
    """It is a line of a screen and of a log; the findings themselves are all told beside it."""
    off = tuple(wire.PartOff(part, "KeyError: 7", "phases.py:12", 3) for part in ("a", "b", "c", "d", "e"))
    assert len(said_of(Run(), 5, wire.Heartbeat(1, 0, "forward", 0, off=off)).evidence) == 4


def test_a_rank_whose_machine_cannot_be_heard_is_unknown_until_it_is_heard_again() -> None:
    run, store, objects = Run(total=40 * GIB), SessionStore(), Objects()
    printed = []

    def take(received: wire.Received) -> None:
        store.apply(received)
        printed.extend(each.object for each in objects.take(received) if each.kind == "answer")

    def now() -> Answer:
        frame = store.frame(run.unix_ns(40))
        return answer(frame, Reporter().report(frame))

    for received in run.stream(40, host_every=1):
        take(received)
    host = run.hello().host
    for lost, state in (("no route", "unknown"), (None, "ok")):
        for name in ("another", host):
            take(wire.Received(f"link:{name}", run.unix_ns(40), wire.Link(name, lost)))
        assert now().state == state
        assert printed[-1]["state"] == state
        assert (now().what == f"link to {host} lost, trying again: no route") == (state == "unknown")
    take(wire.Received(f"link:{host}", run.unix_ns(40), wire.Link(host, "no route")))
    take(run.received(wire.Goodbye("finished", run.time_ns(40), 40), 40))
    assert now().state == "ended"
    assert store.frame(run.unix_ns(40)).ranks[0].lost_link_said == ""  # of a rank that has ended nothing is missed
