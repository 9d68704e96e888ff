"""Bytes and durations as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumon.analysis import units

GIB = 1 << 30
MIB = 1 << 20


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.00 KiB"),
        (4 * MIB, "4.00 MiB"),
        (round(61.2 * GIB), "61.2 GiB"),
        (GIB - 1, "1.00 GiB"),
        (round(9.996 * GIB), "10.0 GiB"),
        (round(0.315 * GIB), "322.6 MiB"),
        (-round(11.8 * GIB), "−11.8 GiB"),
        (2000 * GIB, "1.95 TiB"),
    ],
)
def test_size(value: int | None, text: str) -> None:
    assert units.size(value) == text


def test_a_difference_carries_its_sign() -> None:
    assert [units.size(each, sign=True) for each in (4 * MIB, -MIB, 0)] == ["+4.00 MiB", "−1.00 MiB", "0 B"]


def test_figures_that_are_compared_share_a_unit_and_its_digits() -> None:
    unit = units.unit_for(36 * GIB, 300 * MIB, None, 0)
    assert unit.bytes == GIB
    assert [units.in_unit(v, unit) for v in (36 * GIB, 300 * MIB, 5 * MIB, MIB, 0)] == [
        "36.00", "0.29", "<0.01", "<0.01", "0.00",
    ]  # fmt: skip
    assert [units.in_unit(v, units.unit_for(140 * GIB)) for v in (140 * GIB, 300 * MIB, 30 * MIB)] == [
        "140.0", "0.3", "0.03",
    ]  # fmt: skip


@given(st.integers(-(1 << 62), 1 << 62))
def test_every_size_fits_its_column_and_only_zero_looks_like_zero(value: int) -> None:
    shown = units.size(value)
    assert (value == 0) == (shown == "0 B")
    if abs(value) < 1000 << 40:
        assert len(units.size(value, sign=True)) <= len("+1,023.9 MiB")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "n/a"), (0.000018, "18 µs"), (0.0032, "3.2 ms"), (0.45, "450 ms"), (1.25, "1.25 s"), (42, "42 s"),
        (59.6, "1 m 00 s"), (185, "3 m 05 s"), (8_040, "2 h 14 m"), (273_600, "3 d 4 h"), (-2, "−2.00 s"),
    ],
)  # fmt: skip
def test_duration(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


def test_pace_below_one_a_second_is_told_the_other_way_round() -> None:
    assert (units.pace(3.2), units.pace(0.08), units.pace(None), units.pace(0)) == (
        "3.2 it/s", "12.5 s/it", "n/a", "n/a",
    )  # fmt: skip


def test_percent_never_says_all_or_nothing_of_what_is_not() -> None:
    assert [units.percent(v) for v in (0.0, 0.0004, 0.002, 0.43, 0.9995, 1.0)] == [
        "0 %", "<0.1 %", "0.2 %", "43 %", ">99.9 %", "100 %",
    ]  # fmt: skip


def test_a_batch_is_named_by_its_first_two_shapes() -> None:
    assert units.shapes(((8, 1024), (8,))) == "8×1024, 8"
    assert units.shapes(((8, 1024), (8,), (8, 3))) == "8×1024, 8, …"


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1 step"), (99, "99 steps"), (100, "about 100 steps"), (169, "about 170 steps"), (996, "about 1,000 steps"),
     (10_194_101, "about 10,000,000 steps")],
)  # fmt: skip
def test_a_forecast_count_has_two_digits(number: int, text: str) -> None:
    assert units.about(number) == text


def test_an_interval_whose_ends_read_the_same_is_left_out() -> None:
    assert units.between(524_288, 524_300) == ""
    assert units.between(524_288, 786_432) == " (512.0 KiB–768.0 KiB)"
