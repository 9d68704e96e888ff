"""Traces replayed through the real allocator: what comes of each event, of settings, of devices that are too small."""

from __future__ import annotations

import os
import sys
from array import array

import msgspec
import pytest
import virtual
from traces import made

from gpumon.snapshots import replay as replaying
from gpumon.snapshots.replay import (
    FailedRequest,
    ReplayError,
    UnknownSetting,
    advise,
    parse_settings,
    replay,
    saved_bytes,
    unknown_cache_bytes,
)
from gpumon.snapshots.trace import ALLOC, FREE_COMPLETED, FREE_REQUESTED, OOM, SEGMENT_FREE, SNAPSHOT, Figures

pytestmark = pytest.mark.torch
MIB = 1 << 20
CONTEXT = 450 * MIB
OLDER_TORCH = os.environ.get("GPUMON_OLDER_TORCH") == "1"


@pytest.fixture(scope="module")
def device() -> None:
    virtual.environment(sys.executable)


def freed(block: int, size: int) -> tuple[tuple[int, int, int], ...]:
    return (FREE_REQUESTED, block, size), (FREE_COMPLETED, block, size)


# ------------------------------------------------------------------------------------------------ what cannot have been

CONTRADICTIONS = {
    "allocates block 1, which is allocated already": made((ALLOC, 1, 512), (ALLOC, 1, 512)),
    "allocates block 0, which is allocated already": made((ALLOC, 0, 512), start=((0, 512),)),
    "allocates block -1": made((ALLOC, -1, 512)),
    "frees block 7, which is not allocated": made((FREE_COMPLETED, 7, 512)),
    "event 2 of the trace frees block 1": made((ALLOC, 1, 512), (FREE_REQUESTED, 1, 512), (FREE_REQUESTED, 1, 512)),
    "event 3 of the trace frees block 1": made((ALLOC, 1, 512), *freed(1, 512), (FREE_COMPLETED, 1, 512)),
    "(alloc) has -512 bytes": made((ALLOC, 1, -512)),
    "the unknown code 9": made((9, 1, 512)),
    "a block 1 of -1 bytes": made(start=((1, -1),)),
    "a block 1 of 512 bytes": made(start=((1, 512), (1, 512))),
    "a block 0 of 18446744073709551616 bytes": made(start=((0, 1 << 64),)),
    "different lengths": msgspec.structs.replace(made((ALLOC, 1, 512)), streams=array("q")),
    "other types": msgspec.structs.replace(made((ALLOC, 1, 512)), bytes=array("d", [512])),
}


@pytest.mark.parametrize("why", CONTRADICTIONS)
def test_a_trace_that_contradicts_itself_is_refused_in_one_sentence(why: str) -> None:
    for each in (replay, advise):
        with pytest.raises(ReplayError) as refused:
            each(CONTRADICTIONS[why])
        assert why in str(refused.value)
        assert "\n" not in str(refused.value)


def test_settings_are_read_as_torch_reads_them() -> None:
    assert parse_settings("expandable_segments:True, max_split_size_mb:128") == {
        "expandable_segments": "True",
        "max_split_size_mb": "128",
    }
    assert parse_settings("roundup_power2_divisions:[256:1,>:4],backend:native") == {
        "roundup_power2_divisions": "[256:1,>:4]",
        "backend": "native",
    }
    assert parse_settings("") == {}
    for text in ("expandable_segments", "a:b:c", "a:\0", "a:\x1b7", "a:[1", ":1", "a: b c"):
        with pytest.raises(ReplayError):
            parse_settings(text)


# -------------------------------------------------------------------------------------------------- what an event does


def test_each_event_does_what_it_did(device: None) -> None:
    """By hand: 20 MiB segments hold blocks of 1 to 10 MiB, larger ones have their own, rounded to 2 MiB.

    A large block is split if more than 1 MiB would be left: the 31 MiB take all of their 32.
    """
    trace = made(
        (ALLOC, 1, 31 * MIB),  # 32 MiB reserved
        (FREE_REQUESTED, 1, 31 * MIB),
        (ALLOC, 2, 31 * MIB),  # block 1 is still held: 64 MiB
        (FREE_COMPLETED, 1, 31 * MIB),
        (ALLOC, 3, 20 * MIB),  # from the free block
        *freed(3, 20 * MIB),
        (ALLOC, 4, 20 * MIB, 1),  # another stream, which has no free block: 84 MiB
        *freed(4, 20 * MIB),
        (SNAPSHOT, -1, 0),
        (SEGMENT_FREE, -1, 32 * MIB),  # both free segments, once
        (SEGMENT_FREE, -1, 20 * MIB),
        (ALLOC, 5, 0),
        *freed(5, 0),
        (FREE_REQUESTED, 0, 3 * MIB + 1),  # no longer allocated, but still requested and held
        start=((0, 3 * MIB + 1),),  # 20 MiB
    )
    replayed = replay(trace)
    assert replayed.fits
    assert (replayed.settings, replayed.capacity_bytes, replayed.retries) == ({}, None, 0)
    assert replayed.figures == Figures(
        requested_peak=65 * MIB + 1,
        requested_end=34 * MIB + 1,
        allocated_end=32 * MIB,
        reserved_start=20 * MIB,
        reserved_peak=104 * MIB,
        reserved_end=52 * MIB,
        segments_end=2,
    )


def test_each_recorded_stream_is_one_of_its_own(device: None) -> None:
    """More than the 32 of torch's pool of streams: none uses what another one freed."""
    events = [event for n in range(40) for event in ((ALLOC, n, 20 * MIB, 1000 + n), (FREE_COMPLETED, n, 20 * MIB))]
    assert replay(made(*events)).figures.reserved_peak == 40 * 20 * MIB


def test_of_a_program_only_its_trace_counts(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = made((ALLOC, 1, 20 * MIB), *freed(1, 20 * MIB), (ALLOC, 2, 20 * MIB))
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "roundup_power2_divisions:1")
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    figures = replay(trace).figures
    assert (figures.reserved_peak, figures.segments_end) == (20 * MIB, 1)
    assert replay(trace, settings={"expandable_segments": "True"}).figures.segments_end == 0  # torch warns


def test_the_settings_of_the_recording_hold_until_they_are_replaced(device: None) -> None:
    trace = msgspec.structs.replace(
        made((ALLOC, 1, 33 * MIB)), settings={"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4", "other": "1"}
    )
    recorded = replay(trace)
    assert recorded.settings == {"roundup_power2_divisions": "4"}
    assert recorded.figures.allocated_end == 40 * MIB
    replaced = replay(trace, settings={"roundup_power2_divisions": "8"})
    assert replaced.figures.allocated_end == 36 * MIB
    assert saved_bytes(recorded, replaced) == 4 * MIB


# ------------------------------------------------------------------------------------------- devices that are too small


def test_the_request_that_fails_is_named(device: None) -> None:
    trace = made((ALLOC, 1, 60 * MIB), *freed(1, 60 * MIB), (ALLOC, 2, 70 * MIB), (ALLOC, 3, 40 * MIB), *freed(3, 1))
    tight = replay(trace, capacity_bytes=CONTEXT + 100 * MIB)
    assert tight.oom == FailedRequest(4, 40 * MIB)
    assert not tight.fits
    assert tight.retries == 2  # the cache made way for block 2
    assert tight.figures.requested_end == 70 * MIB
    ample = replay(trace, capacity_bytes=CONTEXT + 110 * MIB)
    assert (ample.oom, ample.retries, ample.figures.reserved_peak) == (None, 1, 110 * MIB)
    assert saved_bytes(tight, ample) is None


def test_a_block_of_the_beginning_may_not_fit(device: None) -> None:
    replayed = replay(made(start=((0, 20 * MIB), (1, 1 << 62))), capacity_bytes=CONTEXT + 100 * MIB)
    assert replayed.oom == FailedRequest(None, 1 << 62)
    assert replayed.figures.requested_end == 20 * MIB
    recorded = Figures(0, 0, 0, 1 << 30, 1 << 30, 0, 0)
    assert unknown_cache_bytes(msgspec.structs.replace(made(), recorded=recorded), replayed) is None


def test_a_recorded_oom_is_requested_again(device: None) -> None:
    """What fails again is named, and the trace goes on: the program did."""
    trace = made(
        (ALLOC, 1, 60 * MIB), (OOM, -1, 60 * MIB), (OOM, -1, 50 * MIB), *freed(1, 60 * MIB), (ALLOC, 2, 30 * MIB)
    )  # fmt: skip
    failed = replay(trace, capacity_bytes=CONTEXT + 100 * MIB)
    assert (failed.oom, failed.figures.requested_end) == (FailedRequest(1, 60 * MIB), 30 * MIB)
    passed = replay(trace)
    assert (passed.oom, passed.figures.requested_peak) == (None, 120 * MIB)
    assert passed.figures.requested_end == 30 * MIB


def test_a_device_without_room_for_a_context_is_refused() -> None:
    with pytest.raises(ReplayError, match="smaller than the context"):
        replay(made(), capacity_bytes=CONTEXT)


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"backend": "cudaMallocAsync"}, "only the native backend"),
        ({"max_split_size_mb": "1"}, "too small"),
        ({"max_split_size_mb": "1 2"}, "is not a setting"),
    ],
)
def test_settings_that_torch_refuses_are_named(device: None, settings: dict[str, str], why: str) -> None:
    with pytest.raises(ReplayError, match=why) as refused:
        replay(made(), settings=settings)
    assert "\n" not in str(refused.value)
    assert not isinstance(refused.value, UnknownSetting)


def test_what_is_tried_follows_from_the_trace() -> None:
    def tried(largest_mib: int, capacity_bytes: int | None = None) -> dict[str, str]:
        trace = made((ALLOC, 1, 512), start=((0, largest_mib * MIB),))
        return {key: value for each in replaying._changes(trace, capacity_bytes) for key, value in each.items()}

    always = {"expandable_segments": "True", "large_segment_size_mb": "64", "roundup_power2_divisions": "16"}
    assert tried(19) == always
    assert tried(20) == tried(31) == {**always, "max_split_size_mb": "20"}
    assert tried(128) == tried(255) == {**always, "max_split_size_mb": "128"}
    collecting = {"garbage_collection_threshold": "0.8", "per_process_memory_fraction": "0.99"}
    assert tried(19, 1 << 30) == {**always, **collecting}


def test_advice_leaves_out_what_this_torch_does_not_know(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownSetting, match="no_such_setting"):
        replay(made(), settings={"no_such_setting": "1"})
    monkeypatch.setattr(replaying, "_changes", lambda *_: [{"no_such_setting": "1"}, {"expandable_segments": "True"}])
    recorded = {"max_split_size_mb": "32"}
    trace = msgspec.structs.replace(made(), settings={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:32"})
    assert [each.settings for each in advise(trace)] == [recorded, {**recorded, "expandable_segments": "True"}]


def test_advice_says_what_each_setting_changes(device: None) -> None:
    """By hand: each block is freed, and too small for the next one, 2 MiB larger."""
    sizes_mib = range(60, 118, 2)
    trace = made(*(event for n in sizes_mib for event in ((ALLOC, n, n * MIB), *freed(n, n * MIB))))
    recorded, *others = advise(trace, capacity_bytes=3 << 30)
    assert recorded.settings == {}
    assert recorded.figures.reserved_peak == sum(sizes_mib) * MIB
    saved = {next(iter(each.settings)): saved_bytes(recorded, each) for each in others}
    expected = {
        "expandable_segments": (sum(sizes_mib) - 120) * MIB,  # one segment, which grew by 20 MiB at a time
        "large_segment_size_mb": 0,  # all of them have segments of their own
        "roundup_power2_divisions": sum(range(66, 118, 4)) * MIB,  # from 64 to 128 in steps of 4
        "max_split_size_mb": 0,
        "garbage_collection_threshold": 116 * MIB,  # above 0.8 × 0.99 × 3 GiB: what is old goes before the last block
    }
    if OLDER_TORCH:  # it does not know large_segment_size_mb and per_process_memory_fraction
        del expected["large_segment_size_mb"], expected["garbage_collection_threshold"]
    assert saved == expected


def test_what_the_cache_held_before_is_not_known(device: None) -> None:
    replayed = replay(made(start=((0, 20 * MIB),)))
    for reserved_mib, freed_mib, unknown_mib in ((60, 0, 40), (60, 30, 10), (60, 40, 0), (10, 0, 0)):
        trace = msgspec.structs.replace(
            made((SEGMENT_FREE, -1, freed_mib * MIB), (ALLOC, 1, 512), (SEGMENT_FREE, -1, 4 * MIB)),
            recorded=Figures(20 * MIB, 0, 0, reserved_mib * MIB, 60 * MIB, 0, 0),
        )
        assert unknown_cache_bytes(trace, replayed) == unknown_mib * MIB
    assert unknown_cache_bytes(made(), replayed) is None
