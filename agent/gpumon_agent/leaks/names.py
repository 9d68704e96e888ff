"""Merges names of holders that differ only in the keys of one dict."""

from __future__ import annotations

import re
from collections import Counter

from gpumon_agent.leaks.object_children import FEW, Name

_LAST_KEY = re.compile(r"\['[^']*'\](?=[^\[]*$)")
_KEY = re.compile(r"\['[^']*'\]")


def together(holders: Counter[Name], most: int = FEW) -> Counter[Name]:
    """If there are more than `most` names, merges those that differ in the last key only, then in any keys."""
    for differing in (_LAST_KEY, _KEY):
        if len(holders) <= most:
            break
        merged: Counter[Name] = Counter()
        for name, count in holders.items():
            merged[name._replace(text=differing.sub("[*]", name.text))] += count
        holders = merged
    return holders
