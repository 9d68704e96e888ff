"""Renders an explanation as text, 80 columns wide: the verdict first, then what failed, why, and what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from gpumon.analysis.answer import line, of_oom
from gpumon.analysis.diagnosis.figures import Figure
from gpumon.analysis.diagnosis.oom_report import Candidate, OomReport
from gpumon.analysis.diagnosis.tensor_match import SAME_SIZE_MAX
from gpumon.analysis.estimate.simulator import ROUND_SEGMENT, SMALL
from gpumon.analysis.pages import WIDTH
from gpumon.analysis.units import size
from gpumon_agent import wire
from gpumon_agent.units import torch_size as shown

DTYPES = {4: "fp32", 2: "16-bit", 1: "8-bit", 8: "fp64"}


def text(report: OomReport, width: int = WIDTH) -> str:
    blocks = [_wrap(line(of_oom(report)), width)]
    for heading, said in (
        ("What was requested", list(_what(report))),
        ("Why", list(report.reasons)),
        ("What it depends on", list(report.notes)),
        ("Assumed", list(report.assumptions)),
        ("What to do, most useful first", list(_remedies(report))),
    ):
        if said:
            body = "\n".join(_wrap(each, width, "  ") for each in said)
            blocks.append(f"{heading}\n{body}")
    return "\n\n".join(blocks)


def _wrap(line: str, width: int, indent: str = "") -> str:
    hanging = indent + ("   " if line[:2].rstrip(".").isdigit() else "")
    return textwrap.fill(
        line, width, initial_indent=indent, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )


def _what(report: OomReport) -> Iterator[str]:
    explained = [s for s in report.suspects if s.explains]
    if explained:
        yield from _explained(explained, report)
    elif report.suspects:
        yield from _sized(report)
    elif report.requested is not None:
        when = f", in {report.phase}" if report.phase else ""
        yield f"{shown(report.requested.middle)}{when}."
    if not explained and report.tensor and report.requested is not None:
        yield from _segment(report.tensor, report.requested)
    if report.where is not None:
        code = f"  {report.code}" if report.code else ""
        yield f"Requested at {report.where}{code}"
    if report.module is not None:
        which = "whose backward ran" if report.phase == wire.BACKWARD else "that ran"
        yield f"The module {which}: {report.module}"


def name(suspect: Candidate) -> str:
    """ "word_embeddings (867,813 × 832, fp32, 2.69 GiB)"."""
    shape = " × ".join(f"{size:,}" for size in suspect.tensor.shape) or "one element"
    dtype = DTYPES.get(suspect.tensor.width, f"{suspect.tensor.width} bytes each")
    return f"{suspect.tensor.name} ({shape}, {dtype}, {shown(suspect.bytes)})"


def _explained(explained: Sequence[Candidate], report: OomReport) -> Iterator[str]:
    suspect = explained[0]
    which = "a later" if suspect.later else "the first"
    if suspect.phase == "optimizer" and len(explained) > 1:
        yield (
            f"One of {len(explained)} requests of {which} optimizer.step that match in size and position; the nearest: "
            f"{name(suspect)}, its {suspect.what}."
        )
    elif suspect.phase == "optimizer":
        yield f"One more copy of {name(suspect)}: its {suspect.what}, in {which} optimizer.step."
    elif suspect.phase == "load":
        yield f"The weights {name(suspect)}, as the model is moved to the device."
    else:
        whose = {"backward": "their gradient", "forward": "themselves"}.get(report.phase or "", "themselves or a copy")
        yield f"It has the size of the {name(suspect)}: {whose}."
    if suspect.allocated_before is not None and suspect.left is not None:
        parts = (
            f"weights, gradients and {'all states' if suspect.later else 'the states made so far'}"
            if suspect.phase == "optimizer"
            else "the weights before it"
        )
        agree = " Size and position both match." if len(explained) == 1 else ""
        yield (
            f"By then {shown(suspect.allocated_before)} is allocated ({parts}); the message says "
            f"{shown(suspect.allocated_before + suspect.left.middle)}.{agree}"
        )


def _segment(ranges: Sequence[Figure], requested: Figure) -> Iterator[str]:
    """Small tensors share a segment; the message gives the segment's size."""
    first, *rest = ranges
    if first.high > requested.high - ROUND_SEGMENT and first.high > SMALL:
        return
    takes = f"at most {size(first.high)}" if first.low == 1 else f"{size(first.low)} to {size(first.high)}"
    takes += "".join(f", or {size(each.low)} to {size(each.high)}" for each in rest)
    yield f"That is the segment that PyTorch requests from the driver; the tensor itself takes {takes}."


def _sized(report: OomReport) -> Iterator[str]:
    several = report.suspects
    named = "; ".join(name(suspect) for suspect in several[:SAME_SIZE_MAX])
    more = f"; and {len(several) - SAME_SIZE_MAX} more of that size" if len(several) > SAME_SIZE_MAX else ""
    yield f"It has the size of {named}{more}."
    if any(s.what == "gradient" for s in several):
        yield "It can be its gradient in backward, or a copy; the allocated bytes fit more than one moment."


def _remedies(report: OomReport) -> Iterator[str]:
    for number, remedy in enumerate(report.remedies, start=1):
        gain = []
        if remedy.saves:
            gain.append(f"saves {shown(remedy.saves)}")
        if remedy.enough is not None and remedy.saves:
            gain.append("enough here" if remedy.enough else "not enough alone")
        yield f"{number}. {remedy.text}{' [' + ', '.join(gain) + ']' if gain else ''}"
