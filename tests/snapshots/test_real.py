"""Snapshots that torch's allocator wrote: what is read from them is what torch counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpumon.snapshots.model import Snapshot
from gpumon.snapshots.reading import READ_BYTES, read
from gpumon.snapshots.summary import BEFORE, summarize
from gpumon.snapshots.trace import ALLOC, FREE_COMPLETED, OOM

pytestmark = pytest.mark.torch
MIB = 1 << 20


def _training(path, entries):
    import json

    import torch

    torch.cuda.memory._record_memory_history(max_entries=entries)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(64, 256, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    kept = [torch.empty(1000, device="cuda") for _ in range(3)]
    del kept[1]
    stats = torch.cuda.memory_stats()
    torch.cuda.memory._dump_snapshot(path)
    print(json.dumps(stats))


def _two_devices(path):
    import contextlib
    import json

    import torch

    torch.cuda.memory._record_memory_history(max_entries=40, stacks="python")
    held = [torch.empty(1 << 20, device="cuda:0") for _ in range(20)]
    other = torch.empty(5 << 20, device="cuda:1")
    for number in range(30):
        held[number % 20] = torch.empty((1 << 20) + 1000 * number, device="cuda:0")
    with contextlib.suppress(torch.OutOfMemoryError):
        torch.empty(1 << 40, device="cuda:0")
    torch.cuda.memory._dump_snapshot(path)
    print(json.dumps([torch.cuda.memory_stats(0), torch.cuda.memory_stats(1), other.numel()]))


def _many_events_of_two_devices(path):
    import json

    import torch

    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python", global_record_annotations=True)
    held = {}
    with torch.autograd.profiler.record_function("filling"):
        for number in range(60_000):
            held[number % 10] = torch.empty(1000 + number, device=f"cuda:{number % 2}")
    torch.cuda.memory._dump_snapshot(path)
    print(json.dumps([torch.cuda.memory_stats(0), torch.cuda.memory_stats(1)]))


def _unrecorded(path):
    import torch

    held = torch.empty(1 << 20, device="cuda")
    torch.cuda.memory._dump_snapshot(path)
    print(held.numel())


def _marked(path):
    import torch

    torch.cuda.memory._record_memory_history(global_record_annotations=True)
    with torch.autograd.profiler.record_function("warm-up"):
        first = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    if hasattr(torch.cuda.memory, "_set_memory_metadata"):
        torch.cuda.memory._set_memory_metadata("step 7")
    second = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.memory._dump_snapshot(path)
    print(hasattr(torch.cuda.memory, "_set_memory_metadata"), first.numel(), second.numel())


@pytest.fixture
def written(virtual_gpu: Callable[..., Any], tmp_path: Path) -> Callable[..., tuple[Snapshot, str]]:
    """Runs a script that writes a snapshot; returns what is read from it, and what the script printed."""

    def run(script: Callable[..., None], *args: object, devices: int = 1, **env: str) -> tuple[Snapshot, str]:
        path = tmp_path / "snapshot.pickle"
        ran = virtual_gpu(devices=devices).run(script, str(path), *args, env=env)
        return read(path), ran.stdout

    return run


@pytest.mark.parametrize("entries", [100_000, 150])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_the_figures_are_those_that_torch_counts(
    written: Callable[..., tuple[Snapshot, str]], entries: int, conf: str
) -> None:
    snapshot, said = written(_training, entries, PYTORCH_CUDA_ALLOC_CONF=conf)
    stats = json.loads(said.splitlines()[-1])
    (device,) = snapshot.devices
    trace = device.trace
    assert trace is not None
    assert trace.recorded is not None
    assert trace.recorded.requested_end == stats["requested_bytes.all.current"]
    assert trace.recorded.allocated_end == stats["allocated_bytes.all.current"]
    assert trace.recorded.reserved_end == stats["reserved_bytes.all.current"]
    assert device.lost == 0
    assert len(trace.codes) <= entries
    (summary,) = summarize(snapshot)
    assert summary.totals.allocated == stats["allocated_bytes.all.current"]
    if not conf:  # torch counts none in expandable segments
        assert summary.totals.inactive_split == stats["inactive_split_bytes.all.current"]
    assert summary.end.requested == stats["requested_bytes.all.current"]
    if entries == 100_000:  # the whole run
        assert trace.start == ()
        assert trace.recorded.requested_peak == stats["requested_bytes.all.peak"]
        assert trace.recorded.reserved_peak == stats["reserved_bytes.all.peak"]
        assert list(trace.codes).count(ALLOC) == stats["allocation.all.allocated"]
    else:
        assert len(trace.start) > 10  # the parameters are: their line is known, as they are there at the end
        assert summary.peak is not None
        assert any("_training.py:7 " in part.name for part in summary.peak.by_line)
    assert trace.settings["PYTORCH_CUDA_ALLOC_CONF"] == conf


def test_the_line_is_the_users_or_the_backward_that_allocated(written: Callable[..., tuple[Snapshot, str]]) -> None:
    snapshot, _ = written(_training, 100_000)
    named = {line.rpartition("/")[2] for line in snapshot.lines}
    text = Path(snapshot.lines[0].rpartition(":")[0]).read_text().splitlines()
    of = {text[int(line.rpartition(":")[2].split()[0]) - 1].strip() for line in named if "_training.py:" in line}
    assert "optimizer.step()" in of
    assert 'kept = [torch.empty(1000, device="cuda") for _ in range(3)]' in of
    assert any("torch.nn.Linear(256, 256)" in line for line in of)
    assert "AddmmBackward0 (backward)" in named
    assert not any("site-packages" in line for line in snapshot.lines)


def test_each_device_has_its_trace_and_an_out_of_memory_its_event(
    written: Callable[..., tuple[Snapshot, str]],
) -> None:
    snapshot, said = written(_two_devices, devices=2)
    *stats, _ = json.loads(said.splitlines()[-1])
    assert [each.index for each in snapshot.devices] == [0, 1]
    for device, counted in zip(snapshot.devices, stats, strict=True):
        assert device.trace is not None
        assert device.trace.recorded is not None
        assert device.trace.recorded.requested_peak == counted["requested_bytes.all.peak"]
        assert device.trace.recorded.segments_end == counted["segment.all.current"]
    first, second = summarize(snapshot)
    assert first.events == 40
    (failed,) = first.failed
    assert failed.bytes == 4 << 40
    assert snapshot.devices[0].trace is not None
    assert snapshot.devices[0].trace.codes[failed.event] == OOM
    assert f"4.00 TiB could not be allocated at event {failed.event}." in first.answer
    assert second.failed == ()
    assert first.peak is not None
    assert BEFORE in {part.name for part in first.peak.by_line}  # the block that was replaced at the peak


def test_a_large_file_of_two_devices_is_read_while_it_is_unpickled(
    written: Callable[..., tuple[Snapshot, str]], tmp_path: Path
) -> None:
    snapshot, said = written(_many_events_of_two_devices, devices=2)
    assert (tmp_path / "snapshot.pickle").stat().st_size > 2 * READ_BYTES
    for device, counted in zip(snapshot.devices, json.loads(said.splitlines()[-1]), strict=True):
        assert device.trace is not None
        assert device.trace.recorded is not None
        assert device.lost == 0
        assert list(device.trace.codes).count(ALLOC) == counted["allocation.all.allocated"] == 30_000
        assert device.trace.recorded.requested_peak == counted["requested_bytes.all.peak"]
        assert device.trace.recorded.reserved_peak == counted["reserved_bytes.all.peak"]
        assert {snapshot.marks[each] for each in device.marks} == {"filling"}


def test_without_recorded_events_the_end_is_known_and_the_peak_is_not(
    written: Callable[..., tuple[Snapshot, str]],
) -> None:
    snapshot, _ = written(_unrecorded)
    (device,) = snapshot.devices
    assert device.trace is None
    (summary,) = summarize(snapshot)
    assert summary.peak is None
    assert summary.end.requested == 4 * MIB
    assert summary.answer.endswith("No events: the peak is not known.")


def test_a_block_has_the_metadata_that_was_set_or_the_annotation_it_was_made_in(
    written: Callable[..., tuple[Snapshot, str]],
) -> None:
    snapshot, said = written(_marked)
    (summary,) = summarize(snapshot)
    assert summary.peak is not None
    marks = {part.name: part.bytes for part in summary.peak.by_mark}
    assert marks["warm-up"] == 1 * MIB
    if said.startswith("True"):
        assert marks["step 7"] == 2 * MIB


def test_a_block_lent_to_a_stream_counts_until_its_free_is_completed(
    written: Callable[..., tuple[Snapshot, str]],
) -> None:
    def lends(path):
        import torch

        torch.cuda.memory._record_memory_history()
        with torch.cuda.stream(torch.cuda.Stream()):
            lent = torch.empty(12 << 20, dtype=torch.uint8, device="cuda")
        lent.record_stream(torch.cuda.current_stream())
        del lent
        torch.cuda.memory._dump_snapshot(path)

    snapshot, _ = written(lends)
    (device,) = snapshot.devices
    assert device.trace is not None
    assert FREE_COMPLETED not in device.trace.codes
    assert set(device.trace.streams) == {1}
    (summary,) = summarize(snapshot)
    assert (summary.totals.allocated, summary.totals.waiting) == (0, 12 * MIB)
    assert device.trace.recorded is not None
    assert device.trace.recorded.requested_end == 12 * MIB
