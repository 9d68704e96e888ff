"""Which containers a script's own source keeps within bounds, and which it only looks at."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpumon_agent.leaks.bounded_containers import limit, source

MEANS = {"self.capacity": 12, "KEEP": 30, "self.unlimited": None}


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("if len(kept) > 100:\n    kept.pop(0)", 100),
        ("while len(self.kept) >= 1_000: self.kept.popleft()", 1000),
        ("if len(self.kept) > self.capacity:\n    # the oldest\n    del self.kept[0]", 12),
        ("if self.unlimited and len(self.kept) > self.unlimited:\n    self.kept.pop(0)", None),
        ("kept = kept[-KEEP:]", 30),
        ("self.kept[:] = self.kept[-8:]", 8),
        ("del kept[:-50]", 50),
        ("if len(kept) == 64:\n    flush(kept)\n    kept = []", 64),
        ("mean = sum(kept[-100:]) / 100", None),  # what is only looked at grows on
        ("if len(kept) > 100:\n    print(kept[0])", None),
        ("if len(others) > 100:\n    kept.pop(0)", None),
        ("if step % 10 == 0:\n    kept.clear()", None),
        ("unkept = unkept[-5:]", None),
    ],
)
def test_the_length_at_which_it_is_shortened(text: str, most: int | None) -> None:
    assert limit(text.splitlines(), "kept", MEANS.get) == most


@pytest.mark.parametrize(("between", "most"), [(2, 100), (3, None)])
def test_it_is_shortened_within_three_lines_of_the_comparison(between: int, most: int | None) -> None:
    lines = ["if len(kept) > 100:", *["    count += 1"] * between, "    kept.pop(0)"]
    assert limit(lines, "kept", MEANS.get) == most


@pytest.mark.parametrize(("before", "most"), [(23, 50), (24, None)])
def test_no_more_than_24_lines_are_searched_in_one_slice(before: int, most: int | None) -> None:
    assert limit([*["print(kept[0])"] * before, "del kept[:-50]"], "kept", MEANS.get) == most


@pytest.mark.parametrize(("characters", "lines"), [(128 * 1024, 1), (128 * 1024 + 1, 0)])
def test_a_file_of_more_than_128_kib_is_not_read_in_one_slice(tmp_path: Path, characters: int, lines: int) -> None:
    (tmp_path / "train.py").write_text("#" * characters)
    assert len(source(str(tmp_path / "train.py"))) == lines
