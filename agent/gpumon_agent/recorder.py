"""The bounded queue between the training thread, which appends, and the publisher, which drains."""

from __future__ import annotations

import os
import weakref
from collections import deque
from itertools import count
from typing import Any

from .wire import LOAD, NumberedEvent, Phase

EVENTS_MAX = 16_384  # some 5 MiB; the publisher empties it twenty times a second

_alive: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """Numbers events and keeps them until drained. Never blocks: when full, the oldest goes and is counted.

    A forked child inherits this object but not the publisher's thread: there `append` does nothing.
    """

    def __init__(self, limit: int = EVENTS_MAX) -> None:
        self.dropped = 0
        self.last_seq = -1
        self.now: tuple[int, str, int] = (0, LOAD, 0)
        """Step, phase and its beginning (monotonic ns). Swapped whole, so that any thread may read it."""
        self._inert = False  # in a forked child; a flag, for asking the kernel who we are costs a system call
        self._events: deque[tuple[int, NumberedEvent | tuple[Any, ...]]] = deque(maxlen=limit)
        self._limit = limit
        self._numbers = count()  # its next() is atomic: two training threads never share a number
        _alive.add(self)

    def append(self, event: NumberedEvent | tuple[Any, ...]) -> None:
        """A plain tuple is a Phase's fields: to make one, and check it, is left to the publisher."""
        if self._inert:
            return
        events = self._events
        if len(events) >= self._limit:
            self.dropped += 1
        self.last_seq = seq = next(self._numbers)
        events.append((seq, event))

    def drain(self) -> list[tuple[int, NumberedEvent]]:
        """Everything appended since the last call, in order. For the one draining thread."""
        drained: list[tuple[int, NumberedEvent]] = []
        pop = self._events.popleft
        try:
            while True:
                seq, event = pop()
                drained.append((seq, Phase(*event) if isinstance(event, tuple) else event))
        except IndexError:  # the deque's own word for empty; asking for its length first would race
            return drained


def _silence_in_child() -> None:
    for recorder in list(_alive):
        recorder._inert = True


os.register_at_fork(after_in_child=_silence_in_child)
