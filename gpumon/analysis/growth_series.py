"""The series of one rank that are tested for growth: per device at the end of every step, per host reading.

Cost. See gpumon.analysis.growth; four figures per device, one per process.
Known limitations. A host reading is assigned to the newest step at its arrival, not to the step it was taken in.
"""

from __future__ import annotations

from collections import deque

from gpumon.analysis.growth import BLOCKS, BYTES, RESIDENT, SETTLING_STEPS, SLACK, WORKER, Follower
from gpumon.analysis.types import Growth
from gpumon.session.frame import RankFrame, StepRecord
from gpumon_agent import wire

WARMING_READINGS = 30
"""A child's first readings are ignored: a DataLoader worker imports, decodes its first images and fills its queue."""

NAMED = tuple(line for line in wire.LASTING if line != "other_models")
"""Owners that may legitimately grow for a while, such as when parameters are first trained. Not other models, of which
a script may keep ever more, nor `variables`: a list that is appended to is one."""

GROWING_RIGHTLY = tuple(name for name in NAMED if name != "buffers")
"""A buffer that is concatenated to is a leak like any other."""

PINNED = "pinned"
"""Explains part of the process's growth; not a leak by itself."""

LASTING = ("allocated", "unexplained")
"""Figures whose growth uses up the device."""


class DeviceGrowth:
    def __init__(self) -> None:
        self.allocated = Follower("allocated", BYTES, self._owned_since)
        self.blocks = Follower("blocks", BLOCKS)
        self.unexplained = Follower("unexplained", BYTES)
        self.slack = Follower("slack", SLACK)
        self._owned: deque[tuple[int, int]] = deque(maxlen=64)  # (step, bytes) at each change
        self._all = (self.allocated, self.blocks, self.unexplained, self.slack)
        self._stated: tuple[Growth, ...] = ()
        self._stated_of: tuple[int, ...] = ()  # each figure's `changed` then
        self._waiting: list[tuple[int, int, int | None, int | None, int | None]] = []  # observed, not yet followed

    def observe(self, record: StepRecord, end: wire.Phase, owners: wire.Ledger | None, highest: int) -> None:
        """One closed step. `end`: its last sample; `owners`: the ledger read there; `highest`: its peak."""
        if record.step < SETTLING_STEPS or end.phase != wire.OPTIMIZER:
            return
        step = record.step
        size = (record.closed.input_bytes or 0) if record.closed is not None else 0
        if owners is not None and owners.weights is not None:
            self._own(step, owners, size)
        if record.closed is not None:
            self._waiting += [
                (each.step, size, each.allocated, each.allocations, None)
                for each in record.closed.quiet_ends
                if each.device == end.device
            ]
        allocated, reserved = end.allocated, end.reserved
        slack = None if allocated is None or reserved is None else reserved - max(allocated, highest)
        self._waiting.append((step, size, allocated, end.allocations, slack))

    def _take(self) -> None:
        """Processes the collected steps: several at once cost less than one by one."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        steps, sizes, *figures = zip(*waiting, strict=True)
        for follower, values in zip((self.allocated, self.blocks, self.slack), figures, strict=True):
            if None not in values:
                follower.extend(steps, values, sizes)
                continue
            for step, value, size in zip(steps, values, sizes, strict=True):
                if value is not None:
                    follower.observe(step, value, size)

    def _own(self, step: int, owners: wire.Ledger, size: int) -> None:
        owned = sum(getattr(owners, name) or 0 for name in NAMED)
        rightly = sum(getattr(owners, name) or 0 for name in GROWING_RIGHTLY)
        if not self._owned or self._owned[-1][1] != rightly:
            self._take()  # earlier steps are judged with the owners of their time
            self._owned.append((step, rightly))
        if owners.requested is not None:
            self.unexplained.observe(step, owners.requested - owned, size)

    def _owned_since(self, step: int) -> int:
        """Growth of the owners' bytes since a step."""
        if not self._owned:
            return 0
        before = self._owned[0][1]
        for at, owned in self._owned:
            if at > step:
                break
            before = owned
        return self._owned[-1][1] - before

    def kept(self) -> Growth | None:
        """The growth that uses up the device; None if there is none."""
        grown = {each.figure: each for each in self.growth() if each.growing and each.per_step and each.per_step > 0}
        return next((grown[figure] for figure in LASTING if figure in grown), None)

    def growth(self) -> tuple[Growth, ...]:
        self._take()
        first, second, third, fourth = self._all
        changed = first.changed, second.changed, third.changed, fourth.changed
        if changed != self._stated_of:
            self._stated = tuple([figure.growth() for figure in self._all if figure.known])
            self._stated_of = changed
        return self._stated


class HostGrowth:
    """Follows the resident memory of one rank's process and its children, and torch's pinned memory."""

    def __init__(self) -> None:
        self._own = Follower("rss", RESIDENT)
        self._pinned = Follower(PINNED, RESIDENT)
        self._children: dict[int, Follower] = {}
        self._warming: dict[int, int] = {}  # child → readings left out so far
        self.names: dict[str, str] = {}  # figure → the child's name
        self._heartbeat: wire.Heartbeat | None = None
        self._read_unix_ns = 0

    def observe(self, rank: RankFrame) -> None:
        """Takes what is new since the previous frame."""
        newest = rank.steps[-1].step if rank.steps else 0
        beat = rank.heartbeat
        has_size = beat is not None and beat.rss is not None
        if beat is not None and beat is not self._heartbeat:
            known, self._heartbeat = self._heartbeat, beat
            after = known.t_ns if known is not None else -1
            for each in rank.heartbeats or (beat,):
                if each.t_ns > after:
                    self._take(each)
        if rank.host_unix_ns is None or rank.host is None or rank.host_unix_ns == self._read_unix_ns:
            return
        self._read_unix_ns = rank.host_unix_ns
        ours = next((p for p in rank.host.processes if p.pid == rank.hello.pid), None)
        if ours is None or newest < SETTLING_STEPS:
            return
        if not has_size and ours.rss is not None:
            self._own.observe(newest, ours.rss)
        self._read_children(ours, newest)

    def again(self, rank: RankFrame) -> None:
        """Relearns the process's growth from the stored heartbeats, as a new viewer would."""
        self._own, self._pinned, self._heartbeat = Follower("rss", RESIDENT), Follower(PINNED, RESIDENT), None
        self.observe(rank)

    def _take(self, beat: wire.Heartbeat) -> None:
        if beat.rss is None or beat.step < SETTLING_STEPS:
            return
        self._own.observe(beat.step, beat.rss)
        if beat.pinned or self._pinned.known:
            self._pinned.observe(beat.step, beat.pinned or 0)

    def _read_children(self, ours: wire.ProcessReading, step: int) -> None:
        alive = {child.pid: child for child in ours.children if child.rss is not None}
        for pid in self._children.keys() - alive.keys():
            del self._children[pid]
            self.names.pop(f"worker {pid}", None)
        self._warming = {pid: self._warming.get(pid, 0) + 1 for pid in alive}
        for pid, child in alive.items():
            if self._warming[pid] <= WARMING_READINGS:
                continue
            follower = self._children.get(pid)
            if follower is None:
                follower = self._children[pid] = Follower(f"worker {pid}", WORKER)
                self.names[follower.figure] = child.name
            follower.observe(step, child.rss or 0)

    def growth(self) -> tuple[Growth, ...]:
        """The process, its pinned memory, then each child."""
        if not self._children and not self._pinned.known:
            return (self._own.growth(),) if self._own.known else ()
        return tuple(f.growth() for f in (self._own, self._pinned, *self._children.values()) if f.known)
