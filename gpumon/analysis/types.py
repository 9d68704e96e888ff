"""Types shared by all of analysis: the ledger's lines, in which measured, estimated and forecast bytes are stated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from gpumon_agent import wire

OWNERS = (
    "weights",
    "buffers",
    "gradients",
    "optimizer",
    "buckets",
    "inputs",
    "activations",
    "temporaries",
    "workspaces",
    "checkpoints",
    "other_models",
    "variables",
)
"""Lines that name an owner."""

REST = ("unexplained", "unattributed", "rounding", "slack")
"""Lines between the owners and `reserved`."""

DRIVER = ("context", "other_processes", "free")
"""Lines between `reserved` and the device's total."""


class Breakdown(msgspec.Struct, frozen=True):
    """Bytes by line; None: not known.

    allocated = owners + unexplained (or unattributed, on unsampled steps) + rounding
    reserved  = allocated + slack
    total     = reserved + context + other_processes + free
    """

    weights: int | None = None
    buffers: int | None = None
    gradients: int | None = None
    optimizer: int | None = None
    buckets: int | None = None
    inputs: int | None = None
    activations: int | None = None
    temporaries: int | None = None
    workspaces: int | None = None
    checkpoints: int | None = None
    other_models: int | None = None
    variables: int | None = None
    unexplained: int | None = None
    unattributed: int | None = None
    rounding: int | None = None
    slack: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    context: int | None = None
    other_processes: int | None = None
    free: int | None = None
    total: int | None = None

    @property
    def left_over(self) -> str | None:
        """The line of bytes without an owner; None if neither is known."""
        if self.unexplained is not None:
            return "unexplained"
        return "unattributed" if self.unattributed is not None else None

    def known(self) -> tuple[tuple[str, int], ...]:
        """(line, bytes) of every known line that is not zero, in the ledger's order."""
        return tuple((name, value) for name in self.__struct_fields__ if (value := getattr(self, name)))


class Peak(msgspec.Struct, frozen=True, gc=False):
    """A step's peak: where it was, and on sampled steps its breakdown (`lines`)."""

    step: int
    phase: str | None  # None: the step was read only at its end; any phase may have peaked
    index: int
    allocated: int
    lines: Breakdown | None = None
    module: str | None = None


class HighestStep(msgspec.Struct, frozen=True):
    """The highest peak of all steps seen, and the first step with it."""

    step: int
    allocated: int


class Estimate(msgspec.Struct, frozen=True):
    """What a step should need by closed form. `sources` says per line: exact, learnt, measured."""

    lines: Breakdown
    peak: int | None
    peak_phase: str | None
    sources: tuple[tuple[str, str], ...] = ()
    phases: tuple[tuple[str, int], ...] = ()  # phase, its peak


class Forecast(msgspec.Struct, frozen=True, gc=False):
    """The next iteration's peak of allocated bytes with a 95 % interval, compared with the available bytes."""

    next_peak: int
    low: int
    high: int
    phase: str  # in which the peak is expected
    headroom: int | None  # bytes above `next_peak` before an allocation fails; None without a device total
    p_oom: float | None
    steps_to_oom: int | None  # None: no trend upwards
    max_batch_factor: float | None  # largest batch, as a multiple of the present one, that still fits
    learnt_from: int  # iterations
    bytes_per_step: int | None = None  # growth of the peak; None: no growth
    growth: str | None = None  # `KEPT`: bytes stay from step to step; `BATCH`: steps need more
    highest: int = 0  # peak before the steps it was learnt from: that much fitted
    steps_to_oom_low: int | None = None  # the 95 % interval of `steps_to_oom`
    steps_to_oom_high: int | None = None  # None although `steps_to_oom` is set: possibly never
    verdict: str | None = None  # fits, tight or oom-ahead (shape_model.verdict); None: headroom is unknown
    headroom_at_most: bool = False  # without a driver reading, `headroom` assumes the whole device


KEPT = "kept"
"""`Forecast.growth` of a leak: bytes stay allocated from step to step."""

BATCH = "batch"
"""`Forecast.growth` of batches that get larger step by step."""

SEVERITIES = ("info", "warning", "critical")


class Finding(msgspec.Struct, frozen=True):
    code: str
    severity: str
    step: int | None  # its first step; None: not in the run's history
    title: str
    bytes: int | None = None
    bytes_per_step: int | None = None
    holder: str | None = None
    where: str | None = None  # file.py:LINE
    remedy: str = ""
    state: str = "open"  # open | gone
    subject: str = ""  # distinguishes two findings of one code
    by: wire.Holder | None = None  # `holder` as fields
    so_far: int | None = None  # bytes it has grown by until now; `bytes` were counted, perhaps steps ago
    source_line: str | None = None  # the text of the line `where`

    @property
    def key(self) -> tuple[str, str, str | None, str | None]:
        """What distinguishes it from the run's other findings while its figures change."""
        return self.code, self.subject, self.holder, self.where


NEARLY_ALL = 0.75


class GrownByHolder(msgspec.Struct, frozen=True):
    """Growing bytes that a census found, by holder: part of the line `variables`.

    They were counted at one step; at other steps they are scaled by the steps of growth. A census takes several steps,
    the more the busier the machine, and misses what is added meanwhile: if it found `NEARLY_ALL` of what had grown when
    it began, all of the growth counts.
    """

    since: int
    parts: tuple[tuple[wire.Holder, int, int, int], ...]  # most bytes first: holder, bytes, steps of the census
    per_step: float = 0.0  # growth of the device's bytes

    def at(self, step: int) -> int:
        steps = max(0, step - self.since + 1)
        found = sum(nbytes * steps // max(1, ended - self.since + 1) for _, nbytes, _, ended in self.parts)
        at_most = sum(nbytes * steps // max(1, began - self.since + 1) for _, nbytes, began, _ in self.parts)
        grown = round(self.per_step * steps)
        return grown if NEARLY_ALL * grown <= at_most and found < grown else found

    @property
    def by(self) -> tuple[wire.Holder, ...]:
        return tuple(holder for holder, *_ in self.parts)


class Read(msgspec.Struct, frozen=True):
    """The newest step whose owners were read. It may be older than the newest step: fast steps are sampled."""

    step: int
    lines: Breakdown  # at its end
    hidden: tuple[str, ...] = ()  # names of holders whose bytes cannot be read: part of `unexplained`
    held_by: tuple[wire.Holder, ...] = ()  # the variables behind the line `variables`, largest first


class Growth(msgspec.Struct, frozen=True):
    """Trend of one figure, sampled at every step's end: the evidence of a leak, or of none.

    `figure`: allocated, blocks (live ones, a count), unexplained, slack (reserved without allocated), rss, pinned (of
    the host, by torch), or "worker PID" (of a child process). `so_far`, `per_step`, `low` and `high` are in the
    figure's own unit.
    """

    figure: str
    growing: bool = False
    since: int | None = None  # first step of growth; None: no growth
    per_step: float | None = None  # with its 95 % interval
    low: float | None = None
    high: float | None = None
    so_far: int | None = None  # increase since `since`
    points: tuple[tuple[int, int], ...] = ()  # (step, value), oldest first, thinned: for a plot
