"""An OOM as a JSON object: the fields shared by `gpumon explain --json` and `gpumon attach --json`."""

from __future__ import annotations

from typing import Any

from gpumon.analysis.diagnosis.figures import Figure
from gpumon.analysis.diagnosis.oom_report import Candidate, OomReport

Object = dict[str, Any]

SUSPECTS_MAX = 16
"""There can be hundreds of tensors of one size."""


def explained(report: OomReport) -> Object:
    """Figures rounded in the message are [low, high] bytes; remedies are sorted, best first."""
    return {
        "verdict": report.verdict,
        "sentence": report.sentence,
        "reasons": list(report.reasons),
        "notes": list(report.notes),
        "assumptions": list(report.assumptions),
        "missing": _figure(report.missing),
        "where": report.where,
        "source_line": report.code,
        "suspects": [_suspect(each) for each in report.suspects[:SUSPECTS_MAX]],
        "remedies": [remedy.text for remedy in report.remedies],
        "saves": [remedy.saves for remedy in report.remedies],
        "enough": [remedy.enough for remedy in report.remedies],
        "report": report.file,
    }


def message(report: OomReport) -> Object:
    """For a message alone, without a process."""
    return {
        "type": "explanation",
        "message": report.message,
        "device": report.device,
        "step": report.step,
        "phase": report.phase,
        "module": report.module,
        "requested": _figure(report.requested),
        **explained(report),
    }


def _figure(figure: Figure | None) -> list[int] | None:
    return None if figure is None else [figure.low, figure.high]


def _suspect(suspect: Candidate) -> Object:
    return {
        "name": suspect.tensor.name,
        "shape": list(suspect.tensor.shape),
        "bytes": suspect.bytes,
        "what": suspect.what,
        "phase": suspect.phase,
        "stands": suspect.allocated_before,
        "optimizer": suspect.way,
        "explains": suspect.explains,
    }
