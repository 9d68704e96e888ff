"""Whether a script keeps a container within bounds itself: a length that its source compares with and shortens at.

Model. Three forms are known, of a variable or an attribute of that name, in the file that it is from: `len(x) > N`
followed within three lines by a pop, clear, del or new value of x; `x = x[-N:]`; `del x[:-N]`. N is a number, or a name
that stands for one in the same place. Where the container is longer than that already, nothing bounds it.
Kept for users who keep a window of the newest outputs (`if len(recent) > 100: recent.pop(0)`): until it is full, the
window grows like a leak and would be reported as one (tests/scenarios/leaks, the clean twin of `recent_outputs`).
Known limitations. Two variables of one name in one file are not told apart; other forms are not known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpumon_agent.guard import pass_on

SOURCE_BYTES_MAX = 1 << 17  # reading and searching one is a single piece of work
PLACES_MAX = 24  # lines that speak of a name's length or parts
LINES = 4  # in which the comparison and what follows from it stand
_LIMIT = r"([A-Za-z_][\w.]*|\d[\d_]*)"


def limit(lines: list[str], name: str, value: Callable[[str], Any]) -> int | None:
    """The length at which this source shortens what it calls `name`. `value`: what another name stands for there."""
    own = rf"\b{re.escape(name)}\b"
    compares = re.compile(rf"\blen\([\w.]*{own}\)\s*(?:>=?|==)\s*{_LIMIT}")
    shortens = re.compile(rf"{own}\.(?:pop|popleft|popitem|clear)\(|\bdel\s+[\w.]*{own}|{own}(?:\[:\])?\s*=[^=]")
    keeps = re.compile(rf"{own}(?:\[:\])?\s*=\s*[\w.]*{own}\[-{_LIMIT}:\]|\bdel\s+[\w.]*{own}\[:-{_LIMIT}\]")
    places = [at for at, line in enumerate(lines) if name in line and ("len(" in line or "[" in line)]
    for at in places[:PLACES_MAX]:
        found = keeps.search(lines[at])
        if found is None:
            found = compares.search(lines[at])
            if found is None or not shortens.search("\n".join(lines[at : at + LINES])):
                continue
        told = next(group for group in found.groups() if group)
        known = int(told) if told[0].isdigit() else value(told)
        if type(known) is int and known > 0:
            return known
    return None


def source(file: str) -> list[str]:
    """The lines of a file of the user's; none where there is no such file, or it is too large."""
    path = Path(file)
    try:
        return [] if path.stat().st_size > SOURCE_BYTES_MAX else path.read_text(errors="replace").splitlines()
    except OSError as error:
        pass_on(error)
        return []
