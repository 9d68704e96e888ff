"""Finds the lists of events of a snapshot while an unpickler fills them.

Model. An unpickler shows nothing of what it has made, but Python's garbage collector knows every list. A pickle makes a
list empty and appends a thousand elements at once (pickle.py, `_BATCHSIZE`). So a list is one of events if the first
of its elements has an action, at the call after it was made or the one after that. One that is not found is missing
only here: whoever has all objects still has it.

Cost. Each list is looked at twice. The collector is switched off, because all lists would be searched again.
"""

from __future__ import annotations

import gc
from typing import Any


class EventLists:
    """All that was made since the last call is looked through. One at a time in a process."""

    def __init__(self) -> None:
        gc.disable()
        gc.freeze()
        self._empty: list[list[Any]] = []
        self._found: list[list[Any]] = []

    def found(self) -> list[list[Any]]:
        """Those found so far: they may get more elements."""
        new = [each for each in gc.get_objects(generation=0) if type(each) is list]
        gc.freeze()  # they are in no generation any more
        self._found += [each for each in (*self._empty, *new) if each and _is_event(each[0])]
        self._empty = [each for each in new if not each]
        return self._found


def _is_event(value: Any) -> bool:
    return type(value) is dict and "action" in value
