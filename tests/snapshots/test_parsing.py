"""What is read from a snapshot's objects, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from snapshot_files import BASE, KIB, MIB, block, content, event, frame, freed, segment

from gpumon.snapshots.model import UNKNOWN, Snapshot
from gpumon.snapshots.parsing import BYTES_MAX, DEVICES_MAX, Malformed, parse
from gpumon.snapshots.source_lines import TEXT_CHARS_MAX
from gpumon.snapshots.trace import ALLOC, FREE_COMPLETED, FREE_REQUESTED, SEGMENT_ALLOC, SEGMENT_FREE, Figures


def parsed(root: Any) -> Snapshot:
    return parse(root, 1_000)


def test_events_are_numbered_and_the_start_is_worked_out_from_them() -> None:
    """At the start: b (freed by an event) and c (in use at the end), c at the lower address; a is allocated."""
    b, c, a = BASE + 64 * MIB, BASE + 4 * MIB, BASE
    final = segment(block(4 * MIB, requested=3 * MIB), block(8 * MIB, requested=7 * MIB), block(MIB, state="inactive"))
    other = [event("segment_alloc", BASE, 13 * MIB), event("alloc", a, 3 * MIB)]
    events = [*freed(b, 5 * MIB), event("segment_free", b, 20 * MIB), *other, event("annotate", a, 0)]
    (device,) = parsed(content([final], events)).devices
    trace = device.trace
    assert trace is not None
    assert trace.start == ((0, 7 * MIB), (1, 5 * MIB))
    assert list(trace.codes) == [FREE_REQUESTED, FREE_COMPLETED, SEGMENT_FREE, SEGMENT_ALLOC, ALLOC]
    assert list(trace.ids) == [1, 1, -1, -1, 2]
    assert list(trace.bytes) == [5 * MIB, 5 * MIB, 20 * MIB, 13 * MIB, 3 * MIB]
    assert device.ends == {c: 0, a: 2}
    assert trace.recorded == Figures(
        requested_peak=12 * MIB,  # as the trace begins
        requested_end=10 * MIB,
        allocated_end=12 * MIB,
        reserved_start=20 * MIB,
        reserved_peak=20 * MIB,
        reserved_end=13 * MIB,
        segments_end=1,
    )


def test_the_line_of_a_block_that_is_left_is_known_whether_an_event_has_it_or_not() -> None:
    """The first waits for a stream, freed by the only event of it; the second's event has no stack."""
    waiting = block(MIB, state="active_awaiting_free", frames=[frame("/my/train.py", 1)])
    final = segment(
        waiting, block(MIB, frames=[frame("/my/train.py", 2)]), block(MIB, frames=[frame("/my/train.py", 3)])
    )
    events = [event("free_requested", BASE, MIB), event("alloc", BASE + MIB, MIB)]
    snapshot = parsed(content([final], events))
    lines = [snapshot.lines[each] for each in snapshot.devices[0].lines]
    assert lines == ["/my/train.py:1 forward", "/my/train.py:3 forward", "/my/train.py:2 forward"]


def test_streams_are_numbered_and_the_default_stream_is_0() -> None:
    events = [event("alloc", BASE + n * MIB, MIB, stream=s) for n, s in enumerate((9 << 40, 0, 7 << 40, 9 << 40))]
    final = segment(*(block(MIB) for _ in range(4)))
    (device,) = parsed(content([final], events)).devices
    assert device.trace is not None
    assert list(device.trace.streams) == [1, 0, 2, 1]


def test_a_free_that_is_missing_is_added_where_its_address_is_allocated_again() -> None:
    events = [event("alloc", BASE, MIB), event("alloc", BASE, 2 * MIB)]
    (device,) = parsed(content([segment(block(2 * MIB))], events)).devices
    assert device.trace is not None
    assert list(device.trace.codes) == [ALLOC, FREE_COMPLETED, ALLOC]
    assert list(device.trace.ids) == [0, 0, 1]
    assert device.trace.recorded is not None
    assert device.trace.recorded.requested_peak == 2 * MIB


def test_events_and_blocks_that_disagree_are_told() -> None:
    (device,) = parsed(content([segment(block(MIB))], [event("alloc", BASE + 512 * MIB, 5 * KIB)])).devices
    assert device.lost == 5 * KIB


def test_reserved_is_unknown_if_events_return_more_than_there_was() -> None:
    events = [event("segment_alloc", BASE, 40 * MIB), event("alloc", BASE, MIB)]
    (device,) = parsed(content([segment(block(MIB))], events)).devices
    assert device.trace is not None
    assert device.trace.recorded is None


def test_files_of_older_versions_are_read() -> None:
    """torch 2.0: no addresses of blocks, the stack in `history`, another word for waiting; 1.x: a list of segments."""
    older: dict[str, Any] = segment()
    older["total_size"] = 3 * MIB
    for name in ("device", "segment_pool_id", "is_expandable"):
        del older[name]
    stack = [frame("/home/me/train.py", 12, "step")]
    older["blocks"] = [
        {"size": MIB, "state": "active_allocated", "history": [{"addr": BASE, "frames": stack, "real_size": 1000}]},
        {"size": MIB, "state": "active_pending_free"},
        {"size": MIB, "state": "inactive"},
    ]
    for root in ({"segments": [older]}, [older]):
        snapshot = parsed(root)
        ((found,),) = (device.segments for device in snapshot.devices)
        assert [each.address for each in found.blocks] == [BASE, BASE + MIB, BASE + 2 * MIB]
        assert [each.requested for each in found.blocks] == [1000, MIB, 0]
        assert [each.state for each in found.blocks] == ["active_allocated", "active_awaiting_free", "inactive"]
        assert snapshot.lines[found.blocks[0].line] == "/home/me/train.py:12 step"
        assert found.blocks[1].line == UNKNOWN


CXX = frame("/usr/lib/libtorch_cpu.so", 99, "at::empty(int)")
UNWINDER = frame("/usr/lib/libtorch_cpu.so", 99, "torch::unwind::unwind()")
INSIDE = frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134)


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ([UNWINDER, CXX, INSIDE, frame("/my/model.py", 7), frame("/my/train.py", 9)], "/my/model.py:7 forward"),
        ([frame("/opt/app/site-packages/x.py"), frame("/opt/app/x.py")], "/opt/app/x.py:1 forward"),
        ([frame(f"/tmp/torchinductor_me/z3/c{'z3v4q' * 10}k.py"), frame("/my/train.py")], "/my/train.py:1 forward"),
        ([INSIDE, frame("/usr/lib/python3.11/runpy.py"), frame("<stdin>", 3, "<module>")], "<stdin>:3 <module>"),
        ([frame("/src/torch/nn/functional.py"), frame("/src/torch/train.py", 2)], "/src/torch/train.py:2 forward"),
        ([frame("<frozen runpy>"), frame("<eval_with_key>.3"), INSIDE], "<frozen runpy>:1 forward"),
        ([UNWINDER, frame("??", 0, "??"), CXX], "at::empty(int)"),
        ([UNWINDER], "torch::unwind::unwind()"),
        ([CXX, frame("a.so", 1, "torch::autograd::AddmmBackward0::apply(int)")], "AddmmBackward0 (backward)"),
        ([CXX, frame("a.so", 1, "at::_ops::sum_dim_IntList::call(int)")], "sum_dim_IntList (operator)"),
    ],
)  # fmt: skip
def test_the_line_is_the_innermost_of_the_users(stack: list[dict[str, Any]], line: str) -> None:
    snapshot = parsed(content([segment(block(MIB, frames=stack))]))
    assert snapshot.lines == (line,)


def test_a_mark_is_the_metadata_or_else_the_innermost_annotation_of_that_time() -> None:
    annotations = [
        {"device": 0, "name": name, "stage": stage, "time_us": at}
        for name, stage, at in (
            ("step", "START", 10),
            ("inner", "START", 20),
            ("inner", "END", 30),
            ("later", "START", 35),  # ends last
            ("step", "END", 40),
            ("never begun", "END", 41),
            ("later", "END", 50),
        )
    ]
    annotations.append({"device": 1, "name": "elsewhere", "stage": "START", "time_us": 1})
    times = (5, 10, 25, 30, 45, 55)
    events = [event("alloc", BASE + n * MIB, MIB, time_us=at) for n, at in enumerate(times)]
    events.append(event("alloc", BASE + 6 * MIB, MIB, time_us=25, user_metadata="mine"))
    final = segment(*(block(MIB) for _ in range(7)))
    snapshot = parsed(content([final], events, external_annotations=annotations))
    marks = [snapshot.marks[each] if each != UNKNOWN else None for each in snapshot.devices[0].marks]
    assert marks == [None, "step", "inner", "step", "later", None, "mine"]


def test_what_autograd_allocates_has_the_mark_of_the_thread_that_waits_for_it() -> None:
    backward, mine = [frame("a.so", 1, "torch::autograd::MulBackward0::apply(int)")], [frame("/my/train.py")]
    made = ((backward, ""), (mine, "step 1"), (backward, ""), (mine, ""), (backward, ""), ([], ""))
    events = [
        event("alloc", BASE + n * MIB, MIB, frames=frames, user_metadata=mark) for n, (frames, mark) in enumerate(made)
    ]
    snapshot = parsed(content([segment(*(block(MIB) for _ in made))], events))
    marks = [snapshot.marks[each] if each != UNKNOWN else None for each in snapshot.devices[0].marks]
    assert marks == [None, "step 1", "step 1", None, "step 1", None]


def test_settings_are_texts() -> None:
    raw = {
        "expandable_segments": True,
        "max_split_size": -1,
        "roundup_power2_divisions": {"256": 0, "512": 4},
        "later": {"1": 0},
        "odd": [1],
    }
    snapshot = parsed(content([segment(block(MIB))], allocator_settings=raw))
    assert snapshot.settings == {
        "expandable_segments": "True",
        "max_split_size": "-1",
        "roundup_power2_divisions": "512:4",
    }


def test_a_long_name_is_cut_where_it_begins() -> None:
    stack = [frame("/" + "a" * 2 * TEXT_CHARS_MAX + "/train.py", 3)]
    (line,) = parsed(content([segment(block(MIB, frames=stack))])).lines
    assert len(line) == 500
    assert line.endswith("/train.py:3 forward")


GOOD = segment(block(MIB))


@pytest.mark.parametrize(
    ("root", "why"),
    [
        ({}, "it has no segments"),
        (7, "it has no segments"),
        ({"segments": []}, "neither a segment nor an event"),
        ({"segments": {}}, "segments: a list is expected"),
        ({"segments": [3]}, "a segment: a dict is expected"),
        (content([{**GOOD, "blocks": None}]), "blocks: a list is expected"),
        (content([{**GOOD, "blocks": [None]}]), "a block: a dict is expected"),
        (content([{**GOOD, "total_size": -1}]), "total_size is no number of bytes"),
        (content([{**GOOD, "total_size": float("nan")}]), "total_size is no number of bytes"),
        (content([{**GOOD, "total_size": True}]), "total_size is no number of bytes"),
        (content([{**GOOD, "total_size": BYTES_MAX + 1}]), "total_size is no number of bytes"),
        (content([{**GOOD, "total_size": 1}]), "blocks are larger than the segment"),
        (content([{**GOOD, "address": 1 << 64}]), "address is no number of 64 bits"),
        (content([{**GOOD, "device": DEVICES_MAX}]), "it has a device 1,024"),
        (content([GOOD], *[[]] * (DEVICES_MAX + 1)), "it has events of 1,025 devices"),
        (content([{**GOOD, "blocks": [{"size": "1", "state": "inactive"}]}]), "size is no number of bytes"),
        (content([{**GOOD, "blocks": [block(1, state="lost")]}]), "a block's state is none of torch's"),
        (content([{**GOOD, "blocks": [block(1, state=[])]}]), "a block's state is none of torch's"),
        (content([{**GOOD, "blocks": [block(1, frames=[1])]}]), "a stack is not made of frames"),
        (content([{**GOOD, "blocks": [block(1, frames="x")]}]), "a stack is not made of frames"),
        (content([{**GOOD, "blocks": [block(1, frames=[{"filename": 1}])]}]), "a stack is not made of frames"),
        ({"segments": [GOOD], "device_traces": [3]}, "the events of a device: a list is expected"),
        (content([GOOD], [3]), "an event: a dict is expected"),
        (content([GOOD], [{"action": []}]), "an event has no action"),
        (content([GOOD], [event("alloc", -1, 1)]), "addr is no number of 64 bits"),
        (content([GOOD], [event("alloc", 1, 1, user_metadata=3)]), "user_metadata is no text"),
        (content([GOOD], [event("alloc", 1, 1, frames=None)]), "a stack is not made of frames"),
        (content([GOOD], external_annotations=[{"name": 3}]), "an annotation has no name"),
        (content([GOOD], gpumon=3), "gpumon: a dict is expected"),
        (content([GOOD], gpumon={"step": 3}), "gpumon: a step and a phase are expected"),
        (content([GOOD], gpumon={"step": "3", "phase": ""}), "step is no number of bytes"),
        (content([GOOD], allocator_settings=[]), "allocator_settings: a dict is expected"),
        (content([GOOD], [event("alloc", n, BYTES_MAX) for n in range(4097)]), "more entries than bytes"),
    ],
)
def test_what_is_no_snapshot_is_refused_in_a_sentence(root: Any, why: str) -> None:
    with pytest.raises(Malformed, match=why):
        parsed(root)


def test_a_segment_of_a_pebibyte_is_read_and_none_above() -> None:
    assert parsed(content([segment(block(1 << 50))])).devices[0].segments[0].size == 1 << 50
    with pytest.raises(Malformed):
        parsed(content([segment(block((1 << 50) + 1))]))


def test_more_bytes_than_64_bits_hold_are_refused() -> None:
    events = [event("alloc", n, BYTES_MAX) for n in range(4097)]
    with pytest.raises(Malformed, match="more bytes than any device has"):
        parse(content([GOOD], events), 10_000)
