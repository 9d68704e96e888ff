"""Counts the time that reading a sampled step takes, where it is spent; no garbage collection runs in between."""

from __future__ import annotations

import gc
from time import monotonic_ns, thread_time_ns
from typing import Protocol


class Cost(Protocol):
    """Where the cost of reading is booked: the governor."""

    at_end_only: bool
    hurries: bool
    ledger: bool
    ledger_at_end_only: bool
    ledger_ns: int
    ledger_thread_ns: int


class NoCollection:
    """Thousands of short-lived objects are made within: the collector would take them for a reason to look at all.

    In a process with transformers imported one such look takes a quarter of a second. Made once: to make one would be
    such an object too.
    """

    def __init__(self) -> None:
        self._was: list[bool] = []

    def __enter__(self) -> None:
        self._was.append(gc.isenabled())
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._was.pop():
            gc.enable()


class Booked:
    """What is done within costs: of the thread, and, unless somebody else books that, by the clock."""

    def __init__(self, cost: Cost, *, clock: bool) -> None:
        self._cost = cost
        self._clock = clock
        self._began = self._thread = 0

    def __enter__(self) -> None:
        self._began, self._thread = monotonic_ns(), thread_time_ns()

    def __exit__(self, *_: object) -> None:
        self._cost.ledger_thread_ns += thread_time_ns() - self._thread
        if self._clock:
            self._cost.ledger_ns += monotonic_ns() - self._began


NO_COLLECTION = NoCollection()
