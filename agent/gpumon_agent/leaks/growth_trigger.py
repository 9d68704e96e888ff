"""Decides whether memory grows from step to step, and so whether a census is worth it. Constant in memory.

Model. Two figures of each device, both as the optimizer's step ends: allocated bytes and live blocks. Of each the
minimum over two steps is taken, of four such minima again the minimum, and so on: a series at every scale. A figure
rises where the last `RUN` minima of one scale each lie above the one before. A leak of one block a step adds one to
every minimum, whatever batches do to the bytes; noise makes `RUN` rising minima once in 40,320 windows. A leak every
tenth step, or one that adds bytes to a tensor that grows, is seen at a larger scale.

A suspicion starts one census; while growth goes on the next one waits twice as many steps as the one before.
Cost: 1 µs a step and device; benchmarks/census.py.
Known limitations. Where the allocator is not read at every step, neither is this. Figures that rise for a good reason
(a buffer that fills) are suspected too: what is found then tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import pairwise

RUN = 8  # minima in a row
GROUPS = (2, 2, 2, 4, 4, 4)  # minima that make one of the next scale: 2, 4, 8, 32, 128, 512 steps
FIRST_STEP = 2  # the steps before make optimizer state, workspaces and DDP's own buckets
PAUSE_STEPS = 16  # from one census to the next, then twice as many
PAUSE_STEPS_MAX = 8_192
QUIET_STEPS = 2_048  # without growth: then the pause becomes shorter again


class Rise:
    """One figure, step by step, at several scales."""

    __slots__ = ("_counts", "_least", "_minima", "_rising", "first")

    def __init__(self) -> None:
        self._minima: tuple[deque[int], ...] = tuple(deque(maxlen=RUN) for _ in GROUPS)
        self._least: list[int | None] = [None] * len(GROUPS)
        self._counts = [0] * len(GROUPS)
        self._rising = [False] * len(GROUPS)
        self.first: int | None = None

    def feed(self, value: int) -> bool:
        """Whether it rises."""
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
    """Of one process: all its devices."""

    def __init__(self) -> None:
        self._rises: dict[int, tuple[Rise, Rise]] = {}
        self._pause = PAUSE_STEPS
        self._not_before = 0
        self._quiet_since = 0
        self.grows = False
        self.blocks_grow = False  # else a few tensors that get larger

    def blocks_at_first(self) -> dict[int, int]:
        """By device: live blocks where it began to look."""
        return {device: rises[1].first for device, rises in self._rises.items() if rises[1].first is not None}

    def step_closed(self, step: int, figures: Iterable[tuple[int, int | None, int | None]]) -> bool:
        """(device, allocated, blocks) as this step ended. True: look now."""
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
