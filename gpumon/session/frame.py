"""The frozen state of a session, for analysis and screens.

A `Frame` is taken a few times a second and never changes. It shares its `StepRecord`s with the store and with
earlier frames: a closed step is one immutable object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from gpumon_agent import wire

Status = Literal["live", "silent", "ended"]
"""live: recent events; silent: none for `SILENT_AFTER_NS`, the process may be stopped; ended: Goodbye."""

SILENT_AFTER_NS = 5_000_000_000


class StepRecord(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One iteration of one rank. `closed` is None while it is running (only in `RankFrame.open_step`).

    Not tracked by the garbage collector: it contains messages, and thousands are kept.
    """

    step: int
    closed: wire.Step | None
    phases: tuple[wire.Phase, ...]  # in order of time, all devices
    ledgers: tuple[wire.Ledger, ...] = ()
    replayed: bool = False
    whole: bool = True  # False: events of this step were lost (a gap in the numbers)
    alone: int | None = None  # the device of all phases, if there is only one: cached, since every step needs it
    highest: int = -1  # peak of allocated there, of its own phases; -1: unknown

    def on(self, device: int) -> tuple[wire.Phase, ...]:
        if self.alone == device:
            return self.phases
        return tuple([phase for phase in self.phases if phase.device == device])

    def peak(self, device: int) -> int | None:
        """The highest allocated peak on a device, of this step and the quiet ones before it; None if none was read."""
        highest = self.highest
        if self.alone != device:
            tallest = wire.tallest(self.on(device))
            highest = -1 if tallest is None or tallest.allocated_peak is None else tallest.allocated_peak
        if self.closed is not None and self.closed.quiet_peaks:
            highest = max(highest, wire.quiet_peak(self.closed, device))
        return highest if highest >= 0 else None

    def devices(self) -> set[int]:
        return {phase.device for phase in self.phases} if self.alone is None else {self.alone}


class ModelRecord(msgspec.Struct, frozen=True):
    """A model's newest revision; `modules` may still be arriving (fewer than `model.modules`)."""

    model: wire.Model
    modules: tuple[wire.Module, ...]


class LayersRecord(msgspec.Struct, frozen=True):
    """What a model's modules keep on one device, in the newest step with complete `Layers`."""

    model: int
    device: int
    step: int
    layers: tuple[wire.Layer, ...]
    elsewhere: int | None = None  # activations of no module of the model


class SegmentsRecord(msgspec.Struct, frozen=True):
    """One device's allocator, block by block: the newest complete reading."""

    device: int
    number: int
    step: int
    phase: str
    t_ns: int
    reason: str
    segments: tuple[wire.Segment, ...]
    spent_ns: int | None = None  # of the training thread's time
    holders: tuple[wire.Holder, ...] = ()  # variables, by number of the blocks' owners
    walked: bool | None = None  # autograd's graph was read with the owners


class HostSample(msgspec.Struct, frozen=True):
    """One reading of a machine and when it arrived (receiver's clock)."""

    unix_ns: int
    host: wire.Host


class RankFrame(msgspec.Struct, frozen=True):
    """One training process."""

    source: str
    hello: wire.Hello
    models: tuple[ModelRecord, ...]
    steps: Sequence[StepRecord]  # closed ones, oldest first, without gaps; never changed
    open_step: StepRecord | None
    heartbeat: wire.Heartbeat | None
    heard_unix_ns: int  # receiver's clock, of the last event of any kind
    status: Status
    synced: bool  # the snapshot is complete
    lost_events: int = 0
    oom: wire.Oom | None = None  # the newest
    notices: tuple[wire.Notice, ...] = ()
    goodbye: wire.Goodbye | None = None
    host: wire.Host | None = None  # newest reading of the machine this rank runs on
    host_unix_ns: int | None = None
    host_samples: tuple[HostSample, ...] = ()  # readings of the last minutes, oldest first, including the newest
    layers: tuple[LayersRecord, ...] = ()  # one per model and device, in that order
    outlooks: tuple[wire.Outlook, ...] = ()  # the newest of each device, by device
    census: wire.Census | None = None  # the newest
    checkpoints: tuple[wire.Checkpoint, ...] = ()  # by load and device
    segments: tuple[SegmentsRecord, ...] = ()  # one a device
    snapshot: wire.Snapshot | None = None  # the newest
    censuses: tuple[wire.Census, ...] = ()  # the newest ones, oldest first
    older: Sequence[StepRecord] = ()  # steps before `steps` that the thinning kept (wire.thinning)
    heartbeats: tuple[wire.Heartbeat, ...] = ()  # the kept ones, oldest first, including the newest
    thinned: wire.Thinned | None = None  # the rule; None: none dropped yet
    progress: wire.Progress | None = None  # the newest; None: nothing tells
    lost_link: str | None = None  # why its machine cannot be heard; None: it can, or the rank has ended
    trackers: wire.Trackers | None = None  # experiment trackers that the process uses; None: none seen

    @property
    def label(self) -> str:
        return f"rank {self.hello.rank}" if self.hello.rank is not None else f"pid {self.hello.pid}"

    @property
    def lost_link_said(self) -> str:
        """As a sentence; empty if its machine is heard."""
        return "" if self.lost_link is None else f"link to {self.hello.host} lost, trying again"

    def unix_ns(self, t_ns: int) -> int:
        """A time of the agent's monotonic clock as unix time."""
        return self.hello.clock.unix_ns + (t_ns - self.hello.clock.monotonic_ns)


class Frame(msgspec.Struct, frozen=True):
    """Everything known at one moment, ranks in order of rank, then pid."""

    unix_ns: int
    ranks: tuple[RankFrame, ...]
    hosts: tuple[wire.Host, ...] = ()
    replaying: bool = False  # from a recording
