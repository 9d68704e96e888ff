"""Measures the cost of reading a sampled step, and keeps garbage collections out of it."""

from __future__ import annotations

import gc
from time import monotonic_ns, thread_time_ns
from typing import Protocol


class Cost(Protocol):
    """The governor, which the cost is charged to."""

    at_end_only: bool
    hurries: bool
    ledger: bool
    ledger_at_end_only: bool
    ledger_ns: int
    ledger_thread_ns: int


class NoCollection:
    """Disables the collector: thousands of short-lived objects are made within, which would trigger a full collection.

    With transformers imported one takes a quarter of a second. A single instance, to create no further object.
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
    """Also charges thread time, and with `clock` wall time, to the governor. As one object: each call of another is
    slow while its code is not in the processor's caches."""

    def __init__(self, cost: Cost, *, clock: bool) -> None:
        self._cost = cost
        self._clock = clock
        self._began = self._thread = 0
        self._collects = False

    def __enter__(self) -> None:
        self._began, self._thread = monotonic_ns(), thread_time_ns()
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()
        self._cost.ledger_thread_ns += thread_time_ns() - self._thread
        if self._clock:
            self._cost.ledger_ns += monotonic_ns() - self._began


NO_COLLECTION = NoCollection()
