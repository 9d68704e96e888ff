"""Events that are taken while the file is unpickled: the Snapshot is the same, and nothing is taken twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from snapshot_files import BASE, MIB, block, content, event, frame, freed, segment, write

from gpumon.snapshots import reading
from gpumon.snapshots.model import Snapshot
from gpumon.snapshots.parsing import parse
from gpumon.snapshots.reading import Unreadable, read

READS = {"most are taken": 1 << 18, "as few as the unpickler asks for": 1 << 12, "all at the end": 1 << 26}
"""Bytes at once. The first thousand events, which an unpickler appends together, have fewer than the first."""
CHILD = (
    "import sys; sys.path[:] = sys.argv[1:]; from gpumon.snapshots import reading; reading.READ_BYTES = {};"
    " reading.main()"
)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, str], Snapshot]:
    def by(path: Path, name: str) -> Snapshot:
        monkeypatch.setattr(reading, "_CHILD", CHILD.format(READS[name]))
        return read(path)

    return by


def events_of(device: int) -> list[dict[str, Any]]:
    """10,000 blocks, each freed before the next. Each has a time, every third a mark."""
    made: list[dict[str, Any]] = []
    for number in range(10_000):
        at, size, stack = BASE + number % 7 * MIB, 1000 + number % 5 + device, [frame("/my/train.py", number % 11)]
        mark = f"step {number // 100}" if number % 3 == 0 else ""
        made.append(event("alloc", at, size, frames=stack, user_metadata=mark, time_us=number + 1))
        made += freed(at, size)
    return made


def large() -> dict[str, Any]:
    """Of devices 0 and 2; 1 has no events."""
    segments = [segment(block(MIB, frames=[frame("/my/model.py", 3)])), segment(block(MIB), device=2)]
    annotations = [
        {"device": device, "name": name, "stage": stage, "time_us": at}
        for device, name, stage, at in (
            (0, "first half", "START", 1),
            (0, "first half", "END", 5001),
            (2, "second half", "START", 5001),
        )
    ]
    return content(segments, events_of(0), [], events_of(2), external_annotations=annotations)


def named(snapshot: Snapshot) -> list[tuple[Any, ...]]:
    """With texts in place of the numbers of lines and marks: those depend on what is met first."""
    lines, marks = [*snapshot.lines, None], [*snapshot.marks, None]  # UNKNOWN is the last
    return [
        (
            device.index,
            device.trace,
            [lines[each] for each in device.lines],
            [marks[each] for each in device.marks],
            [(part.address, part.size, lines[part.line]) for each in device.segments for part in each.blocks],
            device.ends,
            device.lost,
        )
        for device in snapshot.devices
    ]


@pytest.mark.parametrize("name", READS)
def test_what_is_read_does_not_depend_on_how_much_is_read_at_once(
    tmp_path: Path, reads: Callable[[Path, str], Snapshot], name: str
) -> None:
    path = write(tmp_path / "large.pickle", large())
    assert path.stat().st_size > 8 * READS["most are taken"]
    snapshot = reads(path, name)
    assert named(snapshot) == named(parse(large(), path.stat().st_size))
    for device in snapshot.devices:
        assert device.trace is not None
        assert len(device.trace.codes) == 30_000


def test_annotations_are_after_the_events_and_are_applied_to_them_by_time(
    tmp_path: Path, reads: Callable[[Path, str], Snapshot]
) -> None:
    snapshot = reads(write(tmp_path / "large.pickle", large()), "most are taken")
    for device, names in zip(named(snapshot), (("first half", None), (None, "second half")), strict=True):
        expected = [f"step {n // 100}" if n % 3 == 0 else names[n // 5000] for n in range(10_000)]
        assert device[3] == [None, *expected], "the first is the block that was there before"


def test_a_list_of_events_that_is_no_devices_is_refused_once_it_is_taken(
    tmp_path: Path, reads: Callable[[Path, str], Snapshot]
) -> None:
    path = write(tmp_path / "large.pickle", {**large(), "other": events_of(0)})
    with pytest.raises(Unreadable, match="it has a list of events that is not that of one device"):
        reads(path, "most are taken")
    assert len(reads(path, "all at the end").devices) == 2, "what is not taken is as if it were not there"


@pytest.mark.parametrize("name", READS)
def test_a_list_of_events_of_two_devices_is_refused(
    tmp_path: Path, reads: Callable[[Path, str], Snapshot], name: str
) -> None:
    events = events_of(0)
    path = write(tmp_path / "large.pickle", content([segment(block(MIB))], events, events))
    with pytest.raises(Unreadable, match="it has a list of events that is not that of one device"):
        reads(path, name)


@pytest.mark.parametrize("name", READS)
def test_an_event_that_is_there_twice_is_refused(
    tmp_path: Path, reads: Callable[[Path, str], Snapshot], name: str
) -> None:
    events = events_of(0)
    path = write(tmp_path / "large.pickle", content([segment(block(MIB))], [*events, events[5]]))
    with pytest.raises(Unreadable, match="an event has no action, or is there twice"):
        reads(path, name)


def test_a_stack_that_events_and_blocks_share_has_its_line_in_each() -> None:
    stack = [frame("/my/train.py", 3)]
    events = [event("alloc", BASE + n * MIB, MIB, frames=stack) for n in range(2)]
    snapshot = parse(content([segment(*(block(MIB, frames=stack) for _ in range(3)))], events), 100)
    (device,) = snapshot.devices
    assert snapshot.lines == ("/my/train.py:3 forward",)
    assert [each.line for each in device.segments[0].blocks] == [0, 0, 0]
    assert list(device.lines) == [0, 0, 0]
