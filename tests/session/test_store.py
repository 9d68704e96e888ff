"""Events in, frames out: nothing is lost, doubled, or out of order unless the frame says so."""

from __future__ import annotations

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import Run, apply, frame_of, rank_of

from gpumon.session.rank import KNOWN_MAX, Rank
from gpumon.session.store import SessionStore, StoreLimits
from gpumon_agent import wire


def test_a_step_closes_with_all_its_phases_in_order() -> None:
    rank = rank_of(Run(), 3)
    assert [record.step for record in rank.steps] == [0, 1, 2]
    assert [phase.phase for phase in rank.steps[2].phases] == ["between", "forward", "backward", "optimizer"]
    assert all(record.whole for record in rank.steps)
    assert rank.lost_events == 0


def test_a_phase_before_its_step_shows_as_the_open_step() -> None:
    run = Run()
    store = apply(run.picture(), list(run.step(0)), list(run.step(1))[:3])
    opened = store.frame(run.unix_ns(1)).ranks[0].open_step
    assert opened is not None
    assert (opened.step, opened.closed, len(opened.phases)) == (1, None, 2)


def test_duplicates_are_dropped() -> None:
    run = Run()
    events = [*run.picture(), *run.step(0), *run.step(1)]
    once, twice = apply(events), apply(events, events)
    assert once.frame(0).ranks[0].steps == twice.frame(0).ranks[0].steps


def test_a_gap_is_counted_and_its_step_is_not_whole() -> None:
    events = list(Run().stream(3))
    lost = next(i for i, r in enumerate(events) if isinstance(r.event, wire.Phase) and r.event.step == 1)
    rank = apply(events[:lost] + events[lost + 1 :]).frame(0).ranks[0]
    assert rank.lost_events == 1
    assert [record.whole for record in rank.steps] == [True, False, True]


def test_a_lost_ledger_is_noticed_though_all_phases_came() -> None:
    run = Run()
    events = list(run.step(0))
    lost = next(i for i, r in enumerate(events) if isinstance(r.event, wire.Ledger))
    rank = apply(run.picture(), events[:lost] + events[lost + 1 :]).frame(0).ranks[0]
    assert not rank.steps[0].whole


def test_history_that_arrives_after_live_events_is_put_before_them() -> None:
    run = Run()
    picture = list(run.picture())
    past = [list(run.step(k, replayed=True)) for k in range(5)]
    live = list(run.step(5))
    mixed = [*picture, *live[4:], *(r for step in past for r in step), *live]
    rank = apply(mixed).frame(0).ranks[0]
    assert [record.step for record in rank.steps] == [0, 1, 2, 3, 4, 5]
    assert all(record.whole for record in rank.steps)
    assert [record.replayed for record in rank.steps] == [True] * 5 + [False]


def test_closed_steps_are_the_same_objects_in_every_frame() -> None:
    run = Run()
    store = apply(run.stream(3))
    before = store.frame(0).ranks[0].steps
    apply(run.step(3), store=store)
    after = store.frame(0).ranks[0].steps
    assert all(left is right for left, right in zip(before, after, strict=False))


def test_equal_figures_of_steps_in_turn_are_the_same_objects() -> None:
    """Thousands of steps are kept, and each message that is read brings its own."""
    sent = [wire.encode_received(received) for received in Run().stream(4)]
    *_, before, newest = apply(map(wire.decode_received, sent)).frame(0).ranks[0].steps
    for left, right in zip(before.phases, newest.phases, strict=True):
        assert left.allocated == right.allocated
        assert left.allocated is right.allocated
        assert left.t_ns != right.t_ns
    assert newest.closed is not None
    assert before.closed is not None
    assert newest.closed.input_shapes is before.closed.input_shapes


def test_figures_that_come_again_are_the_same_objects() -> None:
    """Of batches of a few lengths, say."""
    rank = Rank("x", StoreLimits(), 0)
    for step, peak in enumerate((1 << 40, 1 << 41, 1 << 40), 1_000):
        phase = wire.Phase(step, "forward", 0, 0, step, 1, peak // 2, peak)
        for seq, event in enumerate((phase, wire.Step(step, step, 1)), 2 * step):
            raw = wire.encode_received(wire.Received("x", 1, event, seq))
            rank.apply(wire.decode_received(raw))
    assert all(record.phases[0].step is record.step for record in rank.steps)
    first, _, third = (record.phases[0] for record in rank.steps)
    assert first.allocated_peak is third.allocated_peak
    assert first.allocated is third.allocated


def test_the_figures_that_are_known_are_of_the_newest_steps() -> None:
    rank, most = Rank("x", StoreLimits(), 0), 0
    for step in range(1_000):
        phase = wire.Phase(step, "forward", 0, 0, step, 1, (1 << 40) + step, (1 << 41) + step)
        for seq, event in enumerate((phase, wire.Step(step, step, 1)), 2 * step):
            rank.apply(wire.Received("x", 1, event, seq))
        most = max(most, len(rank._known))
    assert KNOWN_MAX < most <= KNOWN_MAX + 8


def test_a_frame_cannot_be_changed() -> None:
    frame = frame_of(Run(), 2)
    for thing, field in ((frame, "ranks"), (frame.ranks[0], "steps"), (frame.ranks[0].steps[0], "phases")):
        with pytest.raises(AttributeError):
            setattr(thing, field, ())


def test_a_frame_taken_earlier_does_not_see_what_came_later() -> None:
    run = Run()
    store = apply(run.stream(2))
    early = store.frame(0)
    apply(run.step(2), store=store)
    assert len(early.ranks[0].steps) == 2


def test_only_the_newest_steps_are_kept_and_memory_stays() -> None:
    run, store = Run(), SessionStore(StoreLimits(steps=10))
    apply(run.picture(), store=store)
    for step in range(100):
        apply(run.step(step), store=store)
    rank = store.frame(0).ranks[0]
    assert [record.step for record in rank.steps] == list(range(90, 100))
    assert sys.getsizeof(store._ranks[run.nonce].numbers.spans) < 1000
    assert len(store._ranks[run.nonce].open) == 0


def test_ranks_come_in_order_of_rank() -> None:
    runs = [Run(rank=rank, nonce=f"n{rank}", pid=100 - rank) for rank in (2, 0, 1)]
    frame = apply(*(run.stream(1) for run in runs)).frame(0)
    assert [rank.hello.rank for rank in frame.ranks] == [0, 1, 2]


def test_without_a_word_for_five_seconds_a_rank_is_silent() -> None:
    run = Run()
    store = apply(run.stream(1))
    assert store.frame(run.unix_ns(0) + 5_000_000_000).ranks[0].status == "live"
    assert store.frame(run.unix_ns(0) + 5_000_000_001).ranks[0].status == "silent"


def test_after_goodbye_a_rank_has_ended_however_late() -> None:
    run = Run()
    store = apply(run.stream(1), [run.received(wire.Goodbye("finished", 5), 1)])
    rank = store.frame(run.unix_ns(10_000)).ranks[0]
    assert rank.status == "ended"
    assert rank.goodbye is not None


def test_in_a_replay_time_is_the_recording_s() -> None:
    run = Run()
    store = apply(run.stream(1), store=SessionStore(replaying=True))
    frame = store.frame(run.unix_ns(1_000_000))
    assert frame.replaying
    assert frame.ranks[0].status == "live"


def test_an_ended_run_stays_until_its_successor_has_closed_a_step() -> None:
    old, new = Run(nonce="old"), Run(nonce="new", pid=5000, started_ns=10**12)
    store = apply(old.stream(2), [old.received(wire.Goodbye("exception", 5), 2)])
    apply(new.picture(), store=store)
    assert [rank.source for rank in store.frame(new.unix_ns(0)).ranks] == ["old", "new"]
    apply(new.step(0), store=store)
    assert [rank.source for rank in store.frame(new.unix_ns(0)).ranks] == ["new"]


def test_two_live_runs_of_one_name_both_stay() -> None:
    one, two = Run(nonce="one"), Run(nonce="two", pid=5000, started_ns=1)
    frame = apply(one.stream(2), two.stream(2)).frame(two.unix_ns(1))
    assert len(frame.ranks) == 2


def test_a_process_that_began_beside_another_does_not_replace_it() -> None:
    """Hogwild's have no ranks."""
    one, two = Run(nonce="one"), Run(nonce="two", pid=5000, started_ns=1)
    store = apply(one.stream(2), two.stream(2), [one.received(wire.Goodbye("finished", 5), 2)])
    frame = store.frame(two.unix_ns(2))
    assert [(rank.source, rank.status) for rank in frame.ranks] == [("one", "ended"), ("two", "live")]


def test_a_new_revision_of_a_model_takes_the_old_modules_with_it() -> None:
    run = Run()
    store = apply(run.picture())
    model = run.model()[0]
    assert isinstance(model, wire.Model)
    newer = wire.Model(*(9 if name == "revision" else getattr(model, name) for name in model.__struct_fields__))
    apply([run.received(newer, 0)], store=store)
    record = store.frame(0).ranks[0].models[0]
    assert (record.model.revision, record.modules) == (9, ())


def test_the_static_picture_s_own_ledger_does_no_harm() -> None:
    run = Run()
    ledger = next(e for e in run.step_events(0) if isinstance(e, wire.Ledger))
    loose = wire.Received(run.nonce, 0, ledger, -1, True)
    rank = apply(run.picture(), [loose], run.step(0), run.step(1)).frame(0).ranks[0]
    assert [(record.step, record.whole) for record in rank.steps] == [(0, True), (1, True)]


def test_host_readings_reach_the_ranks_of_that_machine() -> None:
    run = Run()
    store = apply(run.stream(2), [run.host(1)])
    frame = store.frame(0)
    assert frame.hosts == (frame.ranks[0].host,)
    assert len(frame.ranks[0].host_samples) == 1


@given(seed=st.integers(0, 10_000), drop=st.floats(0, 0.5), swap=st.booleans())
def test_no_order_and_no_loss_of_events_makes_it_raise(seed: int, drop: float, swap: bool) -> None:
    rng = random.Random(seed)
    run = Run()
    events = [*run.stream(8, host_every=2), run.received(wire.Goodbye("signal", 1), 8)]
    events = [r for r in events if rng.random() >= drop]
    events += [rng.choice(events) for _ in range(10)] if events else []
    if swap:
        rng.shuffle(events)
    store = SessionStore(StoreLimits(steps=5, open_steps=2, gaps=3, events_per_step=6))
    for received in events:
        store.apply(received)
        frame = store.frame(received.unix_ns)
        for rank in frame.ranks:
            numbers = [record.step for record in rank.steps]
            assert numbers == sorted(set(numbers))
            assert len(numbers) <= 5
            assert rank.lost_events >= 0


@given(seed=st.integers(0, 10_000), drop=st.floats(0, 0.5), swap=st.booleans())
def test_events_that_came_together_tell_the_same_as_one_by_one(seed: int, drop: float, swap: bool) -> None:
    rng = random.Random(seed)
    run = Run()
    limits = StoreLimits(steps=5, open_steps=2, gaps=3, events_per_step=6)
    events = [r for r in run.stream(8) if r.seq < 0 or rng.random() >= drop]
    cut: list[list[wire.Received]] = []
    for received in events:
        follows = cut and received.seq >= 0 and cut[-1][-1].seq == received.seq - 1
        if not follows or cut[-1][0].seq < 0 or rng.random() < 0.2:
            cut.append([])
        cut[-1].append(received)
    if swap:
        cut[4:] = rng.sample(cut[4:], len(cut[4:]))
    alone, together = SessionStore(limits), SessionStore(limits)
    for part in cut:
        for received in part:
            alone.apply(received)
        first = part[0]
        if first.seq < 0:
            together.apply(first)
        else:
            together.apply_run(first.source, part[-1].unix_ns, [r.event for r in part], first.seq, first.replayed)
        assert alone.frame(0) == together.frame(0)


@given(order=st.permutations(range(14)))
def test_received_and_lost_numbers_always_add_up(order: list[int]) -> None:
    from gpumon.session.sequence_intervals import SequenceIntervals

    numbers = SequenceIntervals(64)
    half = order[:7]
    assert all(numbers.take(seq) for seq in half)
    assert not any(numbers.take(seq) for seq in half)
    assert numbers.lost() == max(half) - min(half) + 1 - len(half)


def test_layers_show_when_all_parts_came_in_any_order_and_older_ones_do_not_return() -> None:
    run = Run()
    store = apply(run.picture())

    def tell(part: wire.Layers) -> list[int]:
        store.apply(run.received(part, part.step))
        return [record.step for record in store.frame(0).ranks[0].layers]

    first, second = wire.layers(0, 0, 4, [wire.Layer(f"m{i}", "X", i) for i in range(90)])
    assert tell(second) == []
    assert tell(first) == [4]
    (older,) = wire.layers(0, 0, 3, [wire.Layer("m", "X", 1)])
    assert tell(older) == [4]
    record = store.frame(0).ranks[0].layers[0]
    assert [layer.gradients for layer in record.layers] == list(range(90))
    lost, arrived = wire.layers(0, 0, 5, [wire.Layer(f"m{i}", "X", i) for i in range(90)])
    assert tell(arrived) == [4]  # half a set is not shown
    (newer,) = wire.layers(0, 0, 6, [])
    assert tell(newer) == [6]
    assert tell(lost) == [6]


def test_many_ranks_share_the_steps_that_are_kept() -> None:
    limits = StoreLimits(steps=100, steps_in_all=400, steps_at_least=30)
    store = SessionStore(limits)
    runs = [Run(nonce=f"run{number}", pid=number + 1) for number in range(20)]
    for run in runs[:4]:
        apply(run.stream(150), store=store)
    assert [len(rank.steps) for rank in store.frame(0).ranks] == [100] * 4
    for run in runs[4:8]:
        apply(run.stream(150), store=store)
    assert [len(rank.steps) for rank in store.frame(0).ranks] == [50] * 8
    for run in runs[8:]:
        apply(run.stream(40), store=store)
    assert {len(rank.steps) for rank in store.frame(0).ranks} == {30}
    assert [record.step for record in store.frame(0).ranks[0].steps] == list(range(120, 150))


def test_a_step_older_than_all_that_were_thinned_is_taken() -> None:
    """No agent says so; a damaged recording may."""
    run = Run()
    thinned = run.received(wire.Thinned(until=9, newest=9), 9)
    store = apply(run.picture(), run.step(3), [thinned], run.step(1), run.step(2))
    assert [record.step for record in store.frame(0).ranks[0].steps] == [1, 2]
