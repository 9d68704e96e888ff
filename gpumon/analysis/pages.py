"""The catalogue's pages: what a finding means, what it is concluded from, and what to do. One source for all readers.

`gpumon explain CODE` prints a page; docs/findings/ holds them all, written by docs/make_findings.py.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, fields

from gpumon.analysis.rules import Rule

WIDTH = 80


@dataclass(frozen=True, slots=True)
class Page:
    """One finding's page. `silent`: when it says nothing."""

    means: str
    evidence: str
    do: str
    silent: str = ""


PAGES = {
    "near-capacity": Page(
        "The next peak is expected to come close to what the device has. The run goes on, but a longer batch, an "
        "evaluation, or a checkpoint's copy may be one allocation too many.",
        "The forecast's headroom: what the driver counts as free, plus what PyTorch has reserved, less the next peak.",
        "Shrink the peak: a smaller batch with accumulation, activation checkpointing, autocast; where the optimizer's "
        "step makes the peak, fused=True. If reserved stands far above allocated, expandable segments.",
        "Until a few iterations are learnt from, and once oom-ahead says more.",
    ),
    "oom-ahead": Page(
        "Memory will run out: the peak grows and the steps until it no longer fits can be counted, or the coming "
        "iteration alone is likely not to fit.",
        "The trend of the peaks over steps, told apart by what grows: bytes that stay (a leak), or what a step needs "
        "(batches sorted by length). The probability is that of the forecast's interval.",
        "Where bytes stay: find the list, dict or closure that keeps losses or outputs (`.item()`, `.detach()`). Where "
        "steps need more: the longest batch first tells at once whether it fits.",
    ),
    "allocator-retries": Page(
        "cudaMalloc failed, PyTorch gave back everything it could and tried again, this time with success. Each retry "
        "waits for the device and is slow; the next one may fail for good.",
        "num_alloc_retries of torch.cuda.memory_stats has grown since the look before.",
        "A smaller peak; expandable segments, if fragmentation is the cause; a device without other processes.",
    ),
    "bucket-copy": Page(
        "DistributedDataParallel reduces gradients in buckets, and keeps the buckets beside the gradients: one more "
        "copy of every trained parameter.",
        "The bucket sizes DDP itself reports, without gradient_as_bucket_view.",
        "DistributedDataParallel(..., gradient_as_bucket_view=True): gradients become views of the buckets. Code that "
        "calls detach_() on gradients has to go.",
    ),
    "dominant-embedding": Page(
        "One embedding owns most of the model's parameters. Its rows cost weights, gradients and optimizer state "
        "whether a batch uses them or not, so the vocabulary decides whether it fits, and the batch does not.",
        "The share of the parameters' bytes, and which layers share the table.",
        "A smaller vocabulary: bin numbers, hash rare values, split long identifiers. A tied output layer, if there "
        "are two tables. The table on the CPU, or sparse gradients with SparseAdam.",
        "Where its gradients are sparse already.",
    ),
    "foreach-peak": Page(
        "The optimizer's step itself makes the peak: with foreach it builds lists of temporaries as large as all "
        "parameters together.",
        "The optimizer phase's peak stands above every other phase's, and its temporaries are what is above its end.",
        "fused=True (Adam, AdamW, SGD, Adagrad on CUDA) needs no temporaries; foreach=False needs one parameter's.",
        "Where another phase peaks as high: then nothing would be saved.",
    ),
    "stray-context": Page(
        "A process of the same job, which trains on another device, holds a CUDA context on this one: some hundred "
        "megabytes for nothing, on device 0 once for every other rank.",
        "The driver lists the rank's process on a device on which none of its phases ran.",
        "torch.cuda.set_device(local_rank) before anything touches CUDA, or CUDA_VISIBLE_DEVICES a rank. Usual ways "
        'in: a tensor made on plain "cuda" before the device is chosen, torch.load without map_location, dist.barrier '
        "without device_ids.",
        "Where the driver does not list processes (some containers), and until the other rank has closed a phase.",
    ),
    "rank-skew": Page(
        "One rank of a job peaks far above the others. It decides what batch fits, and all others wait for it if it "
        "runs out of memory.",
        "The median of its recent peaks against the median of the ranks, both steady over some steps.",
        "Longer batches on that rank (sort or bucket by length), outputs gathered to it, a checkpoint loaded there, "
        "other ranks' contexts on its device.",
        "Pipeline stages differ by design: there it means nothing.",
    ),
    "other-process": Page(
        "Somebody else's process holds memory of a device that this run uses.",
        "The driver's list of processes, without this job's and without its children.",
        "nvidia-smi names it: an old run, a notebook's kernel, another user's job. End it, or take another device with "
        "CUDA_VISIBLE_DEVICES.",
        "In containers that hide process ids, nothing can be said.",
    ),
}


def page(rule: Rule) -> str:
    """For a terminal: 80 columns."""
    blocks = [f"{rule.code}  ({rule.severity})"]
    for heading, body in _parts(rule):
        lines = textwrap.fill(body, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        blocks.append(f"{heading}\n{lines}")
    return "\n\n".join(blocks)


def markdown(rule: Rule) -> str:
    """For docs/findings/."""
    blocks = [f"# {rule.code}", f"Severity: {rule.severity}."]
    blocks += [f"## {heading}\n\n{textwrap.fill(body, 120, break_on_hyphens=False)}" for heading, body in _parts(rule)]
    return "\n\n".join(blocks) + "\n"


def _parts(rule: Rule) -> list[tuple[str, str]]:
    written = PAGES.get(rule.code)
    parts = []
    if written is not None:
        parts = [("What it means", written.means), ("What it is concluded from", written.evidence)]
        parts.append(("What to do", written.do))
        if written.silent:
            parts.append(("When it is silent", written.silent))
    parts.append(("Thresholds", "; ".join(_thresholds(rule)) + "."))
    return parts


def _thresholds(rule: Rule) -> list[str]:
    """The rule's own data, as it stands: names carry the units."""
    said = [f"opens after {rule.opens_after} looks in a row, is gone after {rule.closes_after} without"]
    own = (each.name for each in fields(rule) if each.name not in ("code", "severity", "opens_after", "closes_after"))
    return [*said, *(f"{name.replace('_', ' ')} {getattr(rule, name):,}" for name in own)]
