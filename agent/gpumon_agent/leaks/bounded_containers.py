"""Reads from the user's source at which length a script trims a container.

Model. Three patterns are searched for the variable or attribute in its file: `len(x) > N` followed within three lines
by a pop, clear, del or assignment of x; `x = x[-N:]`; `del x[:-N]`. N is a number, or a name for one in the same scope.
The caller must check that the container is not already longer.
Needed for windows of the newest outputs (`if len(recent) > 100: recent.pop(0)`): until it is full, such a window grows
like a leak and would be reported as one (tests/scenarios/leaks, the clean twin of `recent_outputs`).
Known limitations. Variables with the same name in one file are not distinguished; other patterns are not recognized.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpumon_agent.guard import pass_on

SOURCE_BYTES_MAX = 1 << 17  # a file is read and searched in one piece
PLACES_MAX = 24  # lines searched per name
LINES = 4  # from the comparison to the trimming, both included
_LIMIT = r"([A-Za-z_][\w.]*|\d[\d_]*)"


def limit(lines: list[str], name: str, value: Callable[[str], Any]) -> int | None:
    """The length at which this source trims `name`, or None. `value` looks up other names in the same scope."""
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
        bound = next(group for group in found.groups() if group)
        known = int(bound) if bound[0].isdigit() else value(bound)
        if type(known) is int and known > 0:
            return known
    return None


def source(file: str) -> list[str]:
    """The lines of a file; none if it cannot be read or is too large."""
    path = Path(file)
    try:
        return [] if path.stat().st_size > SOURCE_BYTES_MAX else path.read_text(errors="replace").splitlines()
    except OSError as error:
        pass_on(error)
        return []
