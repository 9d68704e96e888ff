"""Events that are taken while the file is unpickled: the Snapshot is the same, and nothing is taken twice."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("addr", [BASE, "?"])
def test_a_list_of_events_that_is_no_devices_changes_nothing(
    tmp_path: Path, reads: Callable[[Path, str], Snapshot], name: str, addr: Any
) -> None:
    """torch 2.15 has `host_traces`; newer versions may have others, in other formats."""
    others = [{**each, "addr": addr} for each in events_of(0)]
    path = write(tmp_path / "large.pickle", {**large(), "host_traces": others})
    assert named(reads(path, name)) == named(parse(large(), path.stat().st_size))


@pytest.mark.parametrize("name", READS)
def test_a_list_of_events_of_two_devices_is_refused(
    tmp_path: Path, reads: Callable[[Path, str], Snapshot], name: str
) -> None:
    events = events_of(0)
    path = write(tmp_path / "large.pickle", content([segment(block(MIB))], events, events))
    with pytest.raises(Unreadable, match="two devices have the same list of events"):
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


COUNTS = """
import io, pickle, sys
from gpumon.snapshots.event_lists import EventLists

class File(io.FileIO):
    lists, taken = EventLists(), 0

    def readinto(self, buffer):
        for events in self.lists.found():
            File.taken += len(events)
            events.clear()
        return super().readinto(buffer)

pickle.load(io.BufferedReader(File(sys.argv[1]), 1 << 18))
print(File.taken)
"""


def test_most_events_are_found_before_the_file_ends(tmp_path: Path) -> None:
    path = write(tmp_path / "large.pickle", large())
    counted = subprocess.run([sys.executable, "-c", COUNTS, path], capture_output=True, check=True)
    assert 45_000 < int(counted.stdout) < 60_000
