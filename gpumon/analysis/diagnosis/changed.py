"""What changed between the last step that fitted and the one that ran out of memory: batch shapes and allocated bytes.

Cost. A pass over the newest steps' phases.
Known limitations. The failing batch's shapes are known only if the agent forecast it. Steps whose forward was not read
are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpumon.analysis import units
from gpumon.analysis.history import step_peaks
from gpumon.analysis.types import Finding
from gpumon.session.frame import RankFrame
from gpumon_agent import wire


def changed(rank: RankFrame, event: wire.Oom, kept: Sequence[Finding] = ()) -> tuple[str, ...]:
    """Sentences, the batch first. `kept`: findings on memory that stays allocated, most bytes first."""
    device = event.device
    before = next(
        (
            figures
            for record in reversed(rank.steps)
            if record.step < event.step and (figures := step_peaks(record, device)) is not None
        ),
        None,
    )
    if before is None:
        return ()
    said: list[str] = []
    outlook = next((each for each in rank.outlooks if (each.device, each.step) == (device, event.step)), None)
    since = f"step {units.count(before.step)}, the last that fitted"
    if outlook is not None and before.input_shapes and outlook.input_shapes != before.input_shapes:
        batch, was = units.shapes(outlook.input_shapes), units.shapes(before.input_shapes)
        said.append(f"The batch is {batch}; in {since}, it was {was}.")
    start = _start(rank, device)
    if start is not None and start > before.start:
        held = f" `{kept[0].holder}` grows." if kept and kept[0].holder and kept[0].bytes_per_step else ""
        more = units.size(start - before.start)
        said.append(f"When its forward began, {more} more was allocated than in {since}.{held}")
    return tuple(said)


def _start(rank: RankFrame, device: int) -> int | None:
    """Bytes allocated when the open step's first forward began."""
    if rank.open_step is None:
        return None
    start: int | None = None
    for phase in rank.open_step.on(device):
        if phase.phase == wire.FORWARD:
            return start
        start = phase.allocated
    return start
