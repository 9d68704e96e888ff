"""Findings from comparing the ranks of a job: rank-skew, stray-context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpumon.analysis import units
from gpumon.analysis.findings.look import Evidence, Look
from gpumon.analysis.rules import RANK_SKEW
from gpumon_agent import wire

NAMED_MAX = 8
"""Ranks that a sentence names: those of one machine, mostly."""


def rank_skew(look: Look) -> Evidence | None:
    rule = RANK_SKEW
    if look.typical_peak is None or look.usually_above is None or not look.peers_peaks:
        return None
    if look.usually_above - min(*look.peers_peaks, look.typical_peak) < rule.least_bytes:
        return None  # so it cannot exceed the median by that much
    ordered = sorted((*look.peers_peaks, look.typical_peak))
    usual = ordered[(len(ordered) - 1) // 2]
    if look.usually_above - usual < max(rule.least_bytes, rule.excess_share_of_median * usual):
        return None  # varying batches make medians differ; a real outlier is above in most steps
    excess = look.typical_peak - usual
    return Evidence(
        f"{look.rank.label} peaks {units.size(round(excess))} above the median of its job's ranks",
        round(excess),
        "longer batches, an output gathered on this rank, or another rank's tensors: compare the ranks' breakdowns",
    )


def stray_context(look: Look) -> Evidence | None:
    if look.reading is None or look.reading.processes is None or look.rank.status != "live":
        return None
    strays = [process for process in look.reading.processes if process.pid in look.elsewhere]
    if not strays:
        return None
    held = sum(process.bytes or 0 for process in strays)
    one = len(strays) == 1
    here = look.where.removeprefix(" on ") or "device"
    share = f" ({units.size(held)}{'' if one else ' in all'})" if held else ""
    return Evidence(
        f"{_named(strays, look.elsewhere)} {'holds' if one else 'hold'} a CUDA context{share} on {look.rank.label}'s "
        f"{here} without training there",
        held or None,
        "torch.cuda.set_device(local_rank) before anything touches CUDA; map_location in torch.load; "
        "device_ids in dist.barrier",
    )


def _named(strays: Sequence[wire.DeviceProcess], labels: Mapping[int, str]) -> str:
    """ "rank 1 (pid 71)", "ranks 1, 2, 3", "rank 1 (pid 71), pid 72": those without a rank are named by their pid."""
    names = [labels[process.pid] for process in strays[:NAMED_MAX]]
    more = f" and {len(strays) - NAMED_MAX} more" if len(strays) > NAMED_MAX else ""
    numbers = [name.removeprefix("rank ") for name in names]
    if len(names) > 1 and all(map(str.isdecimal, numbers)):
        return f"ranks {', '.join(numbers)}{more}"
    return ", ".join(_with_pid(name, process.pid) for name, process in zip(names, strays, strict=False)) + more


def _with_pid(name: str, pid: int) -> str:
    return name if str(pid) in name else f"{name} (pid {pid})"
