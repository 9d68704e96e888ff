"""Does a peak fit? The one answer, for the agent's outlook of a batch and for the viewer's forecast of a step.

Model. The process can have `room`: what it has reserved and what the device has free. Of that, the bytes in `Fragments`
cannot be used at a peak. A peak as high as one that fitted before fits again. Cost: a few comparisons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from gpumon_agent import wire
from gpumon_agent.wire import FITS, OOM_AHEAD, TIGHT

TIGHT_SHARE = 0.05
"""Share of the room. With less than this left above the interval it is tight."""
COMPACT_STEPS = 200
"""Steps after a retry for which the allocator's cache is known to hold no free segments."""
_SLACK_STEPS = 16  # among them is a high peak, at which least lies idle
_SHRANK = 1 << 20


class Fragments:
    """Bytes of one device that its allocator reserves at a peak and cannot use for it.

    At most reserved − allocated at the peak, for it fits into that. Less where whole segments lie free, which are given
    back before an allocation fails: then what is split off at the fullest boundaries. After a retry none lie free. With
    expandable segments pages are given back one by one.
    """

    __slots__ = ("_compact", "_idle", "_retries", "_slack", "_split", "expandable", "fitted", "room")

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self._idle = 0
        self._slack: deque[int] = deque(maxlen=_SLACK_STEPS)
        self._split: deque[int] = deque(maxlen=_SLACK_STEPS)
        self.fitted = 0  # the highest peak there was room for
        self.room: int | None = None  # at that time
        self._retries: int | None = None
        self._compact = 0  # steps for which the cache is known to be lean

    def learn(self, phases: Sequence[wire.Phase]) -> None:
        if not phases:
            return
        tallest = wire.tallest(phases) or phases[0]
        peak = tallest.allocated_peak or 0
        retries = phases[-1].retries
        if retries is not None:
            self._compact = (
                COMPACT_STEPS if self._retries is not None and retries > self._retries else self._compact - 1
            )
            self._retries = retries
        if peak > self.fitted:
            self.fitted = peak
        slack = split = max(0, (tallest.reserved or 0) - peak)
        if self._compact <= 0 and slack:
            full = -1
            for phase in phases:
                lies = phase.inactive_split
                if lies is not None and lies > full and 4 * (phase.allocated or 0) >= 3 * peak:
                    full = lies
            split = min(slack, full if full >= 0 else min([p.inactive_split or 0 for p in phases]))
        self._add(slack, split)

    def within(self, room: int | None) -> None:
        """What the process can have now: where that shrank, what fitted before proves nothing."""
        if room is not None:
            if self.room is not None and room < self.room - _SHRANK:
                self.fitted = 0
            self.room = room

    def _add(self, slack: int, split: int) -> None:
        """What lies idle is asked for at every batch, so made ready here."""
        slacks, splits = self._slack, self._split
        as_before = len(slacks) == _SLACK_STEPS and slacks[0] == slack and splits[0] == split  # what leaves comes back
        slacks.append(slack)
        splits.append(split)
        if not as_before:
            self._idle = min(min(slacks), sorted(splits)[len(splits) // 2])

    @property
    def refused(self) -> bool:
        """The device had no more to give, lately: whatever that was, it is near."""
        return self._compact > 0

    @property
    def bytes(self) -> int:
        return 0 if self.expandable else self._idle


def expandable(settings: Iterable[str]) -> bool:
    """Whether the allocator's configuration says so."""
    return any("expandable_segments:true" in value.replace(" ", "").lower() for value in settings)


def verdict(
    peak: int, low: int, high: int, trusted: bool, room: int | None, limit: int | None, fragments: Fragments | None
) -> tuple[str, int | None]:
    """(fits, tight or oom-ahead; headroom). `room`: what the process can have; `limit`: what nothing can exceed.

    A peak as high as one that fitted is no out-of-memory ahead.
    """
    if room is None:
        if limit is not None and low > limit:
            return OOM_AHEAD, limit - peak
        return (TIGHT if fragments is not None and fragments.refused else FITS), None
    if limit is not None and limit < room:
        room = limit
    usable = room
    fitted = 0
    if fragments is not None:
        if room != fragments.room:
            fragments.within(room)
        usable, fitted = room - fragments.bytes, fragments.fitted
    headroom = usable - peak
    if peak > fitted and (low > usable or (trusted and headroom < 0)):
        return OOM_AHEAD, headroom
    return (TIGHT if high > usable - TIGHT_SHARE * room else FITS), headroom
