"""Tries the advice of an out-of-memory on the snapshot beside its report, if the training left one with events."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from gpumon.cli.printing import say
from gpumon.cli.progress import working

if TYPE_CHECKING:
    from gpumon.analysis.diagnosis.oom_report import OomReport
    from gpumon.snapshots.trace import Trace
    from gpumon_agent.oom.report_file import Report

ADVICE = "expandable-segments"
TRIED = {"expandable_segments": "True"}
APART_MS = 60_000
"""At most, from the report to its snapshot, which is written after it."""


def proved(explained: OomReport, report: Report, path: Path) -> OomReport:
    """`explained`, with what expandable segments would have changed. `path`: the report's file.

    The replayed device has what the process could have: what was free and what it had reserved.
    """
    at = next((at for at, each in enumerate(explained.remedies) if each.code == ADVICE), None)
    snapshot = beside(path, report.pid)
    if at is None or snapshot is None or report.free is None or report.reserved is None:
        return explained
    from gpumon.analysis.units import size
    from gpumon.snapshots.reading import Unreadable
    from gpumon.snapshots.replay import DEVICE, ReplayError, replay
    from gpumon.virtual_gpu import BuildUnavailable, profiles

    can_have = report.free + report.reserved
    if report.total is not None:
        can_have = min(can_have, report.total)
    try:
        with working(f"replaying {snapshot}"):
            trace = _trace(snapshot, report.device)
            if trace is None:
                return explained
            capacity = can_have + profiles.find(DEVICE).context_bytes
            as_it_was = replay(trace, capacity_bytes=capacity)
            tried = replay(trace, settings=TRIED, capacity_bytes=capacity)
    except (Unreadable, ReplayError, BuildUnavailable) as why:
        say(f"Note: the snapshot beside the report was not replayed: {why}.", err=True)
        return explained
    if as_it_was.fits:  # what else the cache held is not known
        return explained
    advice = explained.remedies[at]
    others = (*explained.remedies[:at], *explained.remedies[at + 1 :])
    if tried.fits:
        said = f"replayed from the snapshot: it fits, with {size(tried.figures.reserved_peak)} reserved"
        return replace(explained, remedies=(replace(advice, text=f"{advice.text} ({said})", enough=True), *others))
    said = "replayed from the snapshot: it runs out of memory with this too"
    return replace(explained, remedies=(*others, replace(advice, text=f"{advice.text} ({said})", enough=False)))


def beside(report: Path, pid: int) -> Path | None:
    """The snapshot that the process of this report wrote with it: snapshot-MILLISECONDS-PID.pickle."""
    moment = re.match(r"oom-(\d+)-", report.name)
    if moment is None:
        return None
    for path in sorted(report.parent.glob(f"snapshot-*-{pid}.pickle")):
        told = re.fullmatch(r"snapshot-(\d+)-\d+\.pickle", path.name)
        if told is None or not 0 <= int(told[1]) - int(moment[1]) <= APART_MS:
            continue
        about = path.lstat()
        if about.st_uid == os.geteuid() and stat.S_ISREG(about.st_mode):
            return path
    return None


def _trace(snapshot: Path, device: int) -> Trace | None:
    """Raises Unreadable."""
    from gpumon.snapshots.reading import read

    return next((each.trace for each in read(snapshot).devices if each.index == device), None)
