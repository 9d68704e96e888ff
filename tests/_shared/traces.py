"""The traces in tests/data/traces: what the allocators of physical GPUs were asked for, and what those devices had.

From memory snapshots (`torch.cuda.memory._dump_snapshot`) in public repositories, which each file names as `source`;
only numbers were kept. `config` says what is known of model, torch and machine.
"""

from __future__ import annotations

import json
import lzma
import re
from array import array
from pathlib import Path
from typing import Any

from gpumon.snapshots.trace import SEGMENT_ALLOC, SEGMENT_FREE, Figures, Trace

FOLDER = Path(__file__).parents[1] / "data" / "traces"
FILES = sorted(FOLDER.glob("*.json.xz"))


def raw(file: Path) -> dict[str, Any]:
    return json.loads(lzma.decompress(file.read_bytes()))


def name(file: Path) -> str:
    """The owner of the repository, and the snapshot: "Wedsonlin medium_256_training"."""
    owner, _, path = file.name.removesuffix(".json.xz").partition("+")
    short = re.sub(r"^(results|memory_files_memory|memory)_|_memory_snapshot$|_$", "", path.partition("__")[2])
    return f"{owner} {short}"


def reserved_peak(trace: Trace) -> int:
    """The device's highest reserved bytes, from the first release of cache on if there is one.

    Before it the device had a cache that the trace does not describe.
    """
    assert trace.recorded is not None
    reserved = trace.recorded.reserved_start
    reached = [reserved]
    released = False
    for code, size in zip(trace.codes, trace.bytes, strict=True):
        if code == SEGMENT_FREE:
            reserved -= size
            reached = reached if released else []
            released = True
        elif code == SEGMENT_ALLOC:
            reserved += size
            reached.append(reserved)
    assert reserved == trace.recorded.reserved_end
    return max(reached)


def load(file: Path) -> Trace:
    read = raw(file)
    codes, ids, sizes, streams = zip(*read["events"], strict=True)
    figures = {field: read[field] for field in Figures.__struct_fields__ if field != "segments_end"}
    return Trace(
        start=tuple((block, size) for block, size in read["start"]),
        codes=array("B", codes),
        ids=array("q", ids),
        bytes=array("q", sizes),
        streams=array("q", streams),
        settings={"PYTORCH_CUDA_ALLOC_CONF": read["alloc_conf"]},
        recorded=Figures(**figures, segments_end=len(read["segments_end"])),
    )


def made(*events: tuple[int, int, int] | tuple[int, int, int, int], start: tuple[tuple[int, int], ...] = ()) -> Trace:
    """A trace of events (code, id, bytes), and the stream if it is not the default one."""
    codes, ids, sizes, streams = zip(*((*event, 0)[:4] for event in events), strict=True) if events else ((),) * 4
    return Trace(start, array("B", codes), array("q", ids), array("q", sizes), array("q", streams), {}, None)


def told(trace: Trace) -> list[tuple[int, int, int, int]]:
    """Its events, comparable with those of another run: code, block, bytes, stream. Blocks are numbered in order of
    their allocation, -1: alive as the trace begins; those have no order."""
    numbers = {block: -1 for block, _ in trace.start}
    told = []
    for code, block, size, stream in zip(trace.codes, trace.ids, trace.bytes, trace.streams, strict=True):
        if block >= 0 and block not in numbers:
            numbers[block] = len(numbers)
        told.append((code, numbers.get(block, -1), size, stream))
    return told
