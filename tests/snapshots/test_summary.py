"""What a snapshot shows, worked out by hand, and how two differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from snapshot_files import BASE, KIB, MIB, block, content, event, frame, freed, segment

from gpumon.snapshots.differences import compare
from gpumon.snapshots.parsing import parse
from gpumon.snapshots.summary import BEFORE, NO_LINE, Alike, DeviceSummary, Part, Pinned, summarize

MODEL, TRAIN = [frame("/my/model.py", 7)], [frame("/my/train.py", 9, "main")]


def summarized(segments: list[dict[str, Any]], *events: list[dict[str, Any]], **more: Any) -> tuple[DeviceSummary, ...]:
    return summarize(parse(content(segments, *events, **more), 100_000))


def a_step() -> DeviceSummary:
    """20 MiB are there, 30 come in two blocks, one of which goes, and 8 come: the peak is 50 MiB, at event 2."""
    a, b, c, start = (BASE + n * 100 * MIB for n in range(4))
    events = [
        event("segment_alloc", BASE, 60 * MIB),
        event("alloc", a, 10 * MIB, frames=MODEL, user_metadata="step 1"),
        event("alloc", b, 20 * MIB, frames=MODEL),
        *freed(b, 20 * MIB),
        *freed(start, 20 * MIB),
        event("alloc", c, 8 * MIB, frames=TRAIN, user_metadata="step 2"),
    ]
    end = segment(block(10 * MIB, address=a), block(8 * MIB), block(42 * MIB, state="inactive"), total=60 * MIB)
    end["blocks"][1]["address"] = c
    (found,) = summarized([end], events)
    return found


def test_the_peak_is_where_most_was_requested_and_what_was_in_use_then() -> None:
    found = a_step()
    assert found.peak is not None
    assert (found.peak_event, found.peak.requested, found.peak.reserved) == (2, 50 * MIB, 60 * MIB)
    assert found.peak.by_line == (Part("/my/model.py:7 forward", 30 * MIB, 2), Part(BEFORE, 20 * MIB, 1))
    assert found.peak.by_mark == (
        Part(BEFORE, 20 * MIB, 1),
        Part("without a mark", 20 * MIB, 1),
        Part("step 1", 10 * MIB, 1),
    )
    assert found.peak.by_size == (Part("10 to 100 MiB", 50 * MIB, 3),)
    assert found.answer == (
        "Peak 50.0 MiB requested of 60.0 MiB reserved, at event 2 of 8; 60 % from model.py:7 forward."
    )


def test_of_equal_peaks_the_first_counts_and_what_was_freed_before_does_not() -> None:
    a, b = BASE, BASE + MIB
    events = [
        event("alloc", a, MIB, frames=TRAIN),
        *freed(a, MIB),
        event("alloc", a, 2 * MIB, frames=MODEL),
        *freed(a, 2 * MIB),
        event("alloc", b, 2 * MIB, frames=TRAIN),
    ]
    (found,) = summarized([segment(block(MIB, state="inactive"), block(2 * MIB))], events)
    assert found.peak is not None
    assert found.peak_event == 3
    assert found.peak.by_line == (Part("/my/model.py:7 forward", 2 * MIB, 1),)


def test_blocks_of_one_line_and_size_are_one_row_with_the_event_of_the_oldest() -> None:
    blocks = [block(MIB, frames=MODEL) for _ in range(3)]
    final = segment(*blocks)
    first, *rest = [event("alloc", each["address"], MIB, frames=MODEL) for each in reversed(blocks)]
    (found,) = summarized([final], copy.deepcopy([first, *rest]))  # reading empties events
    assert found.oldest == found.largest == (Alike(MIB, "/my/model.py:7 forward", 3, 0),)
    (found,) = summarized([final], rest)  # one of them was there before
    assert found.largest == (Alike(MIB, "/my/model.py:7 forward", 3, None),)


def test_the_end_is_what_the_blocks_say() -> None:
    found = a_step()
    assert found.end.requested == 18 * MIB
    assert found.end.by_line == (Part("/my/model.py:7 forward", 10 * MIB, 1), Part("/my/train.py:9 main", 8 * MIB, 1))
    assert (found.totals.allocated, found.totals.inactive_split, found.totals.largest_free) == (
        18 * MIB,
        42 * MIB,
        42 * MIB,
    )
    assert found.largest == (
        Alike(10 * MIB, "/my/model.py:7 forward", 1, 1),
        Alike(8 * MIB, "/my/train.py:9 main", 1, 7),
    )
    assert found.oldest == found.largest


def test_a_peak_before_the_first_event_is_told() -> None:
    (found,) = summarized([segment(block(MIB))], freed(BASE + 64 * MIB, 9 * MIB))
    assert found.peak_event == -1
    assert found.answer.startswith("Peak 10.0 MiB requested of 1.00 MiB reserved, before the first event; ")


def test_blocks_that_were_there_before_are_named_with_the_largest_recorded_line() -> None:
    events = [event("alloc", BASE, MIB, frames=MODEL), *freed(BASE + MIB, 3 * MIB)]
    (found,) = summarized([segment(block(MIB))], events)
    assert f"75 % {BEFORE}, 25 % from model.py:7 forward." in found.answer


@pytest.mark.parametrize(
    ("requested", "name"),
    [
        (MIB, "up to 1 MiB"),
        (MIB + 1, "1 to 10 MiB"),
        (10 * MIB - 1, "1 to 10 MiB"),
        (10 * MIB, "10 to 100 MiB"),
        (100 * MIB, "10 to 100 MiB"),
        (100 * MIB + 1, "100 MiB to 1 GiB"),
        (1024 * MIB, "100 MiB to 1 GiB"),
        (1024 * MIB + 1, "over 1 GiB"),
    ],
)
def test_sizes_are_those_that_the_allocator_treats_alike(requested: int, name: str) -> None:
    (found,) = summarized([segment(block(requested))])
    assert found.end.by_size == (Part(name, requested, 1),)


def test_without_events_lines_come_from_the_blocks() -> None:
    (found,) = summarized([segment(block(MIB, frames=MODEL), block(KIB))])
    assert found.peak is None
    assert found.end.by_line == (Part("/my/model.py:7 forward", MIB, 1), Part(NO_LINE, KIB, 1))
    assert found.oldest == ()


def test_a_segment_is_pinned_if_more_than_half_of_it_is_free_and_some_of_it_is_not() -> None:
    def free(size: int) -> dict[str, Any]:
        return block(size, state="inactive")

    at = [BASE + n * 512 * MIB for n in range(6)]
    segments = [
        segment(block(512, frames=MODEL), block(KIB, frames=TRAIN), free(20 * MIB - 1536), address=at[0]),
        segment(block(10 * MIB), free(10 * MIB), address=at[1]),  # half
        segment(free(20 * MIB), address=at[2]),  # unused
        segment(block(KIB), free(20 * MIB - KIB), address=at[3], is_expandable=True),  # returns its pages
        segment(block(9 * MIB, state="active_awaiting_free"), free(31 * MIB), address=at[4]),
    ]
    (found,) = summarized(segments)
    assert found.pinned == (
        Pinned(40 * MIB, 31 * MIB, 1, 9 * MIB, NO_LINE),
        Pinned(20 * MIB, 20 * MIB - 1536, 2, 1536, "/my/train.py:9 main"),
    )
    assert found.totals.unused == 20 * MIB
    (found,) = summarized([segment(block(KIB), free(MIB))], freed(BASE + 64 * MIB, 1))
    assert [each.line for each in found.pinned] == [BEFORE]


def test_failed_requests_are_in_the_answer() -> None:
    (found,) = summarized([segment(block(MIB))], [event("alloc", BASE, MIB), event("oom", 0, 3 * MIB)])
    assert found.answer.endswith(" 3.00 MiB could not be allocated at event 1.")


def test_an_empty_allocator_has_an_answer() -> None:
    (found,) = summarized([segment(block(2 * MIB, state="inactive"))])
    assert (
        found.answer
        == "0 B allocated of 2.00 MiB reserved at the end; nothing is in use. No events: the peak is not known."
    )


# ------------------------------------------------------------------------------------------------------------- compare


def test_what_grew_shrank_is_new_and_is_gone() -> None:
    def of(*blocks: tuple[str, int]) -> tuple[DeviceSummary, ...]:
        return summarized([segment(*(block(size, frames=[frame(f"/my/{file}.py")]) for file, size in blocks))])

    before = of(
        ("grows", MIB), ("shrinks", 9 * MIB), ("goes", 3 * MIB), ("stays", MIB), ("moves", MIB), ("moves", 2 * MIB)
    )
    after = of(
        ("grows", MIB), ("grows", 7 * MIB), ("shrinks", 4 * MIB), ("comes", MIB), ("stays", MIB), ("moves", 3 * MIB)
    )
    (found,) = compare(before, after)
    assert found.peak is None
    lines = {
        each.name.removeprefix("/my/").removesuffix(".py:1 forward"): (each.what, each.bytes, each.blocks)
        for each in found.end.changes
        if each.kind == "line"
    }
    assert list(lines.items()) == [
        ("grows", ("grew", 7 * MIB, 1)),
        ("shrinks", ("shrank", -5 * MIB, 0)),
        ("goes", ("gone", -3 * MIB, -1)),
        ("comes", ("new", MIB, 1)),
        ("moves", ("shrank", 0, -1)),
    ]
    sizes = {each.name: each.blocks for each in found.end.changes if each.kind == "size"}
    assert sizes == {"9,437,184 B": -1, "7,340,032 B": 1, "4,194,304 B": 1, "2,097,152 B": -1}
    assert found.answer == (
        "Requested at the end is the same in B: 17.0 MiB → 17.0 MiB; most: grows.py:1 forward (+7.00 MiB)"
    )


def test_the_peaks_are_compared_if_both_are_known() -> None:
    step = a_step()
    (found,) = compare([step], [step])
    assert found.peak is not None
    assert (found.peak.requested, found.peak.changes) == ((50 * MIB, 50 * MIB), ())
    assert found.answer == "Requested at the peak is the same in B: 50.0 MiB → 50.0 MiB"
    (plain,) = summarized([segment(block(MIB))])
    (found,) = compare([step], [plain])
    assert found.peak is None
    assert found.answer.startswith("Requested at the end is 94.4 % lower in B: 18.0 MiB → 1.00 MiB; most: ")


@pytest.mark.parametrize("marked_first", [True, False])
def test_blocks_without_a_mark_are_not_gone_if_the_other_file_has_marks(marked_first: bool) -> None:
    def of(mark: str) -> tuple[DeviceSummary, ...]:
        events = [event("alloc", BASE, 2 * MIB), event("alloc", BASE + 2 * MIB, MIB, user_metadata=mark)]
        return summarized([segment(block(2 * MIB), block(MIB))], events)

    pair = (of("epoch 3"), of("")) if marked_first else (of(""), of("epoch 3"))
    (found,) = compare(*pair)
    assert found.peak is not None
    marks = [(each.name, each.what, each.blocks) for each in found.peak.changes if each.kind == "mark"]
    some, none = ("gone", -1), ("grew", 1)
    if not marked_first:
        some, none = ("new", 1), ("shrank", -1)
    assert marks == [("epoch 3", *some), ("without a mark", *none)]
