"""Tests that `pytest` alone leaves to `.ci/run`: the functions that took longest, all their cases together.

Made anew by `pytest -m "not gpu and not long" --durations=0 --durations-min=0.3 | python tests/_shared/slow.py`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

LIST = Path(__file__).parents[1] / "slow.txt"
LEAST_S = 2.0
_DURATION = re.compile(r"([\d.]+)s (?:call|setup|teardown)\s+(tests/[^\s:]+::\w+)")


def taken(lines: Iterable[str]) -> list[str]:
    """file::function of each that took `LEAST_S` or more."""
    seconds: Counter[str] = Counter()
    for line in lines:
        if found := _DURATION.match(line):
            seconds[found[2]] += float(found[1])
    return sorted(name for name, took in seconds.items() if took >= LEAST_S)


if __name__ == "__main__":
    LIST.write_text("\n".join(taken(sys.stdin)) + "\n")
