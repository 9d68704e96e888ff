"""Runs the leak detective: passes each closed step to the census and to the followed checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gpumon_agent import wire
from gpumon_agent.allocator import Read, reading
from gpumon_agent.governor import Governor
from gpumon_agent.guard import Guard
from gpumon_agent.leaks.census import Census
from gpumon_agent.leaks.checkpoints import Checkpoints
from gpumon_agent.leaks.loads import Loads
from gpumon_agent.storages import CPU

if TYPE_CHECKING:
    from torch.nn import Module

    from gpumon_agent.attribution.accounts import Accounts


TOGETHER = 4
"""Steps processed in one batch while the census is idle: cold caches are paid for once per batch."""
_RESIDENT_UNIT_BYTES = 4 << 20  # smaller rises are ignored: resident memory always creeps


class LeakMonitor:
    """One per process. Created and called in the training thread, except `picture`."""

    def __init__(
        self,
        guard: Guard,
        governor: Governor,
        accounts: Accounts,
        loads: Loads,
        *,
        models: Callable[[], Iterable[tuple[int, Module]]],
        say: Callable[[tuple[wire.Event, ...]], None],
        tell: Callable[[str], None],
        now: Callable[[], tuple[int, str, int]],
        devices: Callable[[], Iterable[tuple[str, int]]],
        limited: bool,
    ) -> None:
        self._loads = loads
        self._loads.step = lambda: now()[0]
        self.census = Census(
            accounts.inventory,
            governor,
            models=models,
            others=accounts.others.modules,
            say=say,
            tell=tell,
            limited=limited,
            loads=self._loads,
            history=accounts.history,
        )
        self.checkpoints = Checkpoints(
            self._loads, governor, devices=devices, say=say, search=self.census.search, searching=self.census.searching
        )
        self._follow = guard.protect("checkpoints", self.checkpoints.step_closed)
        self.ask = guard.protect("census", self.census.ask)
        self._waiting: list[tuple[int, dict[int, Read]]] = []
        self._take = guard.protect("census", self.census.step_closed)
        self._continue = guard.protect("census", self.census.go_on)
        self.resident_bytes: int | None = None  # of this process, read once a second
        self._resident_before: int | None = None

    def follow(self, optimizer: Any) -> None:
        """From here on `optimizer.load_state_dict` marks the load that the state came from as used."""
        self._loads.follow_optimizer(optimizer)

    def step_closed(self, step: int, reads: Iterable[tuple[int, Read]]) -> None:
        """`reads`: (device, reading) of the step's windows; the last per device is from the end of the optimizer."""
        waiting = self._waiting
        waiting.append((step, dict(reads)))
        if step - waiting[0][0] >= TOGETHER - 1 or self.census.at_work or self._loads.loads:
            self._look_at_waiting()
            if self._loads.loads:
                self._follow(step)

    def _look_at_waiting(self, *, newest: bool = True) -> None:
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._look(*each, newest=newest and each is waiting[-1])

    def ends(self, ends: Sequence[wire.QuietEnd]) -> None:
        """Takes what was allocated as steps ended that were not read, in order."""
        self._look_at_waiting(newest=False)
        for step, of_step in groupby(ends, key=lambda end: end.step):
            figures = [(end.device, end.allocated, end.allocations) for end in of_step]
            self._take(step, figures, step == ends[-1].step)

    def go_on(self, step: int) -> None:
        """A step closed that was not read. Call it while a census is at work."""
        if self.census.at_work:
            self._continue(step)

    def _look(self, step: int, reads: dict[int, Read], *, newest: bool) -> None:
        figures: list[tuple[int, int | None, int | None]] = []
        for device, read in reads.items():
            last = reading(read)
            figures.append((device, last.allocated, last.allocations))
        resident = self.resident_bytes
        if resident is not None and resident != self._resident_before:
            self._resident_before = resident
            figures.append((CPU, resident // _RESIDENT_UNIT_BYTES, None))
        self._take(step, figures, newest)

    def picture(self) -> list[wire.Event]:
        """Events for a viewer that connects late."""
        newest = self.census.newest
        checkpoints = self.checkpoints.picture()
        return checkpoints if newest is None else [newest, *checkpoints]

    def stop(self) -> None:
        self.census.stop()
        self._loads.stop()

    def disown(self) -> None:
        """In a forked child: PyTorch's state and the device belong to the parent."""
        self._loads.stop()
