"""Remedies for an out-of-memory as data, with the bytes each would save. Those already in use are left out.

Model. In the optimizer step each remedy's peak is recomputed from the model (`optimizer_step`). In forward and
backward, all bytes beside weights, gradients and state count as activations, proportional to the batch. Remedies that
make it fit come first, then those that save most bytes, last those that save next to nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpumon.analysis.changes import BATCH, BF16, BUCKET_VIEWS, EXPANDABLE, Held, saves
from gpumon.analysis.diagnosis.context import FailureContext, available
from gpumon.analysis.diagnosis.oom_report import Remedy
from gpumon.analysis.diagnosis.optimizer_remedies import stepping
from gpumon.analysis.diagnosis.optimizer_step import standing, states
from gpumon.analysis.estimate.model import Tensor
from gpumon_agent import wire

LITTLE = 0.1
"""Share of the missing bytes. A remedy that saves less comes last: one whose effect is unknown may do more."""

SETTING = "expandable_segments:True"


def remedies(case: FailureContext) -> tuple[Remedy, ...]:
    """Most useful first."""
    return tuple(_ordered((*_let_go(case), *_FOR.get(case.verdict, _unknown)(case)), _short(case) or 0))


def _ordered(found: Iterable[Remedy], short: int) -> list[Remedy]:
    def place(remedy: Remedy) -> tuple[int, int]:
        if remedy.enough:
            return 0, 0
        little = remedy.enough is False and (remedy.saves or 0) < LITTLE * short
        return 2 if little else 1, -(remedy.saves or 0)

    return sorted(found, key=place)


def _let_go(case: FailureContext) -> Iterator[Remedy]:
    """Freeing what findings say is kept for no use, whatever the verdict."""
    short = _short(case)
    for finding in case.kept:  # short == 0: the memory is fragmented, and what is freed may be too
        enough = (finding.bytes or 0) >= short if short else None
        yield Remedy(finding.code, finding.remedy, finding.bytes, enough)


def _short(case: FailureContext) -> int | None:
    """Bytes missing even if all unused memory were in one piece."""
    requested, free, slack = case.message.requested, case.message.free, case.message.slack
    if requested is None or free is None or slack is None:
        return None
    return max(0, requested.middle - free.middle - slack.middle)


# -------------------------------------------------------------------------------------------------------- by verdict


def _capacity(case: FailureContext) -> Iterator[Remedy]:
    if case.phase == wire.OPTIMIZER:
        yield from stepping(case)
        return
    if case.phase == wire.LOAD:
        yield from _loading(case)
        return
    yield from _activations(case)
    yield from _views(case)


def _loading(case: FailureContext) -> Iterator[Remedy]:
    whole = sum(t.bytes for t in case.tensors)
    space = available(case.message)
    half = saves(BF16, Held(weights=whole)) if whole and all(t.width == 4 for t in case.tensors) else None
    enough = None if half is None or space is None else whole - half <= space
    yield Remedy("bf16", "weights in bfloat16 (model.bfloat16(), or torch_dtype as it is loaded)", half, enough)
    yield Remedy("map-location", 'torch.load(..., map_location="cpu"): no second copy of a checkpoint on the device')
    yield Remedy("shard", "the weights spread over several devices (FSDP, device_map), or over the CPU")


def _activations(case: FailureContext) -> Iterator[Remedy]:
    activations = _beside_owners(case)
    half = saves(BATCH, Held(activations=activations)) if activations else None
    short = _short(case)
    enough = None if half is None or short is None else half >= short
    yield Remedy(
        "batch", "half the batch, twice the accumulation steps: activations are proportional to it", half, enough
    )
    yield Remedy(
        "checkpointing", "activation checkpointing: keeps one tensor a block, computes the rest again in backward"
    )
    yield Remedy("autocast", "torch.autocast(dtype=torch.bfloat16): activations in 16 bits, about half of them")
    if case.activation is not None:
        yield _instead(case.activation)
    if case.phase in (None, wire.FORWARD, wire.EVAL):
        yield Remedy("no-grad", "if this is evaluation: torch.inference_mode(), which keeps no activations at all")


def _instead(activation: Tensor) -> Remedy:
    if activation.name.startswith("logits"):
        text = (
            "a cross entropy that is fused with the output layer, or goes in chunks of tokens: no logits in one piece"
        )
        return Remedy("fused-loss", text, activation.bytes)
    text = "torch.nn.functional.scaled_dot_product_attention: no scores in one piece"
    return Remedy("sdpa", text, activation.bytes)


def _beside_owners(case: FailureContext) -> int | None:
    """Allocated beyond weights, gradients and states; without gradients or states if they do not fit (first step)."""
    allocated = case.message.allocated
    if allocated is None or not case.tensors:
        return None
    weights = sum(t.bytes for t in case.tensors)
    after = standing(case.tensors, case.recipe)
    kept = 0 if case.recipe is None else states(case.tensors, case.recipe)
    for owned in (after + kept, weights + kept, weights):
        if owned <= allocated.high:
            return allocated.middle - owned
    return None


def _views(case: FailureContext) -> Iterator[Remedy]:
    if case.settings.bucket_views is False:
        trained = saves(BUCKET_VIEWS, Held(gradients=sum(t.bytes for t in case.tensors if t.trainable))) or None
        text = "DistributedDataParallel(..., gradient_as_bucket_view=True): gradients live in the buckets, once"
        yield Remedy(BUCKET_VIEWS, text, trained)


def _fragmentation(case: FailureContext) -> Iterator[Remedy]:
    slack = case.message.slack
    requested = case.message.requested
    enough = slack is not None and requested is not None and slack.middle >= requested.middle
    if case.message.backend not in ("cuda", "hip"):
        yield Remedy("shapes", "batches of one shape, padded to a few lengths: blocks can be used again")
        return
    if not case.settings.expandable and not case.message.expandable:
        value = _variable(case)
        old = "" if case.message.new else " (PyTorch 2.1 or newer; before it, max_split_size_mb:128)"
        joined = saves(EXPANDABLE, Held(slack=slack.middle)) if slack is not None else None
        yield Remedy("expandable-segments", f"{value}{old}: segments that grow, so that gaps join", joined, enough)
    yield Remedy("shapes", "batches of one shape, padded to a few lengths: blocks of one size can be used again")
    yield Remedy("order", "the largest batch first: its blocks then hold every smaller one")
    yield Remedy("batch", "a smaller batch, if the peak itself is near the device's size")


def _variable(case: FailureContext) -> str:
    """The environment variable with its current options and expandable segments."""
    name = "PYTORCH_HIP_ALLOC_CONF" if case.message.backend == "hip" else "PYTORCH_CUDA_ALLOC_CONF"
    return f"{name}={case.settings.set},{SETTING}" if case.settings.set else f"{name}={SETTING}"


def _other(case: FailureContext) -> Iterator[Remedy]:
    held = sum(each.middle for _, each in case.message.others) or None
    yield Remedy(
        "end", "end the other process if it is yours (an old run, a notebook's kernel): nvidia-smi names it", held, True
    )
    yield Remedy("device", "another device: CUDA_VISIBLE_DEVICES, or LOCAL_RANK where every rank went to device 0")


def _leak(case: FailureContext) -> Iterator[Remedy]:
    if any(finding.bytes_per_step for finding in case.kept):
        return  # the finding has its own remedy
    yield Remedy("item", "loss.item() (or .detach()) for what is logged or summed: a kept loss keeps its graph")
    yield Remedy("lists", "lists and dicts that collect outputs, predictions or losses: keep them on the CPU, detached")
    yield Remedy(
        "watch", "gpumon run …, then gpumon attach and key 4: which tensors grow, since when, and who holds them"
    )


def _oversized(case: FailureContext) -> Iterator[Remedy]:
    yield Remedy("shapes", "print the shapes at this line: two operands that broadcast, (N, 1) with (1, N), make N × N")
    yield Remedy("pieces", "the computation in pieces: chunked distances or attention, scaled_dot_product_attention")
    yield Remedy("batch", "a smaller batch or a shorter sequence, if the shape is what it should be")


def _limit(case: FailureContext) -> Iterator[Remedy]:
    message = case.message
    if message.backend == "mps":
        yield Remedy("watermark", "PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 lifts the limit; macOS then swaps, or stalls")
        yield Remedy("batch", "a smaller batch with gradient accumulation, or activation checkpointing")
        return
    free = message.free.middle if message.free is not None else None
    yield Remedy("fraction", "a larger fraction in torch.cuda.set_per_process_memory_fraction, or none", free, True)
    yield from _activations(case)


def _refused(case: FailureContext) -> Iterator[Remedy]:
    yield Remedy("again", "run once more with the device to yourself: nvidia-smi, or rocm-smi, tells who else is there")
    yield Remedy("limits", "the container's, the MIG slice's, or Windows' and WSL's share of the device: raise it")
    if not case.settings.expandable and not case.message.expandable:
        yield Remedy("expandable-segments", f"{_variable(case)}: asks the driver for small pieces")


def _host(case: FailureContext) -> Iterator[Remedy]:
    if case.message.kind == "shared":
        yield Remedy(
            "shm", "docker run --shm-size=8g (or --ipc=host); in Kubernetes a memory-backed /dev/shm", None, True
        )
        yield Remedy("workers", "num_workers=0 tells whether it is that: nothing is shared then")
        return
    yield Remedy(
        "workers", "fewer DataLoader workers: each holds its own copy of what the dataset's Python objects become"
    )
    yield Remedy(
        "arrays", "a data set in one array or a memory map (numpy.memmap, Arrow), not in lists of Python objects"
    )
    yield Remedy("checkpoint", "torch.load(..., mmap=True): a checkpoint is then read as it is needed")


def _unknown(case: FailureContext) -> Iterator[Remedy]:
    if case.message.backend == "mps":
        yield from _limit(case)
        return
    yield Remedy(
        "leave-room", "leave room beside PyTorch: torch.cuda.set_per_process_memory_fraction(0.9) before training"
    )
    yield Remedy(
        "batch", "a smaller batch with gradient accumulation: the library's request is small, the device is full"
    )
    yield Remedy("shapes", "if the device is not full: CUDA_LAUNCH_BLOCKING=1 shows the operation that really failed")


_FOR = {
    "capacity": _capacity,
    "fragmentation": _fragmentation,
    "other-process": _other,
    "leak": _leak,
    "oversized": _oversized,
    "limit": _limit,
    "refused": _refused,
    "host": _host,
    "unknown": _unknown,
}
