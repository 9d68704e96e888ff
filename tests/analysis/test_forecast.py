"""The forecast against runs whose next peak is known."""

from __future__ import annotations

import math
import random

import pytest
from msgspec.structs import replace
from synthetic import GIB, MIB, Run, apply

from gpumon.analysis import Forecast, Reporter
from gpumon.analysis.forecast import Forecaster
from gpumon.analysis.forecast.headroom import Room
from gpumon.analysis.history import step_peaks
from gpumon.analysis.rules import OOM_AHEAD
from gpumon.session.store import SessionStore, StoreLimits
from gpumon_agent import wire


def forecasts(run: Run, steps: int, *, host_every: int = 0) -> list[Forecast]:
    """What is said after each step: item k speaks of step k + 1."""
    store, reporter = SessionStore(StoreLimits(steps=64)), Reporter()
    said: list[Forecast] = []
    for received in run.stream(steps, host_every=host_every):
        store.apply(received)
        if isinstance(received.event, wire.Step):
            rank = store.rank(run.nonce, 0)
            assert rank is not None
            forecast = reporter.rank(rank).devices[0].forecast
            assert forecast is not None
            said.append(forecast)
    return said


def misses(run: Run, said: list[Forecast], begin: int) -> list[bool]:
    return [not f.low <= run.peak(k + 1) <= f.high for k, f in enumerate(said) if k >= begin]


@pytest.mark.parametrize("activations", [10 * MIB, 300 * MIB, 3 * GIB])
def test_same_shapes_are_forecast_to_half_a_percent_from_the_third_iteration(activations: int) -> None:
    run = Run(activations=lambda step: activations)
    for k, forecast in enumerate(forecasts(run, 60)):
        if k >= 1:
            assert abs(forecast.next_peak - run.peak(k + 1)) <= 0.005 * run.peak(k + 1)
        assert forecast.low <= run.peak(k + 1) <= forecast.high


def test_the_second_iteration_s_optimizer_state_is_foreseen() -> None:
    run = Run(activations=lambda step: 3 * GIB)
    first = forecasts(run, 1)[0]
    assert first.phase == "backward"
    assert first.low <= run.peak(1) <= first.high


def test_the_interval_is_wide_at_first_and_closes_on_steady_shapes() -> None:
    widths = [f.high - f.low for f in forecasts(Run(), 60)]
    assert widths[0] > 0.1 * Run().peak(1)
    assert widths[-1] <= 0.0011 * Run().peak(1)  # rounding of single blocks to each side
    assert widths[3] > widths[10] > widths[59] or widths[10] == widths[59] == 0


def lengths(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randint(64, 512) for _ in range(700)]


@pytest.mark.parametrize("seed", range(5))
def test_with_batches_of_random_length_the_interval_holds_as_often_as_it_says(seed: int) -> None:
    sizes = lengths(seed)
    run = Run(activations=lambda step: 2 * MIB * sizes[step], input_bytes=lambda step: 512 * sizes[step])
    said = forecasts(run, 600)
    kept = 1 - sum(misses(run, said, 20)) / 580
    assert 0.92 <= kept <= 0.995


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_does_not_reach_below_what_stands(seed: int) -> None:
    sizes = lengths(seed)
    run = Run(activations=lambda step: (sizes[step] - 63) ** 2 * MIB // 8, input_bytes=lambda step: 512 * sizes[step])
    said = forecasts(run, 200)
    assert all(
        forecast.low >= run.start(step + 1) - run.input_bytes(step + 1) * 8 for step, forecast in enumerate(said)
    )


def test_another_regime_widens_the_interval_at_once_and_it_narrows_again() -> None:
    run = Run(activations=lambda step: 300 * MIB if step < 50 else 900 * MIB)
    said = forecasts(run, 100)
    width = [f.high - f.low for f in said]
    assert width[49] <= 0.0011 * run.peak(49)
    assert max(width[51:54]) > 0.1 * run.peak(51)
    assert width[99] < 0.01 * run.peak(99)
    assert said[52].next_peak == run.peak(53)


def test_headroom_is_what_the_process_can_have_above_the_peak() -> None:
    run = Run(others=5 * GIB)
    forecast = forecasts(run, 20, host_every=1)[-1]
    assert forecast.headroom == run.total - run.context - 5 * GIB - run.peak(20)
    assert forecast.p_oom is not None
    assert forecast.p_oom < 1e-6
    assert forecast.steps_to_oom is None


def test_without_a_device_reading_headroom_is_what_the_device_could_give_at_most() -> None:
    run = Run()
    forecast = forecasts(run, 20)[-1]
    assert (forecast.headroom, forecast.headroom_at_most) == (run.total - run.peak(20), True)
    assert (forecast.verdict, forecast.p_oom, forecast.max_batch_factor) == (None, None, None)


def test_what_the_whole_device_could_not_give_will_not_fit_without_a_reading_either() -> None:
    forecast = forecasts(Run(total=1 * GIB, activations=lambda step: 2 * GIB), 20)[-1]
    assert forecast.headroom is not None
    assert forecast.headroom < 0
    assert forecast.verdict == wire.OOM_AHEAD


@pytest.mark.parametrize("noise", [0, MIB // 2])
def test_a_leak_s_end_is_foreseen_within_ten_percent(noise: int) -> None:
    rng = random.Random(1)
    jitter = [rng.randint(0, noise) for _ in range(400)]
    run = Run(kept=lambda step: step * 4 * MIB + jitter[step], total=4 * GIB)
    room = run.total - run.context
    fails_at = next(step for step in range(2000) if run.peak(min(step, 399)) + max(0, step - 399) * 4 * MIB > room)
    for k, forecast in enumerate(forecasts(run, 300, host_every=1)):
        if k >= 40:
            assert forecast.steps_to_oom is not None
            left = fails_at - k
            assert abs(forecast.steps_to_oom - left) <= max(0.1 * left, 2)


def test_a_random_leak_s_end_lies_in_the_interval_as_often_as_that_says() -> None:
    held: list[bool] = []
    for seed in range(8):
        rng = random.Random(seed)
        kept = [0]
        for _ in range(700):
            kept.append(kept[-1] + rng.randint(0, 12 * MIB))
        run = Run(kept=kept.__getitem__, total=2 * GIB, slack=0)
        fails_at = next(step for step in range(700) if run.peak(step) > run.total - run.context)
        said = forecasts(run, fails_at, host_every=1)
        for step in range(fails_at // 4, fails_at - 10):
            least, most = said[step].steps_to_oom_low, said[step].steps_to_oom_high
            assert least is not None
            held.append(least <= fails_at - step <= (most or math.inf))
            assert most is None or most - least < 0.9 * (fails_at - step) + 20
    assert 0.9 < sum(held) / len(held) <= 1.0


@pytest.mark.parametrize("seed", range(5))
def test_no_trend_is_seen_where_there_is_none(seed: int) -> None:
    sizes = lengths(seed)
    run = Run(activations=lambda step: MIB * sizes[step], input_bytes=lambda step: 8192 * sizes[step])
    assert all(f.steps_to_oom is None for f in forecasts(run, 600, host_every=10))


def test_the_batch_that_still_fits_is_told() -> None:
    run = Run(activations=lambda step: 300 * MIB, total=4 * GIB)
    factor = forecasts(run, 30, host_every=1)[-1].max_batch_factor
    assert factor is not None
    room = run.total - run.context
    grown = Run(activations=lambda step: round(300 * MIB * factor), total=4 * GIB)
    assert grown.peak(5) <= room  # a lower bound
    more = Run(activations=lambda step: round(300 * MIB * factor * 1.2), total=4 * GIB)
    assert more.peak(5) > room


@pytest.mark.parametrize("seed", range(4))
def test_of_batches_that_differ_a_smaller_one_fits_where_the_largest_do_not(seed: int) -> None:
    sizes = lengths(seed)

    def run(factor: float, total: int) -> Run:
        return Run(
            activations=lambda step: round(MIB * factor * sizes[step]),
            input_bytes=lambda step: round(8192 * factor * sizes[step]),
            total=total,
        )

    largest = max(run(1.0, 0).peak(step) for step in range(200, 400))
    least = run(0.0, 0).peak(5)
    total = run(1.0, 0).context + least + round(0.8 * (largest - least))
    factor = forecasts(run(1.0, total), 200, host_every=1)[-1].max_batch_factor
    assert factor is not None
    assert 0.7 < factor < 1.0
    scaled = run(factor, total)
    fit = sum(scaled.peak(step) <= total - scaled.context for step in range(200, 400))
    assert fit >= 190


def test_a_peak_that_does_not_fit_is_likely_oom() -> None:
    run = Run(activations=lambda step: 300 * MIB, total=4 * GIB, others=4 * GIB - 450 * MIB - 620 * MIB)
    forecast = forecasts(run, 10, host_every=1)[-1]
    assert forecast.headroom is not None
    assert forecast.headroom < 0
    assert forecast.p_oom == 1.0


@pytest.mark.parametrize(("above", "likely"), [(0, False), (30 * MIB, False), (-1, True)])
def test_a_peak_that_fitted_into_all_there_is_fits_again(above: int, likely: bool) -> None:
    """After the allocator gave its cache back all that it reserves above the peak may be idle: headroom is 0."""
    forecaster = Forecaster()
    for record in apply(Run(activations=lambda step: 300 * MIB).stream(20)).frame(0).ranks[0].steps:
        figures = step_peaks(record, 0)
        assert figures is not None
        forecaster.observe(figures, record.on(0))
    said = forecaster.forecast(Room(figures.peak + above, 60 * MIB))
    assert said is not None
    assert said.p_oom is not None
    assert (said.headroom, said.p_oom > OOM_AHEAD.p_oom) == (min(above, 0), likely)


@pytest.mark.parametrize("period", [2, 5, 10])
def test_a_pattern_that_repeats_is_foreseen(period: int) -> None:
    run = Run(activations=lambda step: (300 + 50 * (step % period) ** 2) * MIB)
    for k, forecast in enumerate(forecasts(run, 80)):
        if k > 3 * period + 1:
            assert abs(forecast.next_peak - run.peak(k + 1)) <= 0.005 * run.peak(k + 1)


def test_steps_of_two_optimizers_in_turn_are_foreseen_though_none_is_like_another() -> None:
    jitter = random.Random(1)
    extra = [jitter.randrange(4 * MIB) for _ in range(41)]
    run = Run(
        activations=lambda step: (600 if step % 2 else 300) * MIB + extra[step], optimizers=lambda step: (step % 2,)
    )
    for k, forecast in enumerate(forecasts(run, 40)):
        if k > 8:
            assert abs(forecast.next_peak - run.peak(k + 1)) <= 0.01 * run.peak(k + 1)


def test_a_batch_that_grows_is_carried_on_and_its_end_foreseen() -> None:
    run = Run(activations=lambda step: (100 + 30 * step) * MIB, total=4 * GIB)
    said = forecasts(run, 80, host_every=1)
    fails_at = next(step for step in range(500) if run.peak(step) > run.total - run.context)
    for k, forecast in enumerate(said[:fails_at]):
        if k >= 12:
            assert abs(forecast.next_peak - run.peak(k + 1)) <= 0.005 * run.peak(k + 1)
            assert forecast.growth == "batch"
            assert forecast.steps_to_oom is not None
            assert abs(forecast.steps_to_oom - (fails_at - k)) <= 2


def test_a_reading_from_before_the_allocator_s_growth_promises_nothing() -> None:
    run = Run(total=2 * GIB)
    early = run.host(0)
    (device,) = early.event.devices
    t_ns = run.time_ns(0) - 45_000_000  # before the first sample: nothing was reserved yet
    empty = replace(device, free=run.total - run.context, began_ns=t_ns, ended_ns=t_ns + 1000)
    host = wire.Received("host:box", run.unix_ns(0) - 45_000_000, wire.Host("box", t_ns, "580", (empty,)))
    store = apply(run.picture(), [host], *(run.step(k) for k in range(9)))
    forecast = Reporter().report(store.frame(run.unix_ns(8)))[0].devices[0].forecast
    assert forecast is not None
    assert forecast.headroom_at_most
    assert forecast.verdict is None


def test_headroom_stands_while_a_long_phase_lets_no_reading_be_placed() -> None:
    run, store, reporter = Run(), SessionStore(), Reporter()
    for received in run.stream(10, host_every=1):
        store.apply(received)
    known = reporter.report(store.frame(0))[0].devices[0].forecast
    for later in range(11, 60):
        store.apply(run.host(later))
        now = reporter.report(store.frame(0))[0].devices[0].forecast
        assert now is not None
        assert known is not None
        assert now.headroom == known.headroom


@pytest.mark.parametrize(("available", "likely"), [(64 * GIB, False), (0, True)])
def test_on_the_cpu_the_room_is_what_the_machine_has_available_and_what_is_held_anyway(
    available: int, likely: bool
) -> None:
    run = Run()
    hello = replace(run.hello(), backend="cpu", devices=(wire.Device(0, None, "x86_64", 96 * GIB, "cpu"),))
    host = wire.Host("box", run.time_ns(8), memory_total=96 * GIB, memory_available=available)
    read = wire.Received("host:box", run.unix_ns(8), host)
    steps = (run.step(k) for k in range(9))
    store = apply([wire.Received(run.nonce, run.unix_ns(-1), hello)], *steps, [read])
    report = Reporter().report(store.frame(run.unix_ns(8)))[0].devices[0]
    assert report.capacity == 96 * GIB
    assert report.forecast is not None
    assert report.forecast.headroom == run.start(8) + available - report.forecast.next_peak
    assert report.forecast.p_oom is not None
    assert (report.forecast.p_oom > 0.5) == likely
