"""The run's past: its beginning, a thinned rest, and all of its newest steps; bounded, the same whoever thins it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gpumon.session.frame import RankFrame
from gpumon.session.store import SessionStore, StoreLimits
from gpumon_agent import wire
from gpumon_agent.transport.history import BYTES_MAX, History
from gpumon_agent.wire.thinning import Facts, kept

SOURCE = "nonce"
HELLO = wire.Hello((1, 1), "0", SOURCE, "job", "host", 1, 0, "boot", (), "3", wire.Clock(0, 0))


class Run:
    """A helper's history, and what each of its viewers has heard of it."""

    def __init__(self, limit_bytes: int = BYTES_MAX) -> None:
        self.history = History(limit_bytes)
        self.sent: list[tuple[int, wire.Event]] = []
        self.thinned = 0

    def step(self, step: int, phases: int = 5, *, peak: int = 1 << 35, sampled: bool = False, rows: int = 8) -> None:
        events: list[wire.Event] = [
            wire.Phase(step, "forward", index, 0, step, 1, 1 << 35, peak, 1 << 36, 1 << 36) for index in range(phases)
        ]
        if sampled:
            events.append(wire.Ledger(step, "forward", 0, 0, 1 << 35, 1 << 35, 1 << 36, weights=1 << 20))
        events.append(wire.Step(step, step, 1, input_bytes=rows * 4, input_shapes=((rows, 1),), phases=phases))
        self._send(events)
        told = self.history.thin()
        if told is not None:
            self.thinned += 1
            self.sent.append((-1, told))

    def _send(self, events: list[wire.Event]) -> None:
        for event in events:
            seq = self.history.newest + 1
            self.history.extend([(seq, wire.encode_event(event))])
            self.sent.append((seq, event))

    def late(self) -> RankFrame:
        """Of a viewer that comes now."""
        store = SessionStore()
        store.apply(wire.Received(SOURCE, 1, HELLO))
        for raw in self.history.past():
            store.apply(wire.Received(SOURCE, 1, wire.decode_event(raw), -1, True))
        for packet in self.history.packets():
            said = wire.decode_frame(wire.LIVE + packet)
            assert said.replayed
            store.apply_run(SOURCE, 1, said.events, said.seq, True)
        return store.frame(2).ranks[0]

    def early(self, limits: StoreLimits | None = None) -> RankFrame:
        """Of one that was there from the start."""
        store = SessionStore(limits)
        store.apply(wire.Received(SOURCE, 1, HELLO))
        for seq, event in self.sent:
            store.apply(wire.Received(SOURCE, 1, event, seq))
        return store.frame(2).ranks[0]


def told(frame: RankFrame) -> list[tuple[object, ...]]:
    return [
        (each.step, each.closed, each.phases, each.ledgers, each.whole, each.highest)
        for each in (*frame.older, *frame.steps)
    ]


def test_a_short_past_is_whole() -> None:
    run = Run()
    for step in range(100):
        run.step(step)
    assert [each.step for each in run.late().steps] == list(range(100))
    assert not run.late().older


@pytest.mark.parametrize("steps", [512, 513, 2_047, 2_048, 3_000, 9_000])
def test_a_viewer_that_comes_late_has_what_one_from_the_start_has(steps: int) -> None:
    draw = random.Random(steps)
    run = Run()
    for step in range(steps):
        run.step(step, peak=(1 << 35) + draw.randrange(1 << 20), sampled=step % 7 == 3, rows=draw.choice((8, 8, 9)))
    early, late = run.early(), run.late()
    assert told(late) == told(early)
    assert late.thinned == early.thinned
    assert late.lost_events == 0
    assert late.steps[-1].step == steps - 1
    assert len(late.steps) >= min(steps, 1_536)
    assert len(late.steps) < 2_048 + 1000 // 6


def test_what_is_kept_is_the_beginning_the_highest_peak_and_every_nth_step_with_owners() -> None:
    run = Run()
    for step in range(20_000):
        run.step(step, peak=(1 << 36) + (step == 777), sampled=step % 10 == 9)
    late = run.late()
    assert late.thinned is not None
    stride, until = late.thinned.stride, late.thinned.until
    assert stride > 1
    old = [each.step for each in late.older]
    assert old[:16] == list(range(16))
    assert 777 in old
    assert {step // stride for step in old} == set(range(until // stride + 1))
    assert sum(bool(each.ledgers) for each in late.older) > len(old) - 18
    assert late.steps[0].step == until + 1


def test_memory_is_bounded_however_long_the_run_and_however_large_its_steps() -> None:
    run = Run()
    for step in range(6_000):
        run.step(step, phases=100)
        assert run.history.nbytes <= (4 << 20) + 64 * 1024
        run.sent.clear()
    assert run.history.nbytes > 2 << 20
    assert len(run.late().older) <= 512 + 16 + 3 + 2
    assert max(map(len, run.history.packets())) + 9 <= wire.FRAME_BYTES_MAX


def test_the_past_is_thinned_no_oftener_than_it_says() -> None:
    run = Run()
    for step in range(5 * 512):
        run.step(step)
    assert run.thinned == 5


def test_a_viewer_that_may_keep_fewer_of_them_takes_a_longer_stride() -> None:
    run = Run()
    for step in range(6_000):
        run.step(step, peak=(1 << 35) + (step == 777))
    few, all_ = run.early(StoreLimits(older=100)), run.early()
    assert 40 < len(few.older) <= 100 < len(all_.older)
    steps = [each.step for each in few.older]
    assert set(steps) < {each.step for each in all_.older}
    assert 777 in steps
    assert steps[:16] == list(range(16))
    assert few.steps == all_.steps


def test_notices_and_an_out_of_memory_outlast_their_steps() -> None:
    run = Run()
    run.step(0)
    run._send([wire.Notice(5, "a hook was switched off"), wire.Oom(0, "forward", 0, 5, 1 << 30)])
    for step in range(1, 4_000):
        run.step(step)
    late = run.late()
    assert [notice.text for notice in late.notices] == ["a hook was switched off"]
    assert late.oom is not None
    assert told(late) == told(run.early())


def test_who_missed_steps_has_them_after_it_asked_again() -> None:
    run = Run()
    store = SessionStore()
    store.apply(wire.Received(SOURCE, 1, HELLO))
    heard = 0

    def hear() -> None:
        nonlocal heard
        for seq, event in run.sent[heard:]:
            store.apply(wire.Received(SOURCE, 1, event, seq))
        heard = len(run.sent)

    for step in range(1_000):
        run.step(step)
    hear()
    for step in range(1_000, 6_000):
        run.step(step)
    for raw in run.history.past():
        store.apply(wire.Received(SOURCE, 1, wire.decode_event(raw), -1, True))
    for packet in run.history.packets():
        said = wire.decode_frame(wire.LIVE + packet)
        for number, event in enumerate(said.events, said.seq):
            store.apply(wire.Received(SOURCE, 1, event, number, True))
    assert told(store.frame(2).ranks[0]) == told(run.late())


def about(step: int, draw: random.Random) -> Facts:
    kind = ((draw.randrange(3),), (draw.choice((2, 2, 3)),))
    size = draw.choice((None, 8, 8, 8, 9))
    return Facts(step, kind, size, draw.random() < 0.05, draw.random() < 0.3, 7, ((0, draw.randrange(1000)),))


@pytest.mark.parametrize("seed", range(20))
def test_thinning_what_was_thinned_is_thinning_everything(seed: int) -> None:
    draw = random.Random(seed)
    steps = [about(step, draw) for step in range(2_000)]
    left: list[Facts] = []
    cuts = sorted(draw.sample(range(1, 2_000), 6))
    strides = sorted(draw.choice((1, 2, 4, 8, 16)) for _ in range(7))
    for stride, (begin, end) in zip(strides, pairwise([0, *cuts, 2_000]), strict=True):
        left += steps[begin:end]
        chosen = kept(left, stride)
        left = [each for each in left if each.step in chosen]
    assert {each.step for each in left} == kept(steps, strides[-1])


def test_of_one_step_in_two_no_more_than_512_are_kept_however_small() -> None:
    """They are a table's rows and a plot's points; a viewer that comes late decodes them all before it draws."""
    run = Run()
    for step in range(60_000):
        run.step(step, phases=1)
        run.sent.clear()
    assert 256 < len(run.late().older) <= 512 + 16 + 3 + 2


def test_old_steps_take_no_more_than_a_mib_however_large() -> None:
    run = Run()
    for step in range(3_000):
        run.step(step, phases=200)
        run.sent.clear()
    assert 512 * 1024 < sum(map(len, run.history.past())) <= 1 << 20


def test_a_page_of_small_steps_is_32_kib() -> None:
    """The past is dropped page by page: the newest whole steps are too few by no more than one."""
    run = Run()
    for step in range(1_000):
        run.step(step)
    assert 32 * 1024 <= max(map(len, run.history.packets())) < 34 * 1024


def test_of_notices_the_newest_64_are_kept() -> None:
    run = Run()
    for step in range(4_000):
        if step < 100:
            run._send([wire.Notice(step, f"notice {step}")])
        run.step(step)
    past = [wire.decode_event(raw) for raw in run.history.past()]
    assert [each.text for each in past if isinstance(each, wire.Notice)] == [
        f"notice {step}" for step in range(36, 100)
    ]


def test_of_a_step_with_more_ledgers_the_newest_64_are_kept() -> None:
    run = Run()
    for _ in range(100):
        run._send([wire.Ledger(0, "forward", 0, 0, 1, 1, 1, weights=1)])
    for step in range(4_000):
        run.step(step)
    assert len(run.late().older[0].ledgers) == 64


def test_eight_kinds_of_steps_are_kept() -> None:
    """Kinds are shapes' numbers of dimensions, and a script may have any number of those."""
    steps = [Facts(step, ((step,), ()), 8, False, False, 1, ()) for step in range(100)]
    assert kept(steps, 1 << 40) == {*range(16), 99}
    late = [each._replace(kind=((max(0, each.step - 20),), ())) for each in steps]
    assert kept(late, 1 << 40) == {*range(16), *range(21, 28), 99}


def test_a_step_of_more_phases_than_a_frame_may_hold_is_not_kept() -> None:
    few = Facts(0, ((), ()), None, False, False, 256, ())
    assert kept([few, few._replace(step=1, phases=257)], 1) == {0}


def test_the_first_steps_of_each_kind_are_kept_and_the_first_of_another_size() -> None:
    steps = [Facts(step, ((step >= 5_000,), ()), 8 + (step == 7_777), False, False, 1, ()) for step in range(9_000)]
    chosen = kept(steps, 1 << 40)
    assert chosen == {*range(16), 5_000, 5_001, 5_002, 7_777, 8_999}


def beat(number: int) -> wire.Heartbeat:
    return wire.Heartbeat(number * 10**9, 10 * number, "forward", 0, rss=(1 << 30) + number, number=number)


def test_heartbeats_are_kept_thinned_and_a_late_viewer_has_those_of_an_early_one() -> None:
    run = Run()
    run.step(0)
    for number in range(10_000):
        run.history.beat(beat(number))
        run.sent.append((-1, beat(number)))
    early, late = run.early().heartbeats, run.late().heartbeats
    assert late == early
    assert len(late) <= 2 * 256
    numbers_ = [each.number for each in late]
    assert numbers_[0] == 0
    assert numbers_[-256:] == list(range(10_000 - 256, 10_000))
    gaps = {right - left for left, right in pairwise(numbers_[:-256]) if right is not None and left is not None}
    assert gaps == {64}


def test_an_old_heartbeat_does_not_take_the_place_of_a_newer_one() -> None:
    store = SessionStore()
    store.apply(wire.Received(SOURCE, 1, HELLO))
    for number in (7, 3):
        store.apply(wire.Received(SOURCE, 1, beat(number)))
    (rank,) = store.frame(2).ranks
    assert rank.heartbeat == beat(7)
    assert [each.number for each in rank.heartbeats] == [3, 7]
