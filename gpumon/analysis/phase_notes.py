"""What a phase's flags say, in words."""

from __future__ import annotations

from gpumon_agent import wire

_WORDS = (
    (wire.ABORTED, "aborted by an exception"),
    (wire.OVERLAPPED, "threads overlap"),
    (wire.BOUND, "peak at most"),
    (wire.RECOMPUTED, "recomputed"),
    (wire.SKIPPED, "skipped"),
    (wire.INFERRED, "inferred"),
    (wire.MERGED, "merged"),
)


def notes(flags: int) -> str:
    """ "aborted by an exception, recomputed"; "" for the usual phase."""
    return ", ".join(word for flag, word in _WORDS if flags & flag)
