"""Each figure that the forecast is set to, and why: phases are written by hand, no model makes them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from gpumon.analysis.forecast import Forecaster, Others, Room
from gpumon.analysis.forecast.headroom import Taken, steps_to_full
from gpumon.analysis.history import step_peaks
from gpumon.analysis.types import Forecast, Growth
from gpumon.session.frame import StepRecord
from gpumon_agent import wire

MIB, GIB = 1 << 20, 1 << 30
WEIGHTS = 400 * MIB


class Fed:
    """A forecaster and the steps it is told, one by one."""

    def __init__(self) -> None:
        self.forecaster = Forecaster()
        self.step = -1

    def add(self, needs: int, rows: int = 8, stands: int = WEIGHTS, optimizers: tuple[int, ...] = (0,)) -> None:
        """A step whose backward needs so many bytes for a batch of so many rows."""
        self.step += 1
        ends = (("between", 0), ("forward", needs // 2), ("backward", needs), ("optimizer", MIB))
        phases = tuple(
            wire.Phase(self.step, name, 0, 0, 0, 1, stands, stands + above, GIB, GIB, 0, 0, 0, 9, 0, 0)
            for name, above in ends
        )
        closed = wire.Step(self.step, 0, 1, 64 * rows, ((rows, 64),), False, 4, optimizers=optimizers)
        figures = step_peaks(StepRecord(self.step, closed, phases), 0)
        assert figures is not None
        self.forecaster.observe(figures, phases)

    def said(self, room: int | None = None) -> Forecast:
        said = self.forecaster.forecast(None if room is None else Room(room))
        assert said is not None
        return said


def random_steps(fed: Fed, count: int, least: int, most: int, rng: random.Random) -> None:
    for _ in range(count):
        rows = rng.randint(least, most)
        fed.add(rows * MIB, rows)


def test_a_new_kind_of_batch_is_the_usual_one_once_more_than_half_of_nine_are_of_it() -> None:
    fed, rng = Fed(), random.Random(1)
    random_steps(fed, 60, 100, 110, rng)
    random_steps(fed, 4, 200, 210, rng)
    assert fed.said().next_peak < WEIGHTS + 120 * MIB
    random_steps(fed, 1, 200, 210, rng)
    assert fed.said().next_peak > WEIGHTS + 190 * MIB


def test_the_largest_batch_of_the_last_64_says_how_much_larger_they_may_be() -> None:
    fed, rng = Fed(), random.Random(1)
    random_steps(fed, 20, 90, 100, rng)
    fed.add(200 * MIB, 200)
    random_steps(fed, 63, 90, 100, rng)
    room = WEIGHTS + 200 * MIB
    assert fed.said(room).max_batch_factor == pytest.approx(1.0, abs=0.02)
    random_steps(fed, 1, 90, 100, rng)
    assert fed.said(room).max_batch_factor == pytest.approx(2.0, abs=0.05)


def test_three_different_batches_tell_what_does_not_grow_with_them() -> None:
    fed = Fed()
    for _ in range(20):
        fed.add(300 * MIB, 100)
    assert fed.said(WEIGHTS + 600 * MIB).max_batch_factor == pytest.approx(2.0, abs=0.02)  # a lower bound
    for rows in (50, 75, 100):  # 100 MiB stand whatever the batch
        fed.add((100 + 2 * rows) * MIB, rows)
    assert fed.said(WEIGHTS + 600 * MIB).max_batch_factor == pytest.approx(2.45, abs=0.07)  # 2.5, rounded down


def test_a_rank_is_compared_with_its_peers_from_16_peaks_on() -> None:
    """A lower quartile of fewer is one of the four lowest of a few steps."""
    fed = Fed()
    for _ in range(16):
        fed.add(100 * MIB)
    assert fed.forecaster.typical_peak() is None  # the first step's does not count
    fed.add(100 * MIB)
    assert fed.forecaster.typical_peak() == (WEIGHTS + 100 * MIB,) * 2


def test_of_optimizers_in_turn_the_middle_of_three_of_their_steps_counts() -> None:
    fed, rng = Fed(), random.Random(2)
    for step in range(40):
        fed.add((100 if step < 36 else 300) * MIB + rng.randrange(8 * MIB), 100 + step, optimizers=(step % 2,))
    assert fed.said().next_peak > WEIGHTS + 290 * MIB  # two of the three


@pytest.mark.parametrize(("apart", "alike"), [(0.0008, True), (0.0015, False)])
def test_peaks_of_two_rounds_are_alike_within_a_thousandth(apart: float, alike: bool) -> None:
    """Rounding of blocks moves a peak by less; batches of other sizes move it by more."""
    fed = Fed()
    for step in range(60):
        needs = (200, 300, 800, 400, 500)[step % 5] * MIB
        fed.add(needs + round(step // 5 * apart * (WEIGHTS + needs)), 100 + step % 5)
    found = fed.said().next_peak
    assert (abs(found / (WEIGHTS + 200 * MIB) - 1) <= 13 * apart) == alike


@pytest.mark.parametrize(("steps", "wobble", "carried"), [(8, 0, True), (7, 0, False), (8, 4, True), (8, 8, False)])
def test_eight_steps_of_the_same_pace_are_carried_on(steps: int, wobble: int, carried: bool) -> None:
    """100 MiB a step, up to 5 MiB more or less: a device may be full before growth is confirmed by 30 steps."""
    fed = Fed()
    for _ in range(10):
        fed.add(100 * MIB, 100)
    for step in range(1, steps):
        fed.add((100 + 100 * step + wobble * (step % 2)) * MIB, 100 + step)
    if wobble:  # differences of 100 ± wobble
        assert (fed.said(64 * GIB).growth == "batch") == carried
    else:
        assert (fed.said().next_peak == WEIGHTS + (100 + 100 * steps) * MIB) == carried


def readings(shrinks: int, count: int = 30, noise: Sequence[int] = (0,)) -> Others:
    others = Others()
    for second in range(count):
        others.read(float(second), 10 * GIB - second * shrinks + noise[second % len(noise)])
    return others


def test_what_others_take_counts_from_a_mebibyte_a_second_and_ten_readings_on() -> None:
    assert readings(3 * MIB // 2).per_step(1.0) == pytest.approx(1.5 * MIB)
    assert readings(MIB // 2).per_step(1.0) == 0.0
    assert readings(3 * MIB, 10).per_step(1.0) > 0
    assert readings(3 * MIB, 9).per_step(1.0) == 0.0


def test_what_others_take_is_asked_of_the_newest_64_readings() -> None:
    others = readings(4 * MIB, 64)
    stands = 10 * GIB - 63 * 4 * MIB
    for second in range(64, 64 + 63):
        others.read(float(second), stands)
    assert others.per_step(1.0) == 0.0


def taken(steps: int, *, begin: int = 8, grows: int = 20 * MIB) -> Taken:
    """3 MiB kept a step; a peak is 50 MiB above, and `grows` are reserved at once."""
    found, reserved, standing = Taken(), 200 * MIB, 90 * MIB
    for step in range(begin, begin + steps):
        while standing + 50 * MIB > reserved:
            reserved += grows
        found.observe(step, reserved, standing + 3 * MIB)
        standing += 3 * MIB
    return found


def test_where_memory_ends_is_told_from_three_growths_on_and_not_while_the_cache_fills() -> None:
    growths = [count for count in range(1, 60) if taken(count).last_standing(GIB) is not None]
    assert growths[0] == 35  # 20 steps for the 60 MiB that are free, then 20 MiB twice
    early = Taken()
    for step in range(8):
        early.observe(step, (100 + 20 * step) * MIB, (60 + 20 * step) * MIB)
    assert early.last_standing(GIB) is None


def test_eight_amounts_tell_how_much_they_vary() -> None:
    """With fewer the interval is that of the slope."""
    points = tuple((step, step * 100 + (step % 2) * 50) for step in range(20))
    growth = Growth("allocated", True, 12, per_step=100.0, low=99.0, high=101.0, points=points)
    eight, seven = steps_to_full(10_000, growth), steps_to_full(10_000, Growth(
        "allocated", True, 13, per_step=100.0, low=99.0, high=101.0, points=points
    ))  # fmt: skip
    assert eight is not None
    assert seven is not None
    assert eight[2] is not None
    assert seven[2] is not None
    assert eight[2] - eight[1] > 2 * (seven[2] - seven[1])


def grown(found: Taken, first: int, gaps: Sequence[int], sizes: Sequence[int]) -> int:
    """Each step takes one segment, with so many bytes less standing than were reserved. Says what is reserved then."""
    reserved = GIB
    for at, (gap, size) in enumerate(zip([*gaps, gaps[-1]], [0, *sizes], strict=True)):
        reserved += size
        found.observe(first + at, reserved, reserved - gap)
    return reserved


def test_the_newest_32_growths_say_where_memory_ends() -> None:
    """Of them 17 needed 50 MiB beside what stood, the ones before 10."""
    found = Taken()
    gaps = [10 * MIB] * 60 + [50 * MIB] * 17
    reserved = grown(found, 8, gaps, [(20, 24)[at % 2] * MIB for at in range(77)])
    said = found.last_standing(reserved + GIB)
    assert said is not None
    assert reserved + GIB - said[0] == pytest.approx(60 * MIB, abs=10 * MIB)


def test_memory_may_end_anywhere_within_a_growth_an_eighth_from_either_end() -> None:
    """Each growth stands for four ends, evenly apart: the second is the median, all but one in six lie within three."""
    found = Taken()
    reserved = grown(found, 8, [10 * MIB] * 3, [80 * MIB] * 3)
    assert found.last_standing(reserved + GIB) == (reserved + GIB - (10 + 30) * MIB, 30 * MIB)


def test_a_cache_has_filled_after_eight_steps() -> None:
    found = Taken()
    reserved = grown(found, 8, [10 * MIB] * 3, [20 * MIB, 24 * MIB, 20 * MIB])
    assert found.last_standing(reserved + GIB) is not None
    found = Taken()
    grown(found, 6, [10 * MIB] * 3, [20 * MIB, 24 * MIB, 20 * MIB])
    assert found.last_standing(reserved + GIB) is None


@pytest.mark.parametrize(("size", "alike"), [(3 * MIB, True), (2 * MIB, False)])
def test_segments_above_two_mebibytes_that_are_alike_tell_into_which_one_the_end_falls(size: int, alike: bool) -> None:
    """Those of 2 MiB are the allocator's for tensors below 1 MiB, which share none with larger ones."""
    found = Taken()
    reserved = grown(found, 8, [10 * MIB] * 6, [size] * 6)
    said = found.last_standing(reserved + MIB)  # less than one more segment
    assert said is not None
    assert (said[0] == reserved - 10 * MIB) == alike


def test_of_batches_sorted_by_length_the_newest_is_the_usual_one() -> None:
    fed, rng = Fed(), random.Random(3)
    for rows in sorted(rng.randint(100, 500) for _ in range(80)):
        fed.add(rows * MIB, rows)
    assert fed.said().next_peak == WEIGHTS + rows * MIB
