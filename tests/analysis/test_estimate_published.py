"""Rows that ran on physical GPUs: their configuration is read and built as docs/physical-published.md says."""

from __future__ import annotations

import published_fits
import pytest

pytestmark = pytest.mark.torch


def test_all_rows_are_read_and_few_are_left_out() -> None:
    rows = published_fits.read()
    assert len(rows) == 216
    assert sum(row.tried() for row in rows) == 209
    assert {row.sharding for row in rows} == set(published_fits.STAGES)
    assert {row.gpu for row in rows} == set(published_fits.DEVICES)


def test_a_small_model_has_its_published_parameters_and_fits_where_it_ran() -> None:
    row = next(row for row in published_fits.read() if (row.model, row.tokens) == ("350m", 2048))
    found = published_fits.estimated(row)
    assert found.parameters == row.parameters == 355_985_408
    assert found.fits
    assert 0.3 < found.share < 1
