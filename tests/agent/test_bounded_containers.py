"""Which containers a script's own source keeps within bounds, and which it only looks at."""

from __future__ import annotations

import pytest

from gpumon_agent.leaks.bounded_containers import limit

MEANS = {"self.capacity": 12, "KEEP": 30, "self.unlimited": None}


@pytest.mark.parametrize(
    ("source", "most"),
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
def test_the_length_at_which_it_is_shortened(source: str, most: int | None) -> None:
    assert limit(source.splitlines(), "kept", MEANS.get) == most
