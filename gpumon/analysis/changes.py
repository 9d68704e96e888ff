"""Changes that save memory: the bytes of each owner they save, and the answers of what-if.

Model. `saves` gives the bytes that a change removes. What-if, the explanation of an out-of-memory and findings all call
it, so a change saves the same everywhere. `gpumon estimate` traces the changed run instead;
tests/analysis/test_changes.py checks that both agree.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class BytesByOwner(msgspec.Struct, frozen=True):
    """Bytes by owner at the moment of the change; 0 if an owner holds none or does not matter."""

    weights: float = 0
    gradients: float = 0
    state: float = 0  # the optimizer's
    temporaries: float = 0  # of the optimizer's step
    activations: float = 0
    slack: float = 0  # reserved and not allocated


FUSED, BUCKET_VIEWS, SET_TO_NONE, BATCH, BF16, EXPANDABLE = (
    "fused", "bucket-views", "set-to-none", "batch", "bf16", "expandable-segments"
)  # fmt: skip

_SAVES: dict[str, Callable[[BytesByOwner], float]] = {
    FUSED: lambda held: held.temporaries,
    BUCKET_VIEWS: lambda held: held.gradients,  # they live in the buckets, once
    SET_TO_NONE: lambda held: held.gradients,
    BATCH: lambda held: held.activations / 2,  # half of it, twice the accumulation steps
    BF16: lambda held: (held.weights + held.gradients + held.state + held.temporaries) / 2,  # of fp32
    EXPANDABLE: lambda held: held.slack,
}

_SHARDED = {1: ("state", "temporaries"), 2: ("state", "temporaries", "gradients")}
_SHARDED[3] = (*_SHARDED[2], "weights")


def saves(change: str, held: BytesByOwner) -> int:
    return round(_SAVES[change](held))


def sharded(held: BytesByOwner, stage: int, ranks: int) -> BytesByOwner:
    """Bytes that ZeRO's stage removes from each owner on each of `ranks`."""
    spared = 1 - 1 / ranks
    return BytesByOwner(**{owner: getattr(held, owner) * spared for owner in _SHARDED[stage]})


class Span(msgspec.Struct, frozen=True):
    """Bytes: at least, expected, at most."""

    low: float
    expected: float
    high: float

    def __add__(self, other: Span | float) -> Span:
        o = other if isinstance(other, Span) else Span(other, other, other)
        return Span(self.low + o.low, self.expected + o.expected, self.high + o.high)

    def times(self, factor: float) -> Span:
        return Span(self.low * factor, self.expected * factor, self.high * factor)


def exactly(count: float) -> Span:
    return Span(count, count, count)


class Change(msgspec.Struct, frozen=True):
    """The changes requested; together they give one answer."""

    batch: float = 1.0
    sequence: float = 1.0
    accumulate: int = 1
    checkpointing: bool = False
    bf16: bool = False
    fused: bool = False
    bucket_views: bool = False
    zero: int = 0  # stage
    ranks: int | None = None  # None: the run's own number

    def name(self) -> str:
        parts = []
        if self.batch != 1:
            parts.append(f"batch × {self.batch:g}")
        if self.sequence != 1:
            parts.append(f"sequence × {self.sequence:g}")
        if self.accumulate > 1:
            parts.append(f"{self.accumulate} micro-batches, same batch")
        parts += [
            text
            for on, text in (
                (self.checkpointing, "activation checkpointing"),
                (self.bf16, "bf16 autocast"),
                (self.fused, "fused optimizer"),
                (self.bucket_views, "gradients as bucket views"),
                (self.zero, f"ZeRO stage {self.zero}" + (f" over {self.ranks}" if self.ranks else "")),
            )
            if on
        ]
        return ", ".join(parts) or "as it is"


USUAL = (
    Change(),
    Change(batch=2),
    Change(batch=0.5),
    Change(sequence=2),
    Change(accumulate=2),
    Change(checkpointing=True),
    Change(bf16=True),
    Change(fused=True),
    Change(bucket_views=True),
    Change(zero=1),
    Change(zero=2),
    Change(zero=3),
)

SHORT = tuple(USUAL[at] for at in (1, 3, 4, 5, 6, 7))
"""Those that fit on a screen."""


class ChangeResult(msgspec.Struct, frozen=True):
    """One change's peak, or why it is unknown."""

    change: Change
    peak: Span | None = None
    phase: str | None = None
    why_not: str | None = None
    headroom: int | None = None  # at the expected peak
    fits: bool | None = None  # None: the limit lies within the span, or is unknown
    notes: tuple[str, ...] = ()
    full_in: int | None = None  # steps until a leak fills the device even so; None: nothing grows
