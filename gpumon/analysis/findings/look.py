"""What a rule sees, and what it answers: one device of one rank at its newest closed step, and evidence or none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gpumon.analysis.batches import Outlier
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.leak_identity import Leak
from gpumon.analysis.persistent_conditions import PersistentConditions
from gpumon.analysis.types import Breakdown, Forecast, Growth
from gpumon.session.frame import ModelRecord, RankFrame, StepRecord
from gpumon_agent import wire


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
    since: int | None = None  # the step it began with, where the evidence itself tells
    severity: str | None = None  # where it is another than the rule's
    by: wire.Holder | None = None  # `holder`, in fields
    at_once: bool = False  # it cannot wait for another look


@dataclass(slots=True)  # one is made for each step of each rank, and a frozen one takes twice as long
class Look:
    """One device of one rank at its newest closed step: all that rules see."""

    rank: RankFrame
    device: int
    record: StepRecord
    figures: StepPeaks | None
    forecast: Forecast | None
    lines: Breakdown | Callable[[], Breakdown | None] | None  # the ledger, or how it is made
    reading: wire.DeviceReading | None
    capacity: int | None
    our_pids: Collection[int] = ()  # every watched process of the session
    usually_above: float | None = None  # what three of four of this rank's recent peaks are above
    typical_peak: float | None = None  # the median of this rank's recent peaks
    peers_peaks: tuple[float, ...] = ()  # the medians of the other ranks of its job
    retries_before: int | None = None  # num_alloc_retries at the look before
    elsewhere: Mapping[int, str] = field(default_factory=dict)  # pid → label of watched processes on other devices only
    growth: tuple[Growth, ...] = ()  # of this device's figures
    host_growth: tuple[Growth, ...] = ()  # of the process and its children; with its first device only
    censuses: Sequence[wire.Census] = ()  # the newest last
    leak: Leak | None = None  # what grows of it, and who holds that
    outlier: Outlier | None = None  # the newest batch that stood out
    standing: PersistentConditions = field(default_factory=PersistentConditions)
    tables: Sequence[tuple[ModelRecord, tuple[wire.Module, ...]]] | None = None  # large embeddings, if known

    @property
    def where(self) -> str:
        """ " on cuda:1", where a rank has more than one device."""
        several = len(self.rank.hello.devices) > 1
        return f" on {self.rank.hello.backend}:{self.device}" if several else ""


Found = Evidence | tuple[Evidence, ...] | None
"""What a rule answers: several, where it holds of several subjects on one device."""

Find = Callable[[Look], Found]


def models(look: Look) -> tuple[ModelRecord, ...]:
    return tuple(r for r in look.rank.models if not r.model.devices or look.device in r.model.devices)
