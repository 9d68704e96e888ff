"""Memory cost of data parallelism: DDP's buckets per device and in total, FSDP's shards and gathered units.

Model. DDP keeps its buckets for its lifetime. With gradient_as_bucket_view the gradients are views of them; without it
the buckets are one more copy, so the setting saves the sum of the buckets on every device. A communication hook's state
(PowerSGD's error and factors) is counted separately. FSDP keeps `shard_bytes` of the parameters per rank and gathers
one unit at a time.
Source. The reducer's own logging data, FSDP's own records (gpumon_agent.attribution.spread).
Cost. A pass over the models of the ranks.
Known limitations. NCCL's own memory is part of the driver's `context`; its size is not reported.
"""

from __future__ import annotations

import msgspec

from gpumon.analysis import units
from gpumon.session.frame import Frame, RankFrame
from gpumon_agent import wire


class Buckets(msgspec.Struct, frozen=True):
    each: int  # bytes on the rank with the most
    together: int
    returned: int  # saved by gradient_as_bucket_view=True on all ranks together; 0 if it is on
    count: int
    smallest: int
    largest: int
    rebuilt: bool
    hook: str | None
    hook_bytes: int  # of its state, on all ranks together
    ranks: int
    copying: tuple[int, ...] = ()  # ranks with a copy of their gradients there, if others have none


class Shards(msgspec.Struct, frozen=True):
    """FSDP's or tensor parallelism's shards, on the rank with the largest."""

    kind: str
    shard: int
    whole: int
    unit: str | None
    unit_bytes: int | None
    world_size: int | None


def of_rank(rank: RankFrame, device: int | None = None) -> int | None:
    """Bytes of one rank's DDP buckets; None without DDP."""
    sizes = [sum(p.bucket_bytes) for p in _parallels(rank, device) if p.kind == "ddp"]
    return sum(sizes) if sizes else None


def buckets(frame: Frame) -> Buckets | None:
    """None without DDP."""
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
    """None if every rank keeps all of its parameters."""
    kept = [p for rank in frame.ranks for p in _parallels(rank) if p.shard_bytes is not None and p.whole_bytes]
    if not kept:
        return None
    most = max(kept, key=lambda p: p.shard_bytes or 0)
    return Shards(
        most.kind, most.shard_bytes or 0, most.whole_bytes or 0, most.unit, most.unit_bytes, most.world_size
    )  # fmt: skip


SHARED = {"zero1": "optimizer state is", "zero2": "optimizer state and reduced gradients are"}
"""What ranks shard although each has all parameters."""


def sentences(frame: Frame) -> tuple[str, ...]:
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
