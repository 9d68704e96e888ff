"""Parses sizes such as ``16GiB``, ``450MiB``, ``512`` (bytes). Binary units only."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse(size: int | str) -> int:
    """Bytes in ``size``. Raises ValueError with a one-sentence message."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError(f"{size!r} is not a size: write bytes, or a number with KiB, MiB or GiB, such as 16GiB")
    return round(float(match[1]) * _UNITS[match[2].upper()])
