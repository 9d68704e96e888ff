"""Explains an out-of-memory of a watched process, from its event (live or recorded) or its report on disk.

Figures are exact, the phase is known, and the settings are the process's own. The event names parameters of the
request's size. The report on disk has every parameter's shape, so the optimizer step can be replayed.
Known limitations. With a memory fraction set, the OOM observer gets that limit instead of the device's total. With
cudaMallocAsync PyTorch calls no observer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from gpumon.analysis.diagnosis.cause import LeakEvidence, PredictedPeak
from gpumon.analysis.diagnosis.changed import changed
from gpumon.analysis.diagnosis.context import Settings
from gpumon.analysis.diagnosis.explaining import Known, explain
from gpumon.analysis.diagnosis.figures import Figure, known
from gpumon.analysis.diagnosis.log import Story
from gpumon.analysis.diagnosis.message_parser import OomMessage
from gpumon.analysis.diagnosis.oom_report import Candidate, OomReport
from gpumon.analysis.diagnosis.optimizer_step import FOREACH, FUSED, LOOP, RECIPES
from gpumon.analysis.estimate.model import Tensor
from gpumon.analysis.ledger import at_failure, device_of, owned, reading_of
from gpumon.analysis.types import Finding, GrownByHolder
from gpumon.session.frame import RankFrame
from gpumon_agent import wire
from gpumon_agent.oom.report_file import Report

MORE = "The report on the trainer's disk has every parameter's shape: gpumon explain --last, on that machine."


def of_rank(
    rank: RankFrame, growth: LeakEvidence | None = None, kept: Sequence[Finding] = (), held: GrownByHolder | None = None
) -> OomReport | None:
    """The newest out-of-memory of a rank. `growth`: bytes per step, if there is a trend; `kept`: findings on memory
    kept for no use, with holders; `held`: the bytes of it that still grow."""
    event = rank.oom
    if event is None:
        return None
    hello = rank.hello
    described = device_of(rank, event.device)
    total = described.total_bytes if described is not None else None
    message = replace(
        _message(event, total, hello.backend),
        others=_others(rank, event.device),
    )
    report = explain(
        Story(message, phase=event.phase),
        Known(
            settings=_settings(hello.settings, rank),
            growth=growth,
            kept=tuple(kept),
            foreseen=_foreseen(rank, event),
        ),
    )
    newest = _newest_ledger(rank, event.device)
    suspects = tuple(
        Candidate(Tensor(each.path, each.shape, each.width, each.trainable), "a copy", event.phase, _bytes(each))
        for each in event.same_size
    )
    return replace(
        report,
        step=event.step,
        module=event.module,
        where=event.where,
        code=event.source_line,
        reasons=(*changed(rank, event, kept), *report.reasons),
        suspects=(*suspects, *_buckets(rank, message, event.phase)),
        notes=(*report.notes, MORE) if event.report is not None else report.notes,
        lines=at_failure(event, owned(newest) if newest is not None else {}, total, held),
        file=event.report,
    )


def of_file(report: Report, file: str | None = None, watched: OomReport | None = None) -> OomReport:
    """From a report on the trainer's disk. `watched`: the recording's explanation of the same failure, with growth and
    holders; the report adds every parameter's shape.
    """
    event = wire.Oom(
        report.step, report.phase, report.device, 0, report.requested, report.total, report.free, report.allocated,
        report.reserved, report.message,
    )  # fmt: skip
    tensors = tuple(Tensor(name, p.shape, p.width, p.trainable, group=p.group) for name, p in report.parameters.items())
    whole = explain(
        Story(_message(event, report.device_total, report.backend), phase=report.phase),
        Known(
            tensors=tensors,
            optimizer=_optimizer(report),
            later=_stepped_before(report),
            settings=replace(
                Settings.read(report.settings), fused=any(each.fused for each in report.optimizers) or None
            ),
        ),
    )
    if watched is not None and watched.step == report.step and watched.device == report.device:
        return replace(
            watched,
            suspects=whole.suspects or watched.suspects,
            assumptions=whole.assumptions,
            notes=tuple(note for note in dict.fromkeys((*watched.notes, *whole.notes)) if note != MORE),
            file=file,
        )
    return replace(
        whole,
        step=report.step,
        module=report.module,
        where=report.where,
        code=report.source_line,
        lines=at_failure(event, report.ledger, report.device_total),
        file=file,
    )


def _foreseen(rank: RankFrame, event: wire.Oom) -> PredictedPeak | None:
    """The forecast for this batch on this device."""
    if event.phase not in (wire.FORWARD, wire.BACKWARD):
        return None
    said = next((each for each in rank.outlooks if (each.device, each.step) == (event.device, event.step)), None)
    return None if said is None else PredictedPeak(said.next_peak, said.low, said.input_shapes)


def _message(event: wire.Oom, total: int | None, backend: str) -> OomMessage:
    whole = total or event.total
    limited = event.total is not None and whole is not None and event.total < whole
    return OomMessage(
        text=event.message,
        kind="allocator",
        backend=backend or "cuda",
        device=event.device,
        requested=known(event.requested),
        total=_known(whole),
        free=_known(event.free),
        allocated=_known(event.allocated),
        reserved=_known(event.reserved),
        allowed=_known(event.total) if limited else None,
        new=True,
    )


def _known(count: int | None) -> Figure | None:
    return None if count is None else known(count)


def _others(rank: RankFrame, device: int) -> tuple[tuple[int, Figure], ...]:
    """Other processes on the device, from the newest host reading."""
    described = device_of(rank, device)
    reading = reading_of(rank.host, described.uuid if described is not None else None)
    if reading is None or reading.processes is None or all(p.pid != rank.hello.pid for p in reading.processes):
        return ()  # in a container the driver's pids differ from ours: the owners are unknown
    return tuple((p.pid, known(p.bytes)) for p in reading.processes if p.pid != rank.hello.pid and p.bytes)


def _settings(environment: dict[str, str], rank: RankFrame) -> Settings:
    optimizers = [o for record in rank.models for o in record.model.optimizers]
    parallel = [record.model.parallel for record in rank.models if record.model.parallel is not None]
    views = [each.gradient_as_bucket_view for each in parallel if each.kind == "ddp"]
    return replace(
        Settings.read(environment),
        fused=any(o.fused for o in optimizers) or None,
        bucket_views=views[0] if views else None,
    )


def _buckets(rank: RankFrame, message: OomMessage, phase: str) -> Iterator[Candidate]:
    """DDP allocates its gradient buckets when it is constructed, and again in its second forward."""
    if phase not in (wire.LOAD, wire.FORWARD):
        return
    for record in rank.models:
        parallel = record.model.parallel
        if parallel is not None and parallel.kind == "ddp":
            width = max(1, record.model.trainable_bytes // max(1, record.model.trainable))
            for at, count in enumerate(parallel.bucket_bytes):
                if message.may_be(count):
                    bucket = Tensor(f"DDP's bucket {at}", (count // width,), width, False)
                    yield Candidate(bucket, "a bucket of gradients", phase, count)


def _optimizer(report: Report) -> str | None:
    """The value for `--optimizer`; None if the optimizer's step is not modelled."""
    if len(report.optimizers) != 1:
        return None
    (optimizer,) = report.optimizers
    name = optimizer.kind.lower()
    if name == "sgd" and optimizer.settings.get("momentum", "0") not in ("0", "0.0", "None"):
        name = "momentum"
    recipe = RECIPES.get(name)
    if recipe is None:
        return None
    way = FUSED if optimizer.fused else FOREACH if optimizer.foreach else LOOP
    return f"{name}:{way}" if way in recipe.ways else name


def _stepped_before(report: Report) -> bool | None:
    """Whether optimizer state existed at the newest boundary; it may come from a checkpoint."""
    state = report.ledger.get("optimizer")
    return report.step > 0 or None if state is None else state > 0


def _newest_ledger(rank: RankFrame, device: int) -> wire.Ledger | None:
    records = [*([rank.open_step] if rank.open_step is not None else []), *reversed(rank.steps)]
    every = (each for record in records for each in reversed(record.ledgers))
    return next((each for each in every if each.device == device and not each.peak), None)


def _bytes(each: wire.Sized) -> int:
    count = each.width
    for size in each.shape:
        count *= size
    return count
