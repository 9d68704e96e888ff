"""Whether a peak fits: how near is tight, how wide an interval, what cannot be used. Phases are written by hand."""

from __future__ import annotations

import pytest

from gpumon_agent import wire
from gpumon_agent.shape_model.max_affine import fitted, highest
from gpumon_agent.shape_model.residuals import Residuals
from gpumon_agent.shape_model.verdict import Fragments, verdict

MIB = 1 << 20


def phase(peak: int, reserved: int, split: int = 0, retries: int = 0) -> wire.Phase:
    return wire.Phase(0, "backward", 0, 0, 0, 1, peak, peak, reserved, reserved, peak, split, peak, 9, retries, 0)


@pytest.mark.parametrize(("high", "said"), [(950, "fits"), (951, "tight")])
def test_it_is_tight_where_a_twentieth_of_the_room_or_less_is_left_above_the_interval(high: int, said: str) -> None:
    assert verdict(900 * MIB, 890 * MIB, high * MIB, True, 1000 * MIB, None, None)[0] == said


@pytest.mark.parametrize(("steps", "known"), [(200, True), (201, False)])
def test_for_200_steps_after_a_retry_nothing_lies_free_in_whole_segments(steps: int, known: bool) -> None:
    """The cache is filled again only as batches of other sizes come."""
    fragments = Fragments(False)
    fragments.learn([phase(800 * MIB, 900 * MIB)])
    for _ in range(steps):
        fragments.learn([phase(800 * MIB, 900 * MIB, retries=1)])
    assert fragments.refused == known
    assert fragments.bytes == 100 * MIB  # all of it is in pieces


def test_the_least_that_lay_idle_in_16_steps_counts() -> None:
    fragments = Fragments(False)
    fragments.learn([phase(890 * MIB, 900 * MIB, split=100 * MIB)])
    for count, idle in ((15, 10 * MIB), (1, 100 * MIB)):
        for _ in range(count):
            fragments.learn([phase(800 * MIB, 900 * MIB, split=100 * MIB)])
        assert fragments.bytes == idle


@pytest.mark.parametrize(("less", "said"), [(1, "tight"), (2, "oom-ahead")])
def test_what_fitted_proves_nothing_where_the_room_has_shrunk_by_more_than_a_mib(less: int, said: str) -> None:
    """Readings of the device differ by less: a driver's own pages."""
    fragments = Fragments(True)
    fragments.learn([phase(1000 * MIB, 1000 * MIB)])
    fragments.within(1000 * MIB)
    peak = 1000 * MIB
    assert verdict(peak, peak, peak, True, (1000 - less) * MIB, None, fragments)[0] == said


def test_planes_are_fitted_until_each_has_the_batches_at_which_it_is_higher() -> None:
    """The first guess, halves by size, has nothing to do with which length decides here."""
    points = [((1.0, u, v, 0.0, 0.0, 0.0), max(3 * u, 2 * v)) for u in range(1, 8) for v in range(1, 8)]
    planes = fitted(points)
    assert max(abs(highest(planes, x) - value) for x, value in points) < 0.01


def test_two_planes_are_fitted_to_six_batches_each() -> None:
    """A plane has six coefficients: fewer batches are met by any."""
    points = [((1.0, float(at), float(at % 5), 0.0, 0.0, 0.0), max(10.0 * at, 600.0 - 5.0 * at)) for at in range(80)]
    assert fitted(points[:11]) == ()
    assert fitted(points[:12])
    assert len(fitted([*points[:6], *points[-6:]])) == 2


@pytest.mark.parametrize(("off", "exact", "width"), [(0.0, 0, 0.10), (0.009, 150, 0.009), (0.011, 150, 0.0005)])
def test_how_wide_an_interval_is(off: float, exact: int, width: float) -> None:
    """A tenth to each side before anything is known. Where most are met to the byte, as wide as the others are off by,
    an event of more than a hundredth left out; but at least as blocks are rounded.
    """
    residuals = Residuals()
    for each in (*[off] * (exact > 0), *[0.0] * exact):
        residuals.learn(each)
    assert residuals.above == pytest.approx(width)


@pytest.mark.parametrize(("since", "width"), [(199, 0.009), (200, 0.0005)])
def test_the_newest_200_residuals_count(since: int, width: float) -> None:
    residuals = Residuals()
    for each in (0.009, *[0.0] * since):
        residuals.learn(each)
    assert residuals.above == pytest.approx(width)
