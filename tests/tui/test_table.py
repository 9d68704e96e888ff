"""The table that all screens share: which columns are given up, and whose heading is where."""

from __future__ import annotations

from gpumon.tui.table import Column, column_at, heads, place, row_cells, used
from gpumon.tui.text_layout import width

COLUMNS: tuple[Column[int, str], ...] = (
    Column("first", "first", 10, 2, lambda row, unit: (f"{row} {unit}", "text")),
    Column("second", "second", 8, 0, lambda row, unit: (str(row), "strong")),
    Column("third", "third", 6, 1, lambda row, unit: ((("##", "bar"),), "")),
    Column("word", "word", 12, 3, lambda row, unit: ("kept", "dim"), to_left=True),
)


def names(room: int, order: str = "") -> list[str]:
    return [column.name for column in place(COLUMNS, room, order)]


def test_columns_are_given_up_by_rank_and_keep_their_order() -> None:
    assert names(36) == ["first", "second", "third", "word"]
    assert names(35) == ["first", "second", "third"]
    assert names(23) == ["second", "third"]
    assert names(13) == ["second"]
    assert names(7) == []


def test_what_is_sorted_by_stays() -> None:
    assert names(12, "word") == ["word"]
    assert names(20, "word") == ["second", "word"]


def test_a_row_and_the_headings_have_the_columns_widths() -> None:
    for line in (heads(COLUMNS, "second", "▾"), row_cells(COLUMNS, 7, "GiB")):
        assert width(line) == used(COLUMNS) == 36
    assert ("  second▾"[1:], "key") in heads(COLUMNS, "second", "▾")
    assert "".join(text for text, _ in row_cells(COLUMNS, 7, "GiB")) == "     7 GiB       7  ##    kept      "
    assert {role for _, role in row_cells(COLUMNS[:2], 7, "GiB", "cursor")} == {"cursor"}


def test_a_heading_is_found_by_its_cells() -> None:
    found = [column_at(COLUMNS, x) for x in range(-1, 37)]
    assert found[0] is found[-1] is None
    assert [found.count(name) for name in ("first", "second", "third", "word")] == [10, 8, 6, 12]
