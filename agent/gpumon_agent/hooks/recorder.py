"""The bounded queue of events. Hooks append to it, the transport drains it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from gpumon_agent.allocator import reading
from gpumon_agent.guard import pass_on
from gpumon_agent.noted import Noted
from gpumon_agent.registry import REGISTRY
from gpumon_agent.wire import LOAD, NumberedEvent, Phase

EVENTS_MAX = 16_384  # some 5 MiB; emptied at each boundary
NOTED_MAX = 512  # events that wait, after which no more records of many steps are kept: some 6 MiB


class Recorder:
    """Numbers events and keeps them until drained. Never blocks: when full, the oldest is dropped and counted.

    In a forked child `append` does nothing.
    """

    __slots__ = ("__weakref__", "_drained", "_events", "_inert", "_newest", "now", "numbers", "put")

    def __init__(self, limit: int = EVENTS_MAX) -> None:
        self.now: tuple[int, str, int] = (0, LOAD, 0)
        """Step, phase and its start (monotonic ns). Replaced as a whole, so any thread may read it."""
        self._inert = False  # in a forked child; a flag, because os.getpid() is a system call
        self._events: deque[tuple[Any, ...]] = deque(maxlen=limit)
        self._drained = 0  # events so far
        self._newest = -1  # number of the newest drained event
        # The parts of `append`, for callers that cannot afford the call: `put((next(numbers), *the fields of a Phase up
        # to its figures, the reading))`. In a fork the caller must mute them. `next(numbers)` is atomic across threads.
        self.numbers = count()
        self.put: Callable[[tuple[Any, ...]], None] = self._events.append
        REGISTRY.recorders.add(self)

    def in_child(self) -> None:
        self._inert = True

    def append(self, event: NumberedEvent) -> None:
        if not self._inert:
            self.put((next(self.numbers), event))

    def append_noted(self, noted: Noted) -> None:
        for part in noted.parts():
            number = next(self.numbers)
            if not self._inert and len(self._events) < NOTED_MAX:
                self.put((number, part))

    @property
    def waits(self) -> bool:
        """Whether there is something to drain."""
        return bool(self._events)

    def drain(self) -> list[tuple[int, NumberedEvent | Noted]]:
        """All events since the last call, in order; builds the Phases. Only one thread may drain at a time."""
        drained: list[tuple[int, NumberedEvent | Noted]] = []
        pop = self._events.popleft
        for _ in range(len(self._events)):  # events appended meanwhile wait for the next call
            seq, *window, last = pop()
            if window:
                last = Phase(*window, *(last if type(last) is tuple else reading(last)))
            drained.append((seq, last))
        self._drained += len(drained)
        self._newest = max((seq for seq, _ in drained), default=self._newest)
        return drained

    @property
    def dropped(self) -> int:
        """Number of events lost before they were drained: gaps in the drained numbers."""
        return self._newest + 1 - self._drained

    @property
    def last_seq(self) -> int:
        try:
            newest: int = self._events[-1][0]
        except IndexError as error:
            pass_on(error)
            return self._newest
        return max(newest, self._newest)
