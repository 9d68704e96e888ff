"""Input and output of a rule: one device of one rank at its newest closed step, and the evidence."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from gpumon.analysis.batches import Outlier
from gpumon.analysis.history import StepPeaks
from gpumon.analysis.leak_identity import Leak
from gpumon.analysis.persistent_conditions import PersistentConditions
from gpumon.analysis.types import Breakdown, Forecast, Growth
from gpumon.session.frame import ModelRecord, RankFrame, StepRecord
from gpumon_agent import wire


class Evidence(msgspec.Struct, frozen=True):
    title: str
    bytes: int | None
    remedy: str
    bytes_per_step: int | None = None
    holder: str | None = None
    where: str | None = None
    subject: str = ""  # distinguishes two findings of one rule on one device
    since: int | None = None  # the first step, if the evidence knows it
    severity: str | None = None  # if it differs from the rule's
    by: wire.Holder | None = None  # `holder` as fields
    so_far: int | None = None  # of a leak: bytes it has grown by; at least the `bytes` that were counted
    at_once: bool = False  # opens the finding at the first look
    source_line: str | None = None  # the text of the line `where`


class Look(msgspec.Struct, frozen=True):
    rank: RankFrame
    device: int
    record: StepRecord
    figures: StepPeaks | None
    forecast: Forecast | None
    lines: Breakdown | Callable[[], Breakdown | None] | None  # the ledger, or a function that computes it
    reading: wire.DeviceReading | None
    capacity: int | None
    our_pids: Collection[int] = ()  # of all watched processes of the session
    usually_above: float | None = None  # lower quartile of this rank's recent peaks
    typical_peak: float | None = None  # their median
    peers_peaks: tuple[float, ...] = ()  # the other ranks' medians
    retries_before: int | None = None  # num_alloc_retries at the previous look
    elsewhere: Mapping[int, str] = msgspec.field(default_factory=dict)
    """pid → label of watched processes on other devices only"""
    growth: tuple[Growth, ...] = ()  # figures of this device
    host_growth: tuple[Growth, ...] = ()  # process and children; only for the rank's first device
    censuses: Sequence[wire.Census] = ()  # oldest first
    leak: Leak | None = None  # what grows, and the holders
    outlier: Outlier | None = None  # the newest one
    standing: PersistentConditions = msgspec.field(default_factory=PersistentConditions)
    tables: Sequence[tuple[ModelRecord, tuple[wire.Module, ...]]] | None = None  # large embeddings, if known

    @property
    def where(self) -> str:
        """ " on cuda:1" if the rank has several devices, else ""."""
        several = len(self.rank.hello.devices) > 1
        return f" on {self.rank.hello.backend}:{self.device}" if several else ""


Found = Evidence | tuple[Evidence, ...] | None
"""A rule's result; a tuple if it holds for several subjects on one device."""

Find = Callable[[Look], Found]


def models(look: Look) -> tuple[ModelRecord, ...]:
    return tuple(r for r in look.rank.models if not r.model.devices or look.device in r.model.devices)
