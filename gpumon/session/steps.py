"""The newest steps of a rank, and views of them that are free to take: a frame is taken several times a second.

Views share the ring's list, to which it only appends: what a view shows never changes. To change an older step, or to
free dropped ones, the ring first copies the list.

Thinned steps are read only when a rank is learned again, and when somebody looks at the past: they are kept packed.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload

import msgspec

from gpumon.session.frame import StepRecord

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[StepRecord, ...]).decode

SLACK = 0.03
"""Dropped steps that may stay in the list, as a share of the limit: memory, against copying the list at each step."""


class Steps(Sequence[StepRecord]):
    """An immutable sequence of steps, oldest first."""

    __slots__ = ("_records", "_start", "_stop")

    def __init__(self, records: list[StepRecord], start: int, stop: int) -> None:
        self._records = records
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, at: int) -> StepRecord: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, at: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        start, stop = self._start, self._stop
        if isinstance(at, slice):
            first, last, by = at.indices(stop - start)
            if by == 1:
                return tuple(self._records[start + first : start + last])
            return tuple([self._records[start + index] for index in range(first, last, by)])
        index = at + (stop if at < 0 else start)
        if not start <= index < stop:
            raise IndexError(at)
        return self._records[index]

    def __iter__(self) -> Iterator[StepRecord]:
        return islice(self._records, self._start, self._stop)

    def until(self, step: int) -> Steps:
        """Those up to this step, without a copy."""
        return Steps(self._records, self._start, self._start + bisect_right(self, step, key=lambda each: each.step))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Steps, tuple)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Steps{tuple(self)!r}"


class PackedSteps(Sequence[StepRecord]):
    """An immutable sequence of steps; each look at it makes new records."""

    __slots__ = ("_length", "_packed")

    def __init__(self, records: Sequence[StepRecord] = ()) -> None:
        self._length = len(records)
        self._packed = zlib.compress(_encode(records), 1)

    def _records(self) -> tuple[StepRecord, ...]:
        return _decode(zlib.decompress(self._packed))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> StepRecord: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[StepRecord, ...]: ...
    def __getitem__(self, at: int | slice) -> StepRecord | tuple[StepRecord, ...]:
        return self._records()[at]

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(self._records())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedSteps) and self._packed == other._packed

    def __hash__(self) -> int:
        return hash(self._packed)

    def __repr__(self) -> str:
        return f"PackedSteps{self._records()!r}"


class StepRing(Steps):
    """The newest `limit` steps; new ones are appended."""

    __slots__ = ("_limit", "_shared")

    def __init__(self, limit: int) -> None:
        super().__init__([], 0, 0)
        self._limit = limit
        self._shared = False  # a view uses this list

    def append(self, record: StepRecord) -> None:
        self._records.append(record)
        self._stop += 1
        self._let_go()

    def put(self, at: int, record: StepRecord) -> None:
        self._own()[at] = record

    def insert(self, at: int, record: StepRecord) -> None:
        self._own().insert(at, record)
        self._stop += 1
        self._let_go()

    def drop_until(self, step: int) -> tuple[StepRecord, ...]:
        """Drops the steps up to `step` and returns them."""
        at = bisect_right(self, step, key=lambda record: record.step)
        dropped = self[:at]
        self._start += at
        if at:
            self._own()
        return dropped

    def view(self) -> Steps:
        self._shared = True
        return Steps(self._records, self._start, self._stop)

    def _own(self) -> list[StepRecord]:
        """A list that no view uses, beginning with the oldest step."""
        if self._shared or self._start:
            self._records = self._records[self._start : self._stop]
            self._start, self._stop = 0, len(self._records)
            self._shared = False
        return self._records

    def keep(self, limit: int) -> None:
        self._limit = limit
        self._let_go()

    def _let_go(self) -> None:
        if self._stop - self._start > self._limit:
            self._start = self._stop - self._limit
            if self._start > SLACK * self._limit:
                self._own()
