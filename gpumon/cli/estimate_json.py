"""The estimate as JSON objects, described in docs/estimate.md. Bytes are ints; unknown values are null."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from gpumon.analysis.estimate.comparing import ParameterComparison
from gpumon.analysis.estimate.plan import TargetDevice
from gpumon.analysis.estimate.report import EstimateReport
from gpumon.analysis.estimate.sharding import RankShare
from gpumon.analysis.estimate.traced import PhaseBytes
from gpumon.analysis.estimate.workload import Workload
from gpumon.analysis.types import OWNERS, Breakdown
from gpumon.cli import checked

LINES = (*OWNERS, "rounding", "allocated")


def as_object(done: EstimateReport) -> dict[str, Any]:
    expected, device = done.expected, done.device
    high = expected.highest
    return {
        "type": "estimate",
        "model": done.subject.name,
        "parameters": expected.model.count,
        "trainable": expected.model.trained_count,
        "workload": _workload(expected.work, expected.played.has_tokens, expected.played.forward),
        "peak": high.peak,
        "peak_phase": high.phase,
        "peak_iteration": high.iteration,
        "reserved": expected.reserved,
        "context": device.context if device is not None else None,
        "needed": done.needed,
        "ledger_peak": _ledger(high.at_peak),
        "phases": [_phase(phase) for phase in expected.phases],
        "sources": dict(expected.sources),
        "checked": checked.ESTIMATE,
        "kv_cache": expected.played.kv_cache if expected.work.kv_cache else None,
        "floor": {"peak": done.floor.peak, "reserved": done.floor.reserved},
        "rule_of_thumb": asdict(done.thumb) if done.thumb is not None else None,
        "device": _device(done),
        "remedies": [asdict(remedy) for remedy in done.remedies],
    }


def _workload(work: Workload, has_tokens: bool = True, forward: bool = True) -> dict[str, Any]:
    return {
        "batch": work.batch if forward else None,
        "sequence": (work.kv_cache or work.sequence) if forward and has_tokens else None,
        "precision": work.precision.name,
        "optimizer": work.optimizer.name,
        "form": work.optimizer.form,
        "world_size": work.world_size,
        "zero": work.zero,
        "fsdp1": work.flat and work.zero == 3,
        "accumulation": work.accumulation,
        "checkpointing": work.checkpointing,
        "attention": work.attention if forward else None,
        "gradient_as_bucket_view": work.bucket_views,
        "set_to_none": work.set_to_none,
        "inference": work.inference,
    }


def _ledger(lines: Breakdown) -> dict[str, int]:
    return {name: getattr(lines, name) or 0 for name in LINES}


def _phase(phase: PhaseBytes) -> dict[str, Any]:
    return {
        "iteration": phase.iteration,
        "phase": phase.phase,
        "allocated_peak": phase.peak,
        "allocated": phase.end,
        "reserved_peak": phase.reserved,
        "ledger_peak": _ledger(phase.at_peak),
        "ledger": _ledger(phase.at_end),
    }


def _device(done: EstimateReport) -> dict[str, Any] | None:
    device, limits = done.device, done.limits
    if device is None:
        return None
    return {
        "name": device.name,
        "total": device.total,
        "context": device.context,
        "fits": limits.fits if limits else None,
        "floor_fits": limits.floor_fits if limits else None,
        "largest_batch": limits.batch if limits else None,
        "longest_sequence": limits.sequence if limits else None,
    }


def share_object(count: int, work: Workload, share: RankShare, device: TargetDevice | None) -> dict[str, Any]:
    """Bytes per rank, from the parameter count alone."""
    return {
        "type": "estimate",
        "model": None,
        "parameters": count,
        "trainable": count,
        "workload": _workload(work, forward=False),
        "ledger": {
            "weights": share.weights + share.casts,
            "gradients": share.gradients,
            "optimizer": share.optimizer,
            "activations": None,
            "allocated": share.total,
        },
        "sources": {"weights": "exact", "gradients": "exact", "optimizer": "exact"},
        "device": None
        if device is None
        else {"name": device.name, "total": device.total, "fits": share.total <= device.budget},
    }


def comparison_object(done: ParameterComparison) -> dict[str, Any]:
    return {
        "type": "comparison",
        "parameters": [done.first, done.second],
        "vocabulary": done.vocabularies,
        "parameters_per_entry": done.per_entry,
        "layers": [asdict(row) for row in done.rows],
    }
