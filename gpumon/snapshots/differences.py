"""Two memory snapshots compared: what grew, what is new and what is gone, by line, by size and by mark.

Model. Compared are the blocks in use at the peak, if both files have events of the device, and those at the end.
Lines are compared as text: code that moved is gone at its old line, and new at the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from gpumon.analysis.units import exact, percent, size
from gpumon.snapshots.summary import DeviceSummary, Moment, Part, Use, mark_of, parts, short

Kind = Literal["line", "size", "mark"]


class Change(msgspec.Struct, frozen=True):
    """One line, block size or mark: (bytes, blocks) in A and in B; one of the two may be (0, 0)."""

    kind: Kind
    name: str
    before: tuple[int, int]
    after: tuple[int, int]

    @property
    def bytes(self) -> int:
        return self.after[0] - self.before[0]

    @property
    def blocks(self) -> int:
        return self.after[1] - self.before[1]

    @property
    def what(self) -> str:
        if not self.before[1]:
            return "new"
        if not self.after[1]:
            return "gone"
        return "grew" if (self.bytes, self.blocks) > (0, 0) else "shrank"


class MomentChange(msgspec.Struct, frozen=True):
    """Requested and reserved bytes in A and in B, and the changes, largest first."""

    requested: tuple[int, int]
    reserved: tuple[int | None, int | None]
    changes: tuple[Change, ...]


class DeviceChange(msgspec.Struct, frozen=True):
    index: int
    answer: str
    peak: MomentChange | None
    """None unless both files have events"""
    end: MomentChange


def compare(before: Sequence[DeviceSummary], after: Sequence[DeviceSummary]) -> tuple[DeviceChange, ...]:
    """Of the devices that both have."""
    others = {each.index: each for each in after}
    return tuple(_device(each, others[each.index]) for each in before if each.index in others)


def _device(one: DeviceSummary, other: DeviceSummary) -> DeviceChange:
    end = _moment(one.end, other.end)
    peak = _moment(one.peak, other.peak) if one.peak is not None and other.peak is not None else None
    return DeviceChange(one.index, _answer("peak" if peak else "end", peak or end), peak, end)


def _answer(when: str, found: MomentChange) -> str:
    before, after = found.requested
    if before == after:
        how = "the same"
    elif before:
        how = f"{percent(abs(after - before) / before)} {'higher' if after > before else 'lower'}"
    else:
        how = "higher"
    said = f"Requested at the {when} is {how} in B: {size(before)} → {size(after)}"
    first = next((change for change in found.changes if change.kind == "line"), None)
    return said + (f"; most: {short(first.name)} ({size(first.bytes, sign=True)})" if first else "")


def _moment(one: Moment, other: Moment) -> MomentChange:
    marked = bool(one.by_mark or other.by_mark)  # if one side has any, the other's blocks are without a mark, not gone
    changes = [
        *_changes("line", one.by_line, other.by_line),
        *_changes("size", parts(one.uses, _size), parts(other.uses, _size)),
        *(_changes("mark", parts(one.uses, mark_of), parts(other.uses, mark_of)) if marked else ()),
    ]
    changes.sort(key=lambda each: (-abs(each.bytes), -abs(each.blocks), each.name))
    return MomentChange((one.requested, other.requested), (one.reserved, other.reserved), tuple(changes))


def _size(use: Use) -> str:
    return exact(use.bytes)


def _changes(kind: Kind, before: Sequence[Part], after: Sequence[Part]) -> Iterator[Change]:
    ours, theirs = ({each.name: (each.bytes, each.blocks) for each in side} for side in (before, after))
    for name in ours.keys() | theirs.keys():
        change = Change(kind, name, ours.get(name, (0, 0)), theirs.get(name, (0, 0)))
        if change.before != change.after:
            yield change
