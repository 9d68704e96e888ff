"""Headroom, what-if and backtest on runs whose every byte is known."""

from __future__ import annotations

import random

import msgspec
import pytest
from forecasting.backtest import backtest
from msgspec.structs import replace
from synthetic import GIB, MIB, Run, apply, rank_of

from gpumon.analysis import Reporter
from gpumon.analysis.changes import SHORT, Change, ChangeResult
from gpumon.analysis.device_budget import available
from gpumon.analysis.forecast import Forecaster, Others, Room
from gpumon.analysis.forecast.headroom import Taken, steps_to_full, steps_until
from gpumon.analysis.history import step_peaks
from gpumon.analysis.types import Growth
from gpumon.analysis.whatif import answer
from gpumon.cli.whatif import line, stated
from gpumon.session.frame import RankFrame
from gpumon.session.store import SessionStore
from gpumon_agent import wire


def test_what_is_stranded_never_makes_a_step_fail_that_fits() -> None:
    assert Room(100, 30).above(60) == 10
    assert Room(100, 30).above(90) == 0
    assert Room(100, 30).above(110) == -10


def test_where_batches_differ_a_large_one_meets_the_end_first() -> None:
    assert steps_until(10, 0.0) is None
    assert steps_until(-1, 1.0) == 0
    assert steps_until(1000, 10.0) == steps_until(1000, 10.0, [0.0] * 9) == 101
    spread = [-300.0, -150.0, 0.0, 150.0, 300.0]
    first = steps_until(1000, 10.0, spread)
    assert first is not None
    assert 70 < first < 85  # the largest fifth of the batches fails from step 70 on


def test_the_end_of_a_random_leak_is_known_as_well_as_a_sum_of_its_amounts_can_be() -> None:
    """Amounts of 10 ± 5, half of the steps each: seen in 40, what 60 keep has a deviation of 5 · √(60 + 60² / 40)."""
    kept = [0]
    for step in range(40):
        kept.append(kept[-1] + (5, 15)[step % 2])
    growth = Growth("allocated", True, 0, per_step=10.0, points=tuple(enumerate(kept)))
    found = steps_to_full(590, growth)
    assert found is not None
    steps, least, most = found
    assert steps == 60
    apart = 1.96 * 5 * (60 + 60 * 60 / 40) ** 0.5 / 10
    assert most is not None
    assert abs(steps - least - apart) <= 2
    assert abs(most - steps - apart) <= 2
    few = msgspec.structs.replace(growth, since=34, low=5.0, high=20.0)  # too few amounts to know how they differ
    assert steps_to_full(590, few) == (60, 29, 121)


def test_what_stands_as_memory_ends_is_known_from_how_the_reserved_grew() -> None:
    taken = Taken()
    reserved, standing = 200 * MIB, 90 * MIB
    for step in range(60):  # 3 MiB a step, in segments of 20; a peak is 50 above, of 5 more the allocator has no use
        while standing + 55 * MIB > reserved:
            reserved += 20 * MIB
        taken.observe(step, reserved, standing + 3 * MIB)
        standing += 3 * MIB
    for left in (0, 19, 20, 47):
        available = reserved + left * MIB
        said = taken.last_standing(available)
        assert said is not None
        last, apart = said
        fits = reserved + left // 20 * 20 * MIB - 55 * MIB
        assert fits < last <= fits + 3 * MIB, left
        assert apart < 3 * MIB
    missed = Taken()  # what stood before it grew was not read
    for step in range(0, 60, 2):
        missed.observe(step, 20 * step * MIB, step * MIB)
    assert missed.last_standing(4000 * MIB) is None


def test_where_memory_ends_is_told_by_every_end_that_a_growth_went_past() -> None:
    """Batches of any size: a device as large as what was reserved at some time would have ended then."""
    rng, taken = random.Random(4), Taken()
    reserved = standing = 0
    ended: list[tuple[int, int]] = []
    for step in range(2000):
        peak = round(standing * 1.02) + rng.choice((20, 30, 60)) * MIB  # fragments: 2 % of what stands
        if peak > reserved:
            ended.append((peak, standing))
            reserved = -(-peak // (20 * MIB)) * 20 * MIB
        standing += rng.randint(1, 7) * MIB
        taken.observe(step, reserved, standing)
    said = taken.last_standing(reserved + 2 * GIB)
    assert said is not None
    middle = sorted(peak - stood * 1.02 for peak, stood in ended)[len(ended) // 2]
    assert abs(said[0] - (reserved + 2 * GIB - middle) / 1.02) < 20 * MIB
    assert 3 * MIB < said[1] < 30 * MIB


def test_where_memory_ends_is_asked_of_the_peaks_once_more_stands_after_the_cache_was_given_back() -> None:
    taken = Taken()
    for step in range(60):  # a reserved that grows by whole batches, of which much lies idle
        taken.observe(step, (200 + 20 * (step // 4)) * MIB, (60 + 3 * step) * MIB)
    end = taken.last_standing(500 * MIB)
    assert end is not None
    past = round(end[0]) + MIB
    taken.observe(60, 480 * MIB, past)
    assert taken.last_standing(500 * MIB) is not None  # it has only just grown
    taken.observe(61, 400 * MIB, round(end[0]) - MIB)
    assert taken.last_standing(500 * MIB) is not None  # the end is still to come
    taken.observe(62, 400 * MIB, past)
    assert taken.last_standing(500 * MIB) is None


def test_others_are_followed_only_where_they_take_surely_and_much() -> None:
    others = Others()
    for second in range(30):
        others.read(float(second), 10 * GIB - second * 50 * MIB)
    assert others.per_step(2.0) == pytest.approx(25 * MIB)
    rng = random.Random(1)
    quiet = Others()
    for second in range(30):
        quiet.read(float(second), 10 * GIB - rng.choice((0, 50 * MIB)))
    assert quiet.per_step(2.0) == 0.0


def test_a_fraction_that_the_user_set_is_no_less_a_limit_than_the_device() -> None:
    rank = rank_of(Run(settings={"memory_fraction:0": "0.250000"}), 10, host_every=1)
    free = rank_of(Run(), 10, host_every=1)
    assert available(free, 0) == Run().total - Run().context
    assert available(rank, 0) == Run().total // 4


@pytest.mark.parametrize("steady", [True, False])
def test_a_driver_that_does_not_count_what_torch_reserves_tells_no_headroom(steady: bool) -> None:
    """More than the device has would be left: an AMD APU's VRAM is not what HIP allocates."""

    def left(context: int) -> int | None:
        if steady:
            return available(rank_of(Run(context=context), 10, host_every=1), 0)
        run = Run(context=context, activations=lambda step: 300 * MIB + step * 10 * MIB)
        (device,) = run.host(7).event.devices
        across = replace(device, began_ns=run.time_ns(6) - 1, ended_ns=run.time_ns(7) - 1)
        host = wire.Received("host:box", run.unix_ns(7), wire.Host("box", run.time_ns(7), "580", (across,)))
        return available(apply(run.stream(8), [host]).frame(0).ranks[0], 0)

    assert left(0) is not None
    assert left(-GIB) is None


def test_after_a_graph_was_replayed_there_is_no_forecast_rather_than_an_old_one() -> None:
    run, reporter = Run(), Reporter()
    store = apply(run.stream(10, host_every=1))
    before = reporter.report(store.frame(0))[0].devices[0].forecast
    assert before is not None
    phase = wire.Phase(10, wire.GRAPH_REPLAY, 0, 0, run.time_ns(10), 1, run.end(9), None, GIB, GIB, 0, 0, 0, 1, 0, 0)
    for event in (phase, wire.Step(10, run.time_ns(10), 1, phases=1)):
        store.apply(run.received(event, 10))
    assert reporter.report(store.frame(0))[0].devices[0].forecast is None


def asked(run: Run, steps: int, *changes: Change) -> list[ChangeResult]:
    rank: RankFrame = rank_of(run, steps, host_every=1)
    return answer(rank, Reporter().rank(rank).devices[0], learnt(rank).shape_model, changes)


def learnt(rank: RankFrame) -> Forecaster:
    forecaster = Forecaster()
    for record in rank.steps:
        figures = step_peaks(record, 0)
        assert figures is not None
        forecaster.observe(figures, record.on(0))
    return forecaster


def test_a_report_asked_late_answers_what_if_as_though_the_model_had_been_fed_all_along() -> None:
    rng = random.Random(2)
    lengths = [rng.randint(64, 512) for _ in range(60)]
    run = Run(activations=lambda s: 2 * MIB * lengths[s], input_bytes=lambda s: 512 * lengths[s])
    rank = rank_of(run, 60, host_every=1)
    reporter = Reporter()
    for record in rank.steps:
        reporter.rank(msgspec.structs.replace(rank, steps=rank.steps[: record.step + 1]))
    report = reporter.rank(rank).devices[0]
    assert any(each.peak is not None for each in report.whatif)
    assert report.whatif == tuple(answer(rank, report, learnt(rank).shape_model, SHORT))


def test_under_a_leak_what_if_is_answered_again_as_what_stands_grows() -> None:
    run = Run(kept=lambda step: 20 * MIB * step)
    store, reporter = SessionStore(), Reporter()
    for received in run.stream(100):
        store.apply(received)
        if isinstance(received.event, wire.Step) and received.event.step >= 20:
            device = reporter.report(store.frame(0))[0].devices[0]
            doubled = next(each for each in device.whatif if each.change == Change(batch=2))
            assert doubled.peak is None or doubled.peak.expected > run.start(received.event.step)


def test_what_fits_under_a_leak_says_when_it_is_full() -> None:
    leaking = Run(kept=lambda step: 4 * MIB * step, total=4 * GIB)
    rank = rank_of(leaking, 100, host_every=1)
    report = Reporter().rank(rank).devices[0]
    now, half, no = answer(rank, report, learnt(rank).shape_model, (Change(), Change(batch=0.5), Change(batch=40)))
    assert report.forecast is not None
    assert report.forecast.steps_to_oom is not None
    assert now.full_in is not None
    assert abs(now.full_in - report.forecast.steps_to_oom) <= 1  # one time to full
    assert half.full_in is not None
    assert half.headroom is not None
    assert now.headroom is not None
    assert half.full_in - now.full_in == pytest.approx((half.headroom - now.headroom) / (4 * MIB), abs=1)
    assert f"fits, but the leak fills the device in {half.full_in:,} steps" in line(half)
    assert stated(half, 0)["full_in_steps"] == half.full_in
    assert "does not fit" in line(no)
    assert "leak" not in line(no)
    assert asked(Run(), 100, Change())[0].full_in is None


def test_another_batch_is_answered_from_the_batches_that_were() -> None:
    rng = random.Random(2)
    lengths = [rng.randint(64, 512) for _ in range(60)]
    run = Run(activations=lambda s: 2 * MIB * lengths[s], input_bytes=lambda s: 512 * lengths[s])
    double, half = asked(run, 60, Change(batch=2), Change(batch=0.5))
    largest = max(range(20, 60), key=run.peak)
    for found, factor in ((double, 2), (half, 0.5)):
        assert found.peak is not None
        needed = Run(activations=lambda s, factor=factor: round(2 * MIB * lengths[s] * factor)).peak(largest)
        assert abs(found.peak.expected / needed - 1) < 0.02
        assert found.fits
    assert double.phase == "backward"


def test_each_change_takes_away_what_it_is_about_and_says_what_it_cannot_know() -> None:
    run = Run(activations=lambda step: 50 * MIB, world_size=4, rank=0)
    now, fused, zero, views, longer, one = asked(
        run, 30, Change(), Change(fused=True), Change(zero=1), Change(bucket_views=True), Change(sequence=2),
        Change(checkpointing=True),
    )  # fmt: skip
    assert now.peak is not None
    assert now.peak.expected == run.peak(29)
    assert now.phase == "optimizer"
    assert fused.peak is not None
    assert now.peak.expected - fused.peak.expected == run.weights  # the foreach step's temporaries
    assert zero.peak is not None
    assert now.peak.expected - zero.peak.expected == 0.75 * (run.state + run.weights)
    assert views.why_not == "it does not run under DistributedDataParallel"
    assert longer.why_not == "no dimension of its inputs is known to be a length"
    assert one.why_not is not None
    assert "by layer" in one.why_not


def test_a_backtest_knows_what_was_said_in_time_and_what_was_false() -> None:
    run = Run(kept=lambda step: step * 16 * MIB, total=3 * GIB, slack=0)
    room = run.total - run.context
    end = next(step for step in range(500) if run.peak(step) > room)
    stream = list(run.stream(end, host_every=1))
    said = wire.Outlook(end, 0, run.time_ns(end) - 5000, run.peak(end), 0, 0, "optimizer", wire.OOM_AHEAD, -1)
    oom = wire.Oom(end, "optimizer", 0, run.time_ns(end), MIB)
    stream += [run.received(said, end), run.received(oom, end)]
    (score,) = backtest(stream)
    assert score.ended[0].by_shape == 5000
    assert score.ended[0].steps_ahead is not None
    assert score.ended[0].steps_ahead >= 20
    assert (score.false_outlooks, score.false_findings) == (0, 0)
    error = score.steps_to_oom_error()
    assert error is not None
    assert error < 0.05
    assert score.naive["last peak"].median is not None
    assert score.outlook.median is not None
    assert score.outlook.median < score.naive["last peak"].median

    false = Run()
    stream = list(false.stream(30, host_every=1))
    wrong = wire.Outlook(20, 0, 1, 9 * GIB, 8 * GIB, 9 * GIB, "backward", wire.OOM_AHEAD, -1)
    at = next(i for i, r in enumerate(stream) if isinstance(r.event, wire.Step) and r.event.step == 20)
    stream.insert(at, replace(false.received(wrong, 20), seq=-1))
    (score,) = backtest(stream)
    assert score.false_outlooks == 1


def test_ranks_that_are_looked_at_in_turn_learn_every_step() -> None:
    def size(step: int) -> int:
        return 65536 + step * 7919 % 13 * 1024

    runs = [Run(nonce=f"r{n}", rank=n, pid=4000 + n, input_bytes=size, kept=lambda step: 4096 * step) for n in range(2)]
    store, always, seldom, never = SessionStore(), Reporter(), Reporter(), Reporter()
    for run in runs:
        for received in run.picture():
            store.apply(received)
    last = 128
    stood: list[int] = []
    for step in range(last):
        for run in runs:
            for received in run.step(step):
                store.apply(received)
        frame = store.frame(runs[0].unix_ns(step))
        whole = always.report(frame)
        seldom.report(frame, {f"r{step // 20 % 2}"} if step < last - 1 else None)
        forecast = never.report(frame, ())[0].devices[0].forecast
        assert forecast is not None
        stood.append(step + 1 - forecast.learnt_from)
    for one, other in zip(seldom.report(frame), whole, strict=True):
        assert [(d.forecast, d.growth, d.regimes, d.peak, d.ledger, d.estimate) for d in one.devices] == [
            (d.forecast, d.growth, d.regimes, d.peak, d.ledger, d.estimate) for d in other.devices
        ]
        assert [finding.code for finding in one.findings] == [finding.code for finding in other.findings]
    assert max(stood) == 64
