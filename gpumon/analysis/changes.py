"""The changes of a run that can be asked about, and what is answered of each: its peak as a span, or why not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
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


@dataclass(frozen=True, slots=True)
class Change:
    """What is asked for; together they are one answer."""

    batch: float = 1.0
    sequence: float = 1.0
    accumulate: int = 1
    checkpointing: bool = False
    bf16: bool = False
    fused: bool = False
    bucket_views: bool = False
    zero: int = 0  # stage
    ranks: int | None = None  # over which; the run's own number where None

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
"""Those of which a screen has room."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One change's peak, or why it cannot be told."""

    change: Change
    peak: Span | None = None
    phase: str | None = None
    why_not: str | None = None
    headroom: int | None = None  # at the expected peak
    fits: bool | None = None  # None: it depends on where in the span it falls, or the room is not known
    notes: tuple[str, ...] = ()
