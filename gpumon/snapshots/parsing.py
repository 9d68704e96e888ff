"""Turns the objects of a snapshot file into a Snapshot, each value checked: the file may hold anything.

Model. A snapshot has the blocks at its end and the newest events before it. A block that is freed by an event, or in
use at the end, and allocated by no event, was there before the first one: it is in `Trace.start`, with the bytes that
its free or its block states. Requested bytes count until `free_completed`, as in torch.cuda.memory_stats. Reserved at
the start is that of the end less what the events of segments changed.

Source. torch/cuda/memory.py (`_snapshot`: the fields), torch/cuda/_memory_viz.py (`_block_extra`: older files),
c10/cuda/CUDACachingAllocator.cpp (what an event's size is: requested bytes for blocks, the segment's for segments).
Cost. Some µs an event.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain, repeat
from typing import Any

from gpumon.snapshots import trace as actions
from gpumon.snapshots.model import ALLOCATED, INACTIVE, STATES, UNKNOWN, Block, Device, Segment, Snapshot
from gpumon.snapshots.source_lines import Lines, NotFrames
from gpumon.snapshots.trace import Figures, Trace

BYTES_MAX = 1 << 50
"""More than any device has: sums of as many as a file can hold stay within 64 bits."""
TOTAL_MAX = 1 << 62
_MORE_ENTRIES = "it has more entries than bytes"
DEVICES_MAX = 1024
_CODES = {action: code for code, action in enumerate(actions.ACTIONS)} | {"free": actions.FREE_COMPLETED}
_SEGMENT_SIGNS = {
    actions.SEGMENT_ALLOC: 1,
    actions.SEGMENT_MAP: 1,
    actions.SEGMENT_FREE: -1,
    actions.SEGMENT_UNMAP: -1,
}
_OLDER_STATES = {"active_pending_free": "active_awaiting_free"}  # before torch 2.1


class Malformed(Exception):
    """Not a snapshot; the text completes "FILE is not a memory snapshot: "."""


def parse(root: Any, entries_max: int) -> Snapshot:
    """Raises Malformed. `entries_max`, and what becomes of the objects: see Parser."""
    return Parser(entries_max).snapshot(root)


class Parser:
    """Events may be taken before the rest of the file is known. What was taken is emptied, so that what is read makes
    room for what is kept: a device's event that is there twice, or a list of events of two devices, is refused.

    `entries_max`: of blocks and events together. A file has at least a byte for each, unless it repeats the same list.
    """

    def __init__(self, entries_max: int) -> None:
        self._entries_left = entries_max
        self._lines, self._marks = Lines(), _Marks()
        self._events: dict[int, _Events] = {}  # by identity of the list, which they keep

    def take(self, events: list[Any]) -> None:
        """Takes the events that the list has so far. Raises Malformed if they are too many; what else is wrong with
        them counts if the list is a device's: a file may have others (`host_traces`, torch 2.15)."""
        self._count(len(events))
        if not events:
            return
        known = self._events.get(id(events))
        if known is None:
            known = self._events[id(events)] = _Events(events, self._lines, self._marks)
        try:
            for event in events if known.wrong is None else ():
                known.take(event)
        except Malformed as error:
            known.wrong = error
        events.clear()

    def snapshot(self, root: Any) -> Snapshot:
        """Raises Malformed."""
        if type(root) is list:  # torch.cuda.memory_snapshot() alone
            root = {"segments": root}
        if type(root) is not dict or "segments" not in root:
            raise Malformed("it has no segments")
        segments = _list(root["segments"], "segments")
        traces = [
            _list(each, "the events of a device") for each in _list(root.get("device_traces", []), "device_traces")
        ]
        if len(traces) > DEVICES_MAX:
            raise Malformed(f"it has events of {len(traces):,} devices")
        blocks = sum(len(_list(_dict(each, "a segment").get("blocks"), "blocks")) for each in segments)
        annotations = _list(root.get("external_annotations", []), "external_annotations")
        self._count(len(segments) + blocks + len(annotations))
        if sum(map(len, traces)) > self._entries_left:
            raise Malformed(_MORE_ENTRIES)
        by_device: dict[int, list[Segment]] = {}
        for raw in segments:
            number = _number(raw, "device", 0)
            if number >= DEVICES_MAX:
                raise Malformed(f"it has a device {number:,}")
            by_device.setdefault(number, []).append(_segment(raw, self._lines))
        settings = _settings(root.get("allocator_settings", {}))
        self._marks.annotate(annotations)
        for each in traces:
            self.take(each)
        found = {number: id(each) for number, each in enumerate(traces) if id(each) in self._events}
        if len(set(found.values())) < len(found):
            raise Malformed("two devices have the same list of events")
        devices = []
        for number in sorted(by_device.keys() | found.keys()):
            own = sorted(by_device.get(number, ()), key=lambda segment: segment.address)
            events = self._events.pop(found[number]) if number in found else None
            if events is not None and events.wrong is not None:
                raise events.wrong
            devices.append(_device(number, own, events, settings))
        if not devices:
            raise Malformed("it has neither a segment nor an event; was it written before anything was allocated?")
        taken = _taken(root.get("gpumon"))
        lines, marks = self._lines.texts, self._marks.numbers
        return Snapshot(tuple(devices), tuple(map(text, lines)), tuple(map(text, marks)), settings, taken)

    def _count(self, entries: int) -> None:
        self._entries_left -= entries
        if self._entries_left < 0:
            raise Malformed(_MORE_ENTRIES)


def text(raw: str) -> str:
    """As UTF-8 can write it: a pickle may hold half characters."""
    return raw.encode(errors="replace").decode()


class _Marks:
    """What the program was doing as it allocated: its user_metadata, else the innermost annotation around that time.

    Metadata belongs to a thread. What autograd's threads allocate has that of the newest event with any: the thread
    that called backward waits for them.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self._times: dict[int, list[int]] = {}  # by device: when the innermost annotation changed
        self._names: dict[int, list[str]] = {}

    def annotate(self, annotations: list[Any]) -> None:
        """Raises Malformed."""
        opened: dict[int, list[str]] = {}
        for raw in annotations:
            each = _dict(raw, "an annotation")
            name, device, at = each.get("name"), _number(each, "device", 0), _unsigned(each, "time_us", 0)
            if type(name) is not str:
                raise Malformed("an annotation has no name")
            inside = opened.setdefault(device, [])
            if each.get("stage") == "START":
                inside.append(name)
            elif name in inside:  # not always the innermost: other threads', and gpumon's phases
                del inside[len(inside) - 1 - inside[::-1].index(name)]
            times = self._times.setdefault(device, [])
            times.append(max(at, times[-1]) if times else at)
            self._names.setdefault(device, []).append(inside[-1] if inside else "")

    def of(self, mark: str) -> int:
        return self.numbers.setdefault(mark[:200], len(self.numbers)) if mark else UNKNOWN

    def at(self, device: int, time_us: int) -> int:
        """What the annotations say of a time; 0: the event has none."""
        place = bisect_right(self._times.get(device, ()), time_us) if time_us else 0
        return self.of(self._names[device][place - 1]) if place else UNKNOWN


# ------------------------------------------------------------------------------------------------------------ segments


def _segment(raw: dict[str, Any], lines: Lines) -> Segment:
    address, size = _unsigned(raw, "address"), _number(raw, "total_size")
    blocks, at = [], address
    for each in raw["blocks"]:
        block = _block(_dict(each, "a block"), at, lines)
        blocks.append(block)
        at += block.size
    if at - address > size:
        raise Malformed("a segment's blocks are larger than the segment")
    pool = raw.get("segment_pool_id", (0, 0))
    return Segment(
        address,
        size,
        _unsigned(raw, "stream", 0),
        raw.get("segment_type") == "small",
        pool not in ((0, 0), [0, 0]),
        raw.get("is_expandable") is True,
        tuple(blocks),
    )


def _block(raw: dict[str, Any], at: int, lines: Lines) -> Block:
    """`at`: its address where the file has none (before torch 2.1)."""
    state = raw.get("state")
    if type(state) is not str or (state := _OLDER_STATES.get(state, state)) not in STATES:
        raise Malformed("a block's state is none of torch's")
    size = _number(raw, "size")
    frames, requested = raw.get("frames", []), _number(raw, "requested_size", size)
    history = raw.get("history")
    if "frames" not in raw and history:  # torch 2.0
        newest = _dict(_list(history, "history")[0], "history")
        frames, requested = newest.get("frames", []), _number(newest, "real_size", size)
    if state == INACTIVE:
        return Block(_unsigned(raw, "address", at), size, 0, INACTIVE)
    return Block(_unsigned(raw, "address", at), size, requested, state, _line(lines, frames))


def _line(lines: Lines, frames: Any) -> int:
    try:
        return lines.of(frames)
    except NotFrames:
        raise Malformed("a stack is not made of frames") from None


def _taken(raw: Any) -> tuple[int, str] | None:
    """As gpumon_agent.oom.memory_viz writes it."""
    if raw is None:
        return None
    phase = _dict(raw, "gpumon").get("phase")
    if type(phase) is not str:
        raise Malformed("gpumon: a step and a phase are expected")
    return _number(raw, "step"), text(phase[:200])


def _settings(raw: Any) -> dict[str, str]:
    """As texts. A nested one (roundup_power2_divisions) as "256:4,512:4", left out if all of its values are 0."""
    found = {}
    for key, value in _dict(raw, "allocator_settings").items():
        if type(value) is dict:
            value = ",".join(f"{k}:{v}" for k, v in value.items() if type(v) is int and type(k) is str and v) or None
        if type(key) is str and type(value) in (str, int, float, bool):
            found[text(key[:200])] = text(str(value)[:1000])
    return found


# -------------------------------------------------------------------------------------------------------------- events


def _device(index: int, segments: list[Segment], known: _Events | None, settings: dict[str, str]) -> Device:
    if known is None or not known.codes:
        return Device(index, tuple(segments), None, array("q"), array("q"), {}, 0)
    used = {block.address: block for segment in segments for block in segment.blocks if block.state != INACTIVE}
    lost = 0
    for address, (number, requested) in known.alive.items():
        if address not in used:
            lost += requested
        else:
            known.still_there(number, used[address].line)
    for address, block in used.items():
        if address not in known.alive:
            known.before(address, block.requested, block.line)
    return known.device(index, segments, settings, used, lost)


class _Events:
    """One device's events, in columns. A block that was there before the first one has a negative number until all are
    known: −1, −2, … in the order in which they were met."""

    def __init__(self, raw: list[Any], lines: Lines, marks: _Marks) -> None:
        self._raw, self._lines, self._marks = raw, lines, marks
        self.wrong: Malformed | None = None
        self.codes, self.bytes = array("B"), array("q")
        self.ids, self.streams = array("i"), array("i")  # 4 bytes while the unpickler has most of its objects
        self.lines, self.marks = array("i"), array("i")
        self._times, self._newest = array("Q"), ""  # of the allocations, in µs; the newest mark
        self.alive: dict[int, tuple[int, int]] = {}  # by address: number, requested bytes
        self._started: list[tuple[int, int, int]] = []  # address, requested bytes, line
        self._stream_numbers = {0: 0}

    def take(self, event: Any) -> None:
        """Empties it: that frees most of its memory, though the unpickler keeps it."""
        action = _dict(event, "an event").get("action")
        code = _CODES.get(action) if type(action) is str else None
        if code is None:
            if type(action) is not str:
                raise Malformed("an event has no action, or is there twice")
            event.clear()
            return  # "annotate", and what newer versions add
        size, number = _number(event, "size", 0), -1
        if code <= actions.FREE_COMPLETED:
            address = _unsigned(event, "addr")
            if code == actions.ALLOC:
                if address in self.alive:  # its free is missing
                    self._append(actions.FREE_COMPLETED, *self.alive.pop(address), 0)
                number = len(self.lines)
                line = _line(self._lines, event.get("frames", []))
                self.lines.append(line)
                self.marks.append(self._mark(event, line in self._lines.native))
                self._times.append(_unsigned(event, "time_us", 0))
                self.alive[address] = number, size
            else:
                if address not in self.alive:
                    self.before(address, size, UNKNOWN)
                # the bytes of the allocation: sums stay those of torch's figures
                number, size = self.alive[address]
                if code == actions.FREE_COMPLETED:
                    del self.alive[address]
        self._append(code, number, size, _unsigned(event, "stream", 0))
        event.clear()

    def _mark(self, event: dict[str, Any], by_autograd: bool) -> int:
        mark = event.get("user_metadata", "")
        if type(mark) is not str:
            raise Malformed("user_metadata is no text")
        if mark:
            self._newest = mark
        elif by_autograd:
            mark = self._newest
        return self._marks.of(mark)

    def before(self, address: int, requested: int, line: int) -> None:
        self._started.append((address, requested, line))
        self.alive[address] = -len(self._started), requested

    def still_there(self, number: int, line: int) -> None:
        """The block of this number is in use at the end: its line is that of the block, if no event has one."""
        if number < 0:
            address, requested, _ = self._started[-1 - number]
            self._started[-1 - number] = address, requested, line
        elif self.lines[number] == UNKNOWN:
            self.lines[number] = line

    def _append(self, code: int, number: int, size: int, stream: int) -> None:
        self.codes.append(code)
        self.ids.append(number)
        self.bytes.append(size)
        self.streams.append(self._stream_numbers.setdefault(stream, len(self._stream_numbers)))

    def device(
        self, index: int, segments: list[Segment], settings: dict[str, str], used: dict[int, Block], lost: int
    ) -> Device:
        count = len(self._started)
        order = sorted(range(count), key=lambda at: self._started[at][0])
        place = {-1 - at: number for number, at in enumerate(order)}  # the numbers of those that were there come first

        def final(number: int) -> int:
            return place[number] if number < 0 else number + count

        blocks = {actions.ALLOC, actions.FREE_REQUESTED, actions.FREE_COMPLETED}
        ids = array("q", (final(n) if code in blocks else -1 for code, n in zip(self.codes, self.ids, strict=True)))
        marks = (
            self._marks.at(index, at) if mark == UNKNOWN else mark
            for mark, at in zip(self.marks, self._times, strict=True)
        )
        start = tuple((number, self._started[at][1]) for number, at in enumerate(order))
        recorded = self._figures(segments, used.values())
        trace = Trace(start, self.codes, ids, self.bytes, array("q", self.streams), settings, recorded)
        return Device(
            index,
            tuple(segments),
            trace,
            array("q", chain((self._started[at][2] for at in order), self.lines)),
            array("q", chain(repeat(UNKNOWN, count), marks)),
            {address: final(number) for address, (number, _) in self.alive.items() if address in used},
            lost,
        )

    def _figures(self, segments: list[Segment], used: Iterable[Block]) -> Figures | None:
        """None if the events of segments and the segments disagree."""
        requested = requested_peak = sum(requested for _, requested, _ in self._started)
        reserved = lowest = highest = 0  # relative to the start
        for code, size in zip(self.codes, self.bytes, strict=True):
            if code == actions.ALLOC:
                requested += size
                requested_peak = max(requested_peak, requested)
            elif code == actions.FREE_COMPLETED:
                requested -= size
            elif code in _SEGMENT_SIGNS:
                reserved += _SEGMENT_SIGNS[code] * size
                lowest, highest = min(lowest, reserved), max(highest, reserved)
        end = sum(segment.size for segment in segments)
        start = end - reserved
        if max(requested_peak, start + highest) > TOTAL_MAX:
            raise Malformed("its events add up to more bytes than any device has")
        if start + lowest < 0:
            return None
        allocated = sum(block.size for block in used if block.state == ALLOCATED)
        return Figures(requested_peak, requested, allocated, start, start + highest, end, len(segments))


# -------------------------------------------------------------------------------------------------------------- values


def _list(value: Any, name: str) -> list[Any]:
    if type(value) is not list:
        raise Malformed(f"{name}: a list is expected")
    return value


def _dict(value: Any, name: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise Malformed(f"{name}: a dict is expected")
    return value


def _number(entry: dict[Any, Any], key: str, default: int | None = None) -> int:
    value = entry.get(key, default)
    if type(value) is not int or not 0 <= value <= BYTES_MAX:
        raise Malformed(f"{key} is no number of bytes")
    return value


def _unsigned(entry: dict[Any, Any], key: str, default: int | None = None) -> int:
    value = entry.get(key, default)
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise Malformed(f"{key} is no number of 64 bits")
    return value
