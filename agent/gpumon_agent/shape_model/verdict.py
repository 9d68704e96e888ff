"""Decides whether a peak fits, for the agent's outlook of a batch and for the viewer's forecast of a step.

Model. The process can have `room`: what it has reserved plus what the device has free. The bytes in `Fragments` of it
cannot be used at a peak. A peak as high as one that fitted before fits again. Cost: a few comparisons.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from gpumon_agent import wire
from gpumon_agent.wire import FITS, OOM_AHEAD, TIGHT

TIGHT_SHARE = 0.05
"""Share of the room. `tight` if less is left above the interval."""
COMPACT_STEPS = 200
"""Steps after a retry for which the allocator's cache is taken to hold no free segments."""
_SLACK_STEPS = 16  # one of them has a high peak, with the fewest idle bytes
_SHRANK = 1 << 20


class Fragments:
    """Bytes of one device that its allocator reserves at a peak but cannot use for it.

    At most reserved − allocated at the peak. Less if whole segments are free (they are released before an allocation
    fails): then `inactive_split` at the fullest boundary. After a retry none are free. Always 0 with expandable
    segments, which release single pages.
    """

    __slots__ = ("_compact", "_idle", "_retries", "_slack", "_split", "budget", "expandable", "fitted")

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self._idle = 0
        self._slack: deque[int] = deque(maxlen=_SLACK_STEPS)
        self._split: deque[int] = deque(maxlen=_SLACK_STEPS)
        self.fitted = 0  # the highest peak that fitted
        self.budget: int | None = None  # as last set
        self._retries: int | None = None
        self._compact = 0  # steps left for which the cache is lean

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

    def within(self, budget: int | None) -> None:
        """Sets what the process can have now. If it shrank, what fitted before proves nothing."""
        if budget is not None:
            if self.budget is not None and budget < self.budget - _SHRANK:
                self.fitted = 0
            self.budget = budget

    def _add(self, slack: int, split: int) -> None:
        """Computes the idle bytes here, since every batch reads them."""
        slacks, splits = self._slack, self._split
        as_before = len(slacks) == _SLACK_STEPS and slacks[0] == slack and splits[0] == split  # the oldest returns
        slacks.append(slack)
        splits.append(split)
        if not as_before:
            self._idle = min(min(slacks), sorted(splits)[len(splits) // 2])

    @property
    def refused(self) -> bool:
        """The device recently had no more to give, so its limit is near."""
        return self._compact > 0

    @property
    def bytes(self) -> int:
        return 0 if self.expandable else self._idle


def expandable(settings: Iterable[str]) -> bool:
    """Whether the allocator's settings enable expandable segments."""
    return any("expandable_segments:true" in value.replace(" ", "").lower() for value in settings)


def verdict(
    peak: int, low: int, high: int, trusted: bool, budget: int | None, limit: int | None, fragments: Fragments | None
) -> tuple[str, int | None]:
    """(fits, tight or oom-ahead; headroom). `room`: what the process can have; `limit`: an upper bound.

    With a `room`, a peak no higher than one that fitted is not oom-ahead.
    """
    if budget is None:
        if limit is not None and low > limit:
            return OOM_AHEAD, limit - peak
        return (TIGHT if fragments is not None and fragments.refused else FITS), None
    if limit is not None and limit < budget:
        budget = limit
    usable = budget
    fitted = 0
    if fragments is not None:
        if budget != fragments.budget:
            fragments.within(budget)
        usable, fitted = budget - fragments.bytes, fragments.fitted
    headroom = usable - peak
    if peak > fitted and (low > usable or (trusted and headroom < 0)):
        return OOM_AHEAD, headroom
    return (TIGHT if high > usable - TIGHT_SHARE * budget else FITS), headroom
