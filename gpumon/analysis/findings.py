"""The catalogue of findings that present data can prove: where each rule's evidence comes from.

Model. A rule looks at one device of one rank at one step and returns evidence or None; thresholds are data
(gpumon.analysis.rules), and gpumon.analysis.tracker makes findings of evidence that stays.
Source. The catalogue of the design, section 7.
Cost. A few comparisons a rule; statements about the model walk its modules.
Known limitations. `rank-skew` does not know of pipeline stages, whose peaks differ by design.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gpumon.analysis import units
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.lines import Forecast, Lines
from gpumon.analysis.rules import (
    ALLOCATOR_RETRIES,
    BUCKET_COPY,
    DOMINANT_EMBEDDING,
    FOREACH_PEAK,
    NEAR_CAPACITY,
    OOM_AHEAD,
    OTHER_PROCESS,
    RANK_SKEW,
    Rule,
)
from gpumon.session.frame import ModelRecord, RankFrame, StepRecord
from gpumon_agent import wire

FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch.optim that take fused=True."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Why a rule holds, at one look."""

    title: str
    bytes: int | None
    remedy: str
    bytes_per_step: int | None = None
    holder: str | None = None
    where: str | None = None
    subject: str = ""  # tells two findings of one rule on one device apart


@dataclass(frozen=True, slots=True)
class Look:
    """One device of one rank at its newest closed step: all that rules see."""

    rank: RankFrame
    device: int
    record: StepRecord
    figures: StepPeaks | None
    forecast: Forecast | None
    lines: Lines | None
    reading: wire.DeviceReading | None
    capacity: int | None
    our_pids: Collection[int] = ()  # every watched process of the session
    usually_above: float | None = None  # what three of four of this rank's recent peaks are above
    typical_peak: float | None = None  # the median of this rank's recent peaks
    peers_peaks: tuple[float, ...] = ()  # the medians of the other ranks of its job
    retries_before: int | None = None  # num_alloc_retries at the look before

    @property
    def where(self) -> str:
        """ " on cuda:1", where a rank has more than one device."""
        several = len(self.rank.hello.devices) > 1
        return f" on {self.rank.hello.backend}:{self.device}" if several else ""


def near_capacity(look: Look) -> Evidence | None:
    rule, forecast = NEAR_CAPACITY, look.forecast
    if forecast is None or forecast.headroom is None or not look.capacity:
        return None
    if forecast.learnt_from < rule.least_steps_learnt:
        return None
    if forecast.headroom >= rule.headroom_share_of_device * look.capacity:
        return None
    return Evidence(
        f"{units.size(max(0, forecast.headroom))} left at the next peak{look.where}, "
        f"of {units.size(look.capacity)} on the device",
        max(0, forecast.headroom),
        _smaller_peak(forecast),
    )


def oom_ahead(look: Look) -> Evidence | None:
    rule, forecast = OOM_AHEAD, look.forecast
    if forecast is None or forecast.headroom is None or forecast.learnt_from < rule.least_steps_learnt:
        return None
    steps = forecast.steps_to_oom
    kept = forecast.growth == "kept"
    if steps is not None and steps <= (rule.steps_to_oom if kept else rule.steps_to_oom_by_batch):
        return Evidence(
            f"memory runs out in about {units.count(steps)} steps{look.where}: the peak grows by "
            f"{units.size(forecast.bytes_per_step)} a step",
            forecast.headroom,
            "find what is kept from step to step: a loss or an output stored with its graph, a growing list"
            if kept
            else _smaller_peak(forecast),
            bytes_per_step=forecast.bytes_per_step,
        )
    if forecast.p_oom is None or forecast.p_oom < rule.p_oom:
        return None
    return Evidence(
        f"the next iteration needs {units.size(forecast.next_peak)} ({units.size(forecast.low)}–"
        f"{units.size(forecast.high)}) in {forecast.phase}{look.where}: "
        f"{units.percent(forecast.p_oom)} likely not to fit",
        forecast.headroom,
        _smaller_peak(forecast),
    )


def _smaller_peak(forecast: Forecast) -> str:
    if forecast.phase == wire.OPTIMIZER:
        return "the optimizer step makes the peak, so a smaller batch does not help: fused=True, or foreach=False"
    if forecast.max_batch_factor is not None and 0 < forecast.max_batch_factor < 1:
        return f"at most {forecast.max_batch_factor:.2f} of this batch fits; or checkpoint activations, or autocast"
    return "a smaller batch with gradient accumulation, activation checkpointing, or autocast"


def allocator_retries(look: Look) -> Evidence | None:
    newest = retries(look.record, look.device)
    if newest is None or look.retries_before is None or newest <= look.retries_before:
        return None
    again = newest - look.retries_before
    settings = look.rank.hello.settings
    expandable = any("expandable_segments:true" in value.replace(" ", "").lower() for value in settings.values())
    return Evidence(
        f"cudaMalloc failed and was retried after the cache was emptied ({units.count(again)} times since the look "
        f"before{look.where}): near the edge, and slow",
        look.figures.reserved if look.figures is not None else None,
        "a smaller peak"
        if expandable
        else "a smaller peak, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragmentation",
    )


def retries(record: StepRecord, device: int) -> int | None:
    """The allocator's count of retries at the step's last sample on a device."""
    return next((p.retries for p in reversed(record.phases) if p.device == device and p.retries is not None), None)


def bucket_copy(look: Look) -> Evidence | None:
    for record in _models(look):
        parallel = record.model.parallel
        if parallel is None or parallel.gradient_as_bucket_view is not False:
            continue
        held = sum(parallel.bucket_bytes)
        if parallel.kind == "ddp" and held >= BUCKET_COPY.least_bytes:
            return Evidence(
                f"DDP's buckets hold one more copy of the gradients of {record.model.name}{look.where}",
                held,
                "DistributedDataParallel(..., gradient_as_bucket_view=True)",
                subject=record.model.name,
            )
    return None


def dominant_embedding(look: Look) -> Evidence | None:
    for record in _models(look):
        total = record.model.parameter_bytes
        for module in record.modules:
            if "Embedding" not in module.kind or module.parameter_bytes < DOMINANT_EMBEDDING.least_bytes:
                continue
            if _has_sparse_gradients(look, module):
                continue  # the table costs its rows once, and gradients only of those looked up
            share = module.parameter_bytes / total if total else 0.0
            if share < DOMINANT_EMBEDDING.share_of_parameters:
                continue
            tied = [other.path for other in record.modules if other.shared_with == module.path]
            shared = f"shared with {tied[0]}" if tied else "not shared with another layer"
            return Evidence(
                f"{module.path} holds {units.percent(share)} of the parameters ({units.count(module.parameters)}), "
                f"{shared}",
                module.parameter_bytes,
                "a smaller vocabulary shrinks weights, gradients and optimizer state at once; the batch does not",
                subject=module.path,
            )
    return None


def _has_sparse_gradients(look: Look, module: wire.Module) -> bool:
    """At the end of the optimizer fewer bytes of gradients stand than this one module's would have dense."""
    if look.lines is None or look.lines.gradients is None:
        return False
    return 2 * (look.lines.gradients + (look.lines.buckets or 0)) < module.trainable_bytes


def foreach_peak(look: Look) -> Evidence | None:
    rule, figures = FOREACH_PEAK, look.figures
    if figures is None or figures.peak_phase != wire.OPTIMIZER or figures.skipped:
        return None
    kinds = {o.kind for r in _models(look) for o in r.model.optimizers if o.foreach and not o.fused}
    if not kinds:
        return None
    others = max((p.peak for p in figures.phases if p.phase != wire.OPTIMIZER), default=0)
    saving = figures.peak - max(others, figures.end)
    if saving < max(rule.least_bytes, rule.saving_share_of_peak * figures.peak):
        return None
    fused = kinds <= FUSED
    return Evidence(
        f"the foreach step of {', '.join(sorted(kinds))} makes the peak{look.where}: lists of temporaries as large as "
        "the parameters",
        saving,
        "fused=True needs no temporaries" if fused else "foreach=False needs one parameter's temporaries at a time",
    )


def rank_skew(look: Look) -> Evidence | None:
    rule = RANK_SKEW
    if look.typical_peak is None or look.usually_above is None or not look.peers_peaks:
        return None
    ordered = sorted((*look.peers_peaks, look.typical_peak))
    usual = ordered[(len(ordered) - 1) // 2]
    if look.usually_above - usual < max(rule.least_bytes, rule.excess_share_of_median * usual):
        return None  # batches that differ make medians differ; a rank that is set apart is above in most of its steps
    excess = look.typical_peak - usual
    return Evidence(
        f"{look.rank.label} peaks {units.size(round(excess))} above the median of its job's ranks",
        round(excess),
        "longer batches, an output gathered on this rank, or another rank's tensors: compare the ranks' ledgers",
    )


def other_process(look: Look) -> Evidence | None:
    reading = look.reading
    if reading is None or reading.processes is None or look.rank.status != "live":
        return None
    if all(process.pid != look.rank.hello.pid for process in reading.processes):
        return None  # the driver's pids are not ours (a container): whose bytes these are cannot be told
    children = set()
    if look.rank.host is not None:
        children = {child.pid for process in look.rank.host.processes for child in process.children}
    others = [p for p in reading.processes if p.pid not in look.our_pids and p.pid not in children]
    held = sum(process.bytes or 0 for process in others)
    if held < OTHER_PROCESS.least_bytes:
        return None
    named = ", ".join(f"{p.name or 'pid'} {p.pid}" for p in sorted(others, key=lambda p: -(p.bytes or 0))[:3])
    return Evidence(
        f"other processes hold memory of this device{look.where}: {named}",
        held,
        "end them, or choose another device with CUDA_VISIBLE_DEVICES",
    )


def _models(look: Look) -> tuple[ModelRecord, ...]:
    return tuple(r for r in look.rank.models if not r.model.devices or look.device in r.model.devices)


CATALOGUE: tuple[tuple[Rule, Callable[[Look], Evidence | None]], ...] = (
    (OOM_AHEAD, oom_ahead),
    (NEAR_CAPACITY, near_capacity),
    (ALLOCATOR_RETRIES, allocator_retries),
    (OTHER_PROCESS, other_process),
    (RANK_SKEW, rank_skew),
    (FOREACH_PEAK, foreach_peak),
    (BUCKET_COPY, bucket_copy),
    (DOMINANT_EMBEDDING, dominant_embedding),
)
"""Every rule and where its evidence comes from, most urgent first: the order findings are shown in."""
