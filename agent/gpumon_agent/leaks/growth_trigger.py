"""Decides whether memory grows from step to step, so that a census is worth it. Uses constant memory.

Model. Per device we track allocated bytes and live blocks at the end of the optimizer step. Minima over groups of steps
(`GROUPS`), then over groups of these minima, give one series per scale. A figure rises if the last `RUN` minima of one
scale strictly increase. A leak of one block per step raises every minimum by the same amount, however much the bytes
vary by batch; noise gives `RUN` increasing minima once in 8! = 40,320 windows. Slower leaks, and a tensor that grows,
show at larger scales.

Growth starts one census; while it continues, the pause before the next one doubles each time.
Cost: 1 µs per step and device; benchmarks/census.py.
Known limitations. Steps at which the allocator is not read are not seen. Legitimate growth (a buffer that fills) also
starts a census, whose finds then show the reason.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

RUN = 8  # increasing minima
GROUPS = (2, 2, 2, 4, 4, 4)  # values per minimum at each scale, which span 2, 4, 8, 32, 128 and 512 steps
FIRST_STEP = 2  # earlier steps allocate optimizer state, workspaces and DDP buckets
PAUSE_STEPS = 16  # between the first two censuses; doubles after each
PAUSE_STEPS_MAX = 8_192
QUIET_STEPS = 2_048  # without growth; then the pause is halved


class Rise:
    """Minima of one figure, at several scales."""

    __slots__ = ("_counts", "_least", "_minima", "_rising", "first")

    def __init__(self) -> None:
        self._minima: tuple[deque[int], ...] = tuple(deque(maxlen=RUN) for _ in GROUPS)
        self._least: list[int | None] = [None] * len(GROUPS)
        self._counts = [0] * len(GROUPS)
        self._rising = [False] * len(GROUPS)
        self.first: int | None = None

    def feed(self, value: int) -> bool:
        """Adds a step's value. Whether the figure rises."""
        if self.first is None:
            self.first = value
        for scale, group in enumerate(GROUPS):
            least = self._least[scale]
            self._least[scale] = value if least is None or value < least else least
            self._counts[scale] += 1
            if self._counts[scale] < group:
                break
            value = self._least[scale]  # type: ignore[assignment]
            self._least[scale], self._counts[scale] = None, 0
            minima = self._minima[scale]
            minima.append(value)
            self._rising[scale] = len(minima) == RUN and all(a < b for a, b in pairwise(minima))
        return True in self._rising


class GrowthTrigger:
    """One per process, for all its devices."""

    def __init__(self) -> None:
        self._rises: dict[int, tuple[Rise, Rise]] = {}
        self._pause = PAUSE_STEPS
        self._not_before = 0
        self._quiet_since = 0
        self.grows = False
        self.blocks_grow = False  # if only bytes grow, a few tensors get larger

    def blocks_at_first(self) -> dict[int, int]:
        """device → live blocks at the first observed step."""
        return {device: rises[1].first for device, rises in self._rises.items() if rises[1].first is not None}

    def step_closed(self, step: int, figures: Iterable[tuple[int, int | None, int | None]]) -> bool:
        """`figures`: (device, allocated, live blocks) at the end of this step. True: start a census."""
        if step < FIRST_STEP:
            return False
        grows = blocks_grow = False
        for device, allocated, blocks in figures:
            if allocated is None:
                continue
            rises = self._rises.get(device)
            if rises is None:
                rises = self._rises[device] = (Rise(), Rise())
            grows |= rises[0].feed(allocated)
            if blocks is not None:
                blocks_grow |= rises[1].feed(blocks)
        grows |= blocks_grow
        self.grows, self.blocks_grow = grows, blocks_grow
        if not grows:
            if step - self._quiet_since > QUIET_STEPS:
                self._quiet_since = step
                self._pause = max(PAUSE_STEPS, self._pause // 2)
            return False
        self._quiet_since = step
        if step < self._not_before:
            return False
        self._not_before = step + self._pause
        self._pause = min(2 * self._pause, PAUSE_STEPS_MAX)
        return True
