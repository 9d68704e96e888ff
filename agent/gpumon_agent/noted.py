"""Steps whose hooks took notes, as the training process sends them to its helper: many in one record.

The helper makes Phase and Step events of them, so nobody else meets this kind of record.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec

from gpumon_agent.guard import pass_on
from gpumon_agent.quiet_mark import Note, Shaped, Shapes, phase_of
from gpumon_agent.wire import BETWEEN, BOUND, SHAPES_MAX, NumberedEvent, Phase, QuietEnd, QuietPeak, Step

FIGURES = 10
NOTE_WORDS = 5 + FIGURES
"""Of a note (struct Note of quiet_hooks.cpp), 64 bits each."""
T_NS, SHAPES, NBYTES, ALLOCATED = 1, 2, 3, 5
"""Where in a note they are."""
_NOTES_MAX = 100  # of a record: so many are less than ring.LONGEST


class Taken(NamedTuple):
    """Notes. The first ones are of whole steps, each with the same phases."""

    words: bytes = b""
    phases: int = 0  # of each of those steps
    steps: int = 0
    alike: int = 0  # a hash of all that outlooks learn from such a step; 0: the steps differ in that
    shapes: Shaped = {}  # noqa: RUF012 - never changed


class Noted(msgspec.Struct, frozen=True, array_like=True, tag="noted", gc=False):
    """Whole steps, each with as many phases, on one device."""

    step: int  # of the first
    began_ns: int
    opened_ns: int  # when its first phase began
    phases: int
    device: int
    optimizers: tuple[int, ...]
    words: bytes
    shapes: Shaped
    alike: int
    quiet: int = 0  # these, too, are of the first: see wire.Step
    quiet_peaks: tuple[QuietPeak, ...] = ()
    quiet_ends: tuple[QuietEnd, ...] = ()

    @property
    def count(self) -> int:
        """Of the steps."""
        return len(self.words) // (8 * NOTE_WORDS * self.phases)

    def steps(self) -> Iterator[tuple[list[Phase], list[Shapes], Step]]:
        """Of each step: its phases, the shapes of each forward's inputs, and its end."""
        notes = list(notes_in(self.words, self.shapes))
        began, opened = self.began_ns, self.opened_ns
        quiet = self.quiet, self.quiet_peaks, self.quiet_ends
        for step, at in enumerate(range(0, len(notes), self.phases), self.step):
            counts, nbytes = Counter[str](), 0
            phases: list[Phase] = []
            groups: list[Shapes] = []
            for phase, t_ns, read, (input_bytes, shapes) in notes[at : at + self.phases]:
                phases.append(Phase(step, phase, counts[phase], self.device, t_ns, t_ns - opened, *read))
                counts[phase] += 1
                opened = t_ns
                if phase == BETWEEN:
                    nbytes += input_bytes
                    groups.append(shapes)
            inputs = tuple(tuple(shape) for group in groups for shape in group)[:SHAPES_MAX]
            closed = Step(
                step, opened, opened - began, nbytes, inputs, False, self.phases, (), "", self.optimizers, *quiet
            )
            yield phases, groups, closed
            began, quiet = opened, (0, (), ())

    def events(self) -> Iterator[NumberedEvent]:
        for phases, _, closed in self.steps():
            yield from phases
            yield closed

    def parts(self) -> Iterator[Noted]:
        """The same in records that fit the ring, if a single step does."""
        size, replace = 8 * NOTE_WORDS * self.phases, msgspec.structs.replace
        many = max(1, _NOTES_MAX // self.phases)
        for first in range(0, self.count, many):
            words = self.words[first * size : (first + many) * size]
            if not first:
                yield replace(self, words=words)
                continue
            before = memoryview(self.words)[: first * size].cast("q")[-NOTE_WORDS + T_NS]
            yield replace(
                self, step=self.step + first, began_ns=before, opened_ns=before, words=words, quiet=0, quiet_peaks=(),
                quiet_ends=(),
            )  # fmt: skip


def notes_in(words: bytes, shapes: Shaped) -> Iterator[Note]:
    each = memoryview(words).cast("q").tolist()
    for at in range(0, len(each), NOTE_WORDS):
        code, t_ns, found, nbytes, disturbed, *figures = each[at : at + NOTE_WORDS]
        yield phase_of(code), t_ns, (*figures, BOUND if disturbed else 0, None), (nbytes, shapes.get(found, ()))


def flat(events: Iterable[tuple[int, NumberedEvent | Noted]]) -> Iterator[tuple[int, NumberedEvent]]:
    """Events with their numbers; those of one record have the same."""
    for number, event in events:
        if isinstance(event, Noted):
            for each in event.events():
                yield number, each
        else:
            yield number, event


class Newest:
    """The newest events: no more than are needed for so many."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: deque[tuple[int, NumberedEvent | Noted]] = deque()
        self._count = 0

    def extend(self, events: Iterable[tuple[int, NumberedEvent | Noted]]) -> None:
        for each in events:
            self._kept.append(each)
            self._count += _count(each[1])
        while self._kept and self._count - _count(self._kept[0][1]) >= self._limit:
            self._count -= _count(self._kept.popleft()[1])

    def __iter__(self) -> Iterator[tuple[int, NumberedEvent]]:
        return flat(self._kept)


def _count(event: NumberedEvent | Noted) -> int:
    return event.count * (event.phases + 1) if isinstance(event, Noted) else 1


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Noted).decode
_HEAD = _encode(Noted(0, 0, 0, 1, 0, (), b"", {}, 0))[:7]  # the array's length, and the tag


def encoded(record: bytes) -> Iterable[bytes]:
    """The encoded events of a record in the ring."""
    if not record.startswith(_HEAD):
        return (record,)
    try:
        return [_encode(event) for event in _decode(record).events()]
    except msgspec.DecodeError as error:
        pass_on(error)
        return (b"",)  # no event: viewers notice the gap in the numbers
