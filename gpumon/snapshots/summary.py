"""What a memory snapshot shows: the peak and what made it, what is in use at the end, and what pins reserved memory.

Model. The peak is the highest sum of requested bytes over the recorded events, as requested_bytes of
torch.cuda.memory_stats. Events have no rounded sizes, so reserved less requested at the peak is rounding and free
blocks together. At the end the blocks are known: reserved = allocated + waiting + inactive split + unused, as in
gpumon.analysis.blocks.
Blocks that were there before the first event have no line unless they are in use at the end.

A segment is returned to the device only when all of its blocks are free. A segment of which more than half is free is
*pinned* by the blocks that are left; what it costs is its free bytes.

Cost. Three passes over the events (gpumon.snapshots.history is the first).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from gpumon.analysis import blocks
from gpumon.analysis.estimate.simulator import LARGE, SMALL
from gpumon.analysis.units import count, percent, size
from gpumon.snapshots.history import History
from gpumon.snapshots.model import ALLOCATED, AWAITING_FREE, INACTIVE, UNKNOWN, Block, Device, Segment, Snapshot
from gpumon.snapshots.trace import ALLOC, OOM
from gpumon_agent import wire

BEFORE = "allocated before the first event"
NO_LINE = "without a recorded stack"
_STATES = {ALLOCATED: wire.ALLOCATED, AWAITING_FREE: wire.PENDING, INACTIVE: wire.INACTIVE}
_CLASSES = (
    (SMALL, "up to 1 MiB"),  # the small pool
    (LARGE - 1, "1 to 10 MiB"),  # share segments of 20 MiB
    (100 << 20, "10 to 100 MiB"),
    (1 << 30, "100 MiB to 1 GiB"),
)


class Use(msgspec.Struct, frozen=True):
    """One block in use. `event`, counted from 0: the one that allocated it; None: it was there before; or unknown."""

    bytes: int  # requested
    line: str
    mark: str | None
    event: int | None


class Alike(msgspec.Struct, frozen=True):
    """Blocks in use of one line and size. `event`: of the oldest of them, as in Use."""

    bytes: int  # requested, of each
    line: str
    blocks: int
    event: int | None


class Part(msgspec.Struct, frozen=True):
    """Blocks that have something in common."""

    name: str
    bytes: int  # requested
    blocks: int


class Moment(msgspec.Struct, frozen=True):
    """What was in use. The parts of each kind add up to `requested`, the largest first; no marks: none was set."""

    requested: int
    reserved: int | None
    uses: tuple[Use, ...]
    by_line: tuple[Part, ...]
    by_size: tuple[Part, ...]
    by_mark: tuple[Part, ...]


class Pinned(msgspec.Struct, frozen=True):
    """A segment that few blocks keep."""

    segment: int  # bytes of it
    free: int
    blocks: int
    held: int  # bytes of these blocks
    line: str  # of the largest of them


class Failed(msgspec.Struct, frozen=True):
    """A request that the device could not meet."""

    event: int
    bytes: int


class DeviceSummary(msgspec.Struct, frozen=True):
    index: int
    answer: str
    events: int
    peak: Moment | None
    """None without events"""
    peak_event: int | None
    end: Moment
    largest: tuple[Alike, ...]
    """in use at the end; the largest blocks first"""
    oldest: tuple[Alike, ...]
    """likewise, of those that a recorded event allocated; the oldest first"""
    totals: blocks.Totals
    """at the end"""
    pinned: tuple[Pinned, ...]
    """most free bytes first"""
    failed: tuple[Failed, ...]
    lost: int
    """bytes alive by the events and in no block: the two disagree"""


def summarize(snapshot: Snapshot) -> tuple[DeviceSummary, ...]:
    return tuple(_device(snapshot, device) for device in snapshot.devices)


def _device(snapshot: Snapshot, device: Device) -> DeviceSummary:
    totals = blocks.allocator(map(as_wire, device.segments)).totals
    end = _moment(_at_end(snapshot, device), totals.reserved)
    pinned = tuple(sorted(_pinned(snapshot, device), key=lambda each: -each.free))
    alike = alike_of(end.uses)
    event, peak, failed = None, None, _failed(device)
    trace = device.trace
    if trace is not None:
        history = History(device, trace)
        event = history.peak
        peak = moment_at(snapshot, device, history, event)
    events = 0 if trace is None else len(trace.codes)
    return DeviceSummary(
        device.index,
        _answer(events, event, peak, end, totals, failed),
        events,
        peak,
        event,
        end,
        tuple(sorted(alike, key=lambda each: -each.bytes)),
        tuple(sorted((each for each in alike if each.event is not None), key=lambda each: each.event or 0)),
        totals,
        pinned,
        failed,
        device.lost,
    )


def _failed(device: Device) -> tuple[Failed, ...]:
    if device.trace is None:
        return ()
    events = enumerate(zip(device.trace.codes, device.trace.bytes, strict=True))
    return tuple(Failed(at, requested) for at, (code, requested) in events if code == OOM)


def _answer(
    events: int, event: int | None, peak: Moment | None, end: Moment, totals: blocks.Totals, failed: tuple[Failed, ...]
) -> str:
    if peak is None or event is None:
        of = f"{size(totals.allocated)} allocated of {size(totals.reserved)} reserved at the end"
        return f"{of}; {_most(end)}. No events: the peak is not known."
    when = "before the first event" if event < 0 else f"at event {count(event)} of {count(events)}"
    reserved = "" if peak.reserved is None else f" of {size(peak.reserved)} reserved"
    last = f" {size(failed[-1].bytes)} could not be allocated at event {count(failed[-1].event)}." if failed else ""
    return f"Peak {size(peak.requested)} requested{reserved}, {when}; {_most(peak)}.{last}"


def _most(moment: Moment) -> str:
    if not moment.requested:
        return "nothing is in use"
    first, *others = moment.by_line
    said = _share(first, moment)
    if first.name == BEFORE and others:
        said += f", {_share(others[0], moment)}"
    return said


def _share(part: Part, moment: Moment) -> str:
    share = percent(part.bytes / moment.requested)
    if part.name in (BEFORE, NO_LINE):
        return f"{share} {part.name}"
    return f"{share} from {short(part.name)}"


def short(line: str) -> str:
    """A line without its file's folder."""
    file, colon, rest = line.rpartition(":")
    return f"{file.rpartition('/')[2]}{colon}{rest}" if colon and rest[:1].isdigit() else line


# ------------------------------------------------------------------------------------------------------------- moments


def moment_at(snapshot: Snapshot, device: Device, history: History, event: int) -> Moment:
    """What was in use after an event (−1: before the first)."""
    return _moment(uses_at(snapshot, device, history, event), history.reserved(event))


def uses_at(snapshot: Snapshot, device: Device, history: History, event: int) -> list[Use]:
    """The blocks in use after an event."""
    return [_use(snapshot, device, *each) for each in history.uses(event)]


def _at_end(snapshot: Snapshot, device: Device) -> Iterator[Use]:
    """From the blocks."""
    events: dict[int, int] = {}
    if device.trace is not None:
        events = {
            number: at
            for at, (code, number) in enumerate(zip(device.trace.codes, device.trace.ids, strict=True))
            if code == ALLOC
        }
    for segment in device.segments:
        for block in segment.blocks:
            if block.state == INACTIVE:
                continue
            number = device.ends.get(block.address)
            if number is None:
                yield Use(block.requested, _line(snapshot, block.line, NO_LINE), None, None)
            else:
                yield _use(snapshot, device, number, block.requested, events.get(number))


def _use(snapshot: Snapshot, device: Device, number: int, requested: int, event: int | None) -> Use:
    mark = device.marks[number]
    line = _line(snapshot, device.lines[number], NO_LINE if event is not None else BEFORE)
    return Use(requested, line, snapshot.marks[mark] if mark != UNKNOWN else None, event)


def _line(snapshot: Snapshot, number: int, otherwise: str) -> str:
    return snapshot.lines[number] if number != UNKNOWN else otherwise


def _moment(uses: Iterable[Use], reserved: int | None) -> Moment:
    all_uses = tuple(uses)
    marked = any(use.mark is not None for use in all_uses)
    return Moment(
        sum(use.bytes for use in all_uses),
        reserved,
        all_uses,
        parts(all_uses, lambda use: use.line),
        parts(all_uses, lambda use: _class(use.bytes)),
        parts(all_uses, mark_of) if marked else (),
    )


def parts(uses: Iterable[Use], name: Callable[[Use], str]) -> tuple[Part, ...]:
    """The blocks by a name of theirs; the most bytes first."""
    found: dict[str, tuple[int, int]] = {}
    for use in uses:
        key = name(use)
        total, number = found.get(key, (0, 0))
        found[key] = total + use.bytes, number + 1
    return tuple(Part(key, *sums) for key, sums in sorted(found.items(), key=lambda item: (-item[1][0], item[0])))


def alike_of(uses: Iterable[Use]) -> list[Alike]:
    """By line and size."""
    found: dict[tuple[str, int], tuple[int, int | None]] = {}
    for use in uses:
        number, oldest = found.get((use.line, use.bytes), (0, use.event))
        if oldest is not None:
            oldest = None if use.event is None else min(oldest, use.event)
        found[use.line, use.bytes] = number + 1, oldest
    return [Alike(each, line, *sums) for (line, each), sums in found.items()]


def _class(requested: int) -> str:
    return next((name for most, name in _CLASSES if requested <= most), "over 1 GiB")


def mark_of(use: Use) -> str:
    return use.mark if use.mark is not None else BEFORE if use.event is None else "without a mark"


# ------------------------------------------------------------------------------------------------------------ segments


def as_wire(segment: Segment) -> wire.Segment:
    return wire.Segment(
        segment.address,
        segment.size,
        segment.small,
        segment.stream,
        expandable=segment.expandable,
        private=segment.private,
        blocks=tuple((block.size, _STATES[block.state]) for block in segment.blocks),
    )


def _pinned(snapshot: Snapshot, device: Device) -> Iterator[Pinned]:
    started = 0 if device.trace is None else len(device.trace.start)  # the first ids are those of blocks before events
    for segment in device.segments:
        used: list[Block] = [block for block in segment.blocks if block.state != INACTIVE]
        held = sum(block.size for block in used)
        if used and 2 * held < segment.size and not segment.expandable:  # expandable ones return pages, not segments
            largest = max(used, key=lambda block: block.size)
            before = device.ends.get(largest.address, started) < started
            line = _line(snapshot, largest.line, BEFORE if before else NO_LINE)
            yield Pinned(segment.size, segment.size - held, len(used), held, line)
