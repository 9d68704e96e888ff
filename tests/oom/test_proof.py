"""Advice tried on the snapshot that an out-of-memory left: what it would have changed is replayed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpumon.cli.oom_proof import APART_MS, beside

from .conftest import Place


def one_gap(records):
    """64 MiB are free on the device, 50 in one gap beside a live block. Segments that grow return most of the gap."""
    import torch

    if records:
        torch.cuda.memory._record_memory_history()
    blocks = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (324, 60, 62, 64)]
    del blocks[1]
    blocks.append(torch.empty(10 << 20, dtype=torch.uint8, device="cuda"))
    torch.empty(66 << 20, dtype=torch.uint8, device="cuda")


def many_gaps(records):
    """50 MiB are free in five gaps, none of which has a whole page of a segment that grows."""
    import torch

    assert records
    torch.cuda.memory._record_memory_history()
    blocks = [torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (324, *[21] * 11)]
    for at in range(2, 12, 2):
        blocks[at] = None
    blocks += [torch.empty(12 << 20, dtype=torch.uint8, device="cuda") for _ in range(5)]
    torch.empty(40 << 20, dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize(
    ("script", "said", "number"),
    [
        (one_gap, "(replayed from the snapshot: it fits, with 540.0 MiB reserved)", 1),
        (many_gaps, "(replayed from the snapshot: it runs out of memory with this too)", 4),
    ],
)
def test_advice_says_what_it_changes_in_a_replay(place: Place, script: object, said: str, number: int) -> None:
    failed = place.train(script, True, GPUMON_OOM_SNAPSHOT="1")
    assert "OutOfMemoryError" in failed.stderr
    done = place.gpumon("explain", "--last")
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert said in words
    assert f" {number}. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: segments can grow" in words


def test_without_events_nothing_is_replayed(place: Place) -> None:
    place.train(one_gap, False, GPUMON_OOM_SNAPSHOT="1")
    done = place.gpumon("explain", "--last")
    assert (done.returncode, done.stderr) == (0, "")
    assert "expandable_segments:True" in done.stdout
    assert "replayed" not in done.stdout


def test_a_snapshot_that_cannot_be_read_is_a_note(place: Place) -> None:
    place.train(one_gap, True, GPUMON_OOM_SNAPSHOT="1")
    (snapshot,) = place.reports.glob("snapshot-*")
    snapshot.write_bytes(snapshot.read_bytes()[:1000])
    done = place.gpumon("explain", "--last")
    assert done.returncode == 0
    assert done.stdout.startswith("OUT OF MEMORY: Fragmentation")
    assert done.stderr == (
        f"Note: the snapshot beside the report was not replayed: {snapshot} is cut off: its end is missing.\n"
    )


def test_the_snapshot_of_a_report_is_its_process_s_and_a_little_newer(tmp_path: Path) -> None:
    report = tmp_path / "oom-1700000000000-77-0.json"
    report.write_text(json.dumps({}))
    assert beside(report, 77) is None
    for moment, pid in ((1_699_999_999_999, 77), (1_700_000_000_000 + APART_MS + 1, 77), (1_700_000_000_500, 78)):
        (tmp_path / f"snapshot-{moment}-{pid}.pickle").touch()
    assert beside(report, 77) is None
    wanted = tmp_path / "snapshot-1700000000500-77.pickle"
    wanted.symlink_to(tmp_path / "snapshot-1700000000500-78.pickle")
    assert beside(report, 77) is None
    wanted.unlink()
    wanted.touch()
    assert beside(report, 77) == wanted
