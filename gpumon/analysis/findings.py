"""The catalogue of findings that present data can prove, and when each opens and goes.

Model. A rule looks at one device of one rank at one step and returns evidence or None; rules and thresholds are data.
A `Tracker` makes findings of evidence: one opens when its rule has held at `opens_after` looks in a row and is gone
when it has not at `closes_after` looks in a row. A look is a newest step not seen before, so time without training
opens and closes nothing. True statements about a model or a setting are info; what will fail is warning or critical.

Source. The catalogue of the design, section 7. Thresholds are meant to be silent on a healthy run: each asks for a
share of the device or of the peak and for a least number of bytes.
Cost. A few comparisons per rule; statements about the model walk its modules only when its description changed.

Known limitations. A finding says when it was first looked at, which at several steps a look is up to that much later
than when it began. `rank-skew` does not know of pipeline stages, whose peaks differ by design.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from gpumon.analysis import units
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.lines import Finding, Forecast, Lines
from gpumon.session.frame import ModelRecord, RankFrame, StepRecord
from gpumon_agent import wire

MIB = 1 << 20
GONE_KEPT = 32
FUSED = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""Optimizers of torch.optim that take fused=True."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What all rules state; thresholds are the fields of each, units in their names."""

    code: str
    severity: str
    opens_after: int = 1  # looks in a row
    closes_after: int = 1


@dataclass(frozen=True, slots=True)
class NearCapacity(Rule):
    code: str = "near-capacity"
    severity: str = "warning"
    opens_after: int = 5
    closes_after: int = 10
    headroom_share_of_device: float = 0.05
    least_steps_learnt: int = 5


@dataclass(frozen=True, slots=True)
class OomAhead(Rule):
    code: str = "oom-ahead"
    severity: str = "critical"
    opens_after: int = 2
    closes_after: int = 10
    p_oom: float = 0.2
    steps_to_oom: int = 500  # where what is kept from step to step grows
    steps_to_oom_by_batch: int = 20  # where what a step needs grows, as with batches sorted by length
    least_steps_learnt: int = 3


@dataclass(frozen=True, slots=True)
class AllocatorRetries(Rule):
    code: str = "allocator-retries"
    severity: str = "warning"
    closes_after: int = 200


@dataclass(frozen=True, slots=True)
class BucketCopy(Rule):
    code: str = "bucket-copy"
    severity: str = "info"
    least_bytes: int = MIB


@dataclass(frozen=True, slots=True)
class DominantEmbedding(Rule):
    code: str = "dominant-embedding"
    severity: str = "info"
    share_of_parameters: float = 0.5
    least_bytes: int = 8 * MIB


@dataclass(frozen=True, slots=True)
class ForeachPeak(Rule):
    code: str = "foreach-peak"
    severity: str = "info"
    opens_after: int = 5
    closes_after: int = 10
    saving_share_of_peak: float = 0.05
    least_bytes: int = 64 * MIB


@dataclass(frozen=True, slots=True)
class RankSkew(Rule):
    code: str = "rank-skew"
    severity: str = "warning"
    opens_after: int = 10
    closes_after: int = 20
    excess_share_of_median: float = 0.10
    least_bytes: int = 64 * MIB


@dataclass(frozen=True, slots=True)
class OtherProcess(Rule):
    code: str = "other-process"
    severity: str = "warning"
    opens_after: int = 3
    closes_after: int = 3
    least_bytes: int = 64 * MIB


NEAR_CAPACITY = NearCapacity()
OOM_AHEAD = OomAhead()
ALLOCATOR_RETRIES = AllocatorRetries()
BUCKET_COPY = BucketCopy()
DOMINANT_EMBEDDING = DominantEmbedding()
FOREACH_PEAK = ForeachPeak()
RANK_SKEW = RankSkew()
OTHER_PROCESS = OtherProcess()


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


@dataclass(slots=True)
class _Case:
    held: int = 0  # looks in a row with evidence
    missed: int = 0  # looks in a row without, once open
    since: int | None = None
    finding: Finding | None = None


@dataclass(slots=True)
class Tracker:
    """The findings of one rank: feed it each look, read `findings`."""

    _cases: dict[tuple[str, int], _Case] = field(default_factory=dict)
    _gone: OrderedDict[tuple[str, int, int | None], Finding] = field(default_factory=OrderedDict)

    def look(self, look: Look) -> None:
        found = {rule.code: find(look) for rule, find in CATALOGUE}
        if found[OOM_AHEAD.code] is not None:  # says the same, and more
            found[NEAR_CAPACITY.code] = None
        for rule, _ in CATALOGUE:
            self._weigh(rule, look, found[rule.code])

    def _weigh(self, rule: Rule, look: Look, evidence: Evidence | None) -> None:
        key = (rule.code, look.device)
        case = self._cases.get(key)
        if evidence is None:
            if case is None:
                return
            if case.finding is None:
                del self._cases[key]
                return
            case.missed += 1
            if case.missed >= rule.closes_after:
                self._gone[key[0], key[1], case.since] = replace(case.finding, state="gone")
                if len(self._gone) > GONE_KEPT:
                    self._gone.popitem(last=False)
                del self._cases[key]
            return
        if case is None:
            case = self._cases[key] = _Case(since=look.record.step)
        case.held += 1
        case.missed = 0
        if case.finding is not None or case.held >= rule.opens_after:
            case.finding = Finding(
                code=rule.code,
                severity=rule.severity,
                step=case.since,
                title=evidence.title,
                bytes=evidence.bytes,
                bytes_per_step=evidence.bytes_per_step,
                holder=evidence.holder,
                where=evidence.where,
                remedy=evidence.remedy,
            )

    def findings(self) -> tuple[Finding, ...]:
        """Open ones in the catalogue's order, then those that are gone, newest first."""
        order = {rule.code: at for at, (rule, _) in enumerate(CATALOGUE)}
        cases = sorted(self._cases.items(), key=lambda item: (order[item[0][0]], item[0][1]))
        open_now = [case.finding for _, case in cases if case.finding is not None]
        return (*open_now, *reversed(self._gone.values()))
