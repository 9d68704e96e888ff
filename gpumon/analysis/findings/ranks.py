"""Findings from comparing the ranks of a job: rank-skew, stray-context."""

from __future__ import annotations

from gpumon.analysis import units
from gpumon.analysis.findings.look import Evidence, Look
from gpumon.analysis.rules import RANK_SKEW


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
    held = [process.bytes for process in strays if process.bytes is not None]
    named = ", ".join(f"{look.elsewhere[process.pid]} (pid {process.pid})" for process in strays[:4])
    more = f" and {len(strays) - 4} more" if len(strays) > 4 else ""
    return Evidence(
        f"{named}{more} trains on another device and holds a context on this one, {look.rank.label}'s{look.where}",
        sum(held) if held else None,
        "torch.cuda.set_device(local_rank) before anything touches CUDA; map_location in torch.load; "
        "device_ids in dist.barrier",
    )
