"""What spreading a model over ranks costs: DDP's buckets on every device and together, what FSDP keeps and gathers.

Model. DDP keeps its buckets as long as it lives; with gradient_as_bucket_view the gradients are views of them, without
it they are one more copy, so what the setting returns is the sum of the buckets, on every device. A communication
hook's state (PowerSGD's error and factors) is counted beside them. FSDP keeps `shard_bytes` of the parameters a rank
and gathers a unit at a time.
Source. The reducer's own logging data, FSDP's own records (gpumon_agent.attribution.spread).
Cost. A pass over the models of the ranks.
Known limitations. What NCCL itself takes comes from the driver and is a part of `context`: nobody tells how much.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumon.analysis import units
from gpumon.session.frame import Frame, RankFrame
from gpumon_agent import wire


@dataclass(frozen=True, slots=True)
class Buckets:
    """DDP's over all ranks that were heard."""

    each: int  # bytes a rank, of the one that has most
    together: int
    returned: int  # what gradient_as_bucket_view=True would return on all ranks together; 0 where it is on
    count: int
    smallest: int
    largest: int
    rebuilt: bool
    hook: str | None
    hook_bytes: int  # of its state, together
    ranks: int
    copying: tuple[int, ...] = ()  # ranks that keep a copy of their gradients there, where others do not


@dataclass(frozen=True, slots=True)
class Shards:
    """FSDP's or tensor parallelism's, of the rank that keeps most."""

    kind: str
    shard: int
    whole: int
    unit: str | None
    unit_bytes: int | None
    world_size: int | None


def of_rank(rank: RankFrame, device: int | None = None) -> int | None:
    """Bytes of the buckets that one rank keeps; None where no model is spread by DDP."""
    sizes = [sum(p.bucket_bytes) for p in _parallels(rank, device) if p.kind == "ddp"]
    return sum(sizes) if sizes else None


def buckets(frame: Frame) -> Buckets | None:
    """None where no rank trains under DDP."""
    found = [(rank, [p for p in _parallels(rank) if p.kind == "ddp"]) for rank in frame.ranks if rank.status != "ended"]
    known = [(rank, parallels) for rank, parallels in found if parallels]
    spread = [parallels for _, parallels in known]
    if not spread:
        return None
    each = [sum(sum(p.bucket_bytes) for p in parallels) for parallels in spread]
    copies = [sum(sum(p.bucket_bytes) for p in ps if p.gradient_as_bucket_view is False) for ps in spread]
    copying = [rank.hello.rank for (rank, _), copied in zip(known, copies, strict=True) if copied]
    every = [size for p in spread[0] for size in p.bucket_bytes]
    return Buckets(
        each=max(each),
        together=sum(each),
        returned=sum(copies),
        count=len(every),
        smallest=min(every, default=0),
        largest=max(every, default=0),
        rebuilt=all(p.rebuilt for p in spread[0]),
        hook=next((p.comm_hook for p in spread[0] if p.comm_hook), None),
        hook_bytes=sum(p.comm_hook_bytes or 0 for parallels in spread for p in parallels),
        ranks=len(spread),
        copying=tuple(n for n in copying if n is not None) if len(copying) < len(known) else (),
    )


def shards(frame: Frame) -> Shards | None:
    """None where no rank keeps a part of its parameters only."""
    kept = [p for rank in frame.ranks for p in _parallels(rank) if p.shard_bytes is not None and p.whole_bytes]
    if not kept:
        return None
    most = max(kept, key=lambda p: p.shard_bytes or 0)
    return Shards(
        most.kind, most.shard_bytes or 0, most.whole_bytes or 0, most.unit, most.unit_bytes, most.world_size
    )  # fmt: skip


SHARED = {"zero1": "optimizer state is", "zero2": "optimizer state and reduced gradients are"}
"""What ranks keep a part of only, where each has all parameters."""


def sentences(frame: Frame) -> tuple[str, ...]:
    """What a person should know of it, shortest first."""
    said: list[str] = []
    held = buckets(frame)
    if held is not None and held.each:
        plural = "s" if held.count != 1 else ""
        sizes = units.size(held.smallest)
        if held.largest != held.smallest:
            sizes += f" to {units.size(held.largest)}"
        if not held.rebuilt:
            sizes += ", not yet rebuilt"
        said.append(
            f"DDP: {held.count} bucket{plural} of {sizes}, "
            f"{units.size(held.each)} a rank, {units.size(held.together)} on {held.ranks} together"
        )
        where = f" on rank{'s' * (len(held.copying) > 1)} {units.ranges(held.copying)}" if held.copying else ""
        said.append(
            f"gradient_as_bucket_view=True would return {units.size(held.returned)}{where}"
            if held.returned
            else "gradients are views of the buckets: no copy"
        )
        if held.hook:
            kept = f", whose state keeps {units.size(held.hook_bytes)} together" if held.hook_bytes else ""
            said.append(f"communication hook {held.hook}{kept}")
    for kind, what in SHARED.items():
        sharing = next((p for rank in frame.ranks for p in _parallels(rank) if p.kind == kind), None)
        if sharing is not None:
            among = f"over {sharing.world_size} ranks" if sharing.world_size else "over the ranks"
            said.append(f"{kind.replace('zero', 'ZeRO ')}: {what} spread {among}, parameters are whole on each")
    parts = shards(frame)
    if parts is not None:
        name = {"fsdp1": "FSDP1", "fsdp2": "FSDP2", "tensor_parallel": "tensor parallel", "zero3": "ZeRO 3"}.get(
            parts.kind, parts.kind
        )
        said.append(f"{name}: {units.size(parts.shard)} a rank of {units.size(parts.whole)} of parameters")
        if parts.unit_bytes:
            said.append(f"the largest unit, {parts.unit or 'the root'}, gathers {units.size(parts.unit_bytes)} at once")
    return tuple(said)


def _parallels(rank: RankFrame, device: int | None = None) -> list[wire.Parallel]:
    return [
        record.model.parallel
        for record in rank.models
        if record.model.parallel is not None
        and (device is None or not record.model.devices or device in record.model.devices)
    ]
