"""Which phase's history is recorded, and what becomes of it: composes the peak of each device of the process.

Model. Of each device the phase that made its last step's peak is expected to make this one's. History is recorded for
one such phase a step; where devices differ in it (a pipeline), their phases take turns. A composition of a phase that
then did not make the step's peak is dropped.

A step that composes need not be one that walks the graph (`alone`), for the two together are dear with a large model:
what an earlier walk found holds as long as the allocator stands, as the phase begins and as it ends, as it stood then,
in its blocks and its bytes, requested, allocated and reserved. Where it does not, the next time is with a walk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from gpumon_agent import wire
from gpumon_agent.allocator import Reading
from gpumon_agent.ledger.activations import Activations, Alive
from gpumon_agent.ledger.composition import Block, Blocks, compose
from gpumon_agent.ledger.graph import Places
from gpumon_agent.ledger.history import History
from gpumon_agent.ledger.whose import Whose

_Key = tuple[str, int]
"""a phase and its index"""
_CPU = -1
_COMPOSED = ("weights", "buffers", "gradients", "optimizer", "buckets", "inputs", "activations", "temporaries")


class _Began(NamedTuple):
    """The phase to be composed begins on one device."""

    ledger: wire.Ledger
    blocks: Blocks
    requested: int
    """of what is allocated: what waits for a stream is not"""


class _Walked(NamedTuple):
    """What a walk had found of one device at a boundary, and how its allocator stood."""

    stood: tuple[int | None, ...]
    saved: list[Alive]


class _Device:
    """One device, from step to step."""

    def __init__(self) -> None:
        self.walked: dict[_Key, _Walked] = {}  # as the target begins, and as it ends
        self.within: list[Alive] = []  # what was saved at the newest walk: as this backward began, as it ends
        self.walked_within: list[Alive] = []  # as the target ended in that step
        self.phases: list[tuple[_Key, int]] = []  # of this step, with their peaks
        self.target: tuple[_Key, _Key] | None = None  # the phase that makes the peak, and the one before it
        self.began: _Began | None = None
        self.composed: wire.Ledger | None = None


class Composing:
    """Composes the peaks of a process's devices."""

    def __init__(self, whose: Whose, activations: Activations, places: Callable[[], Places]) -> None:
        self.history = History()
        self.wanted = True
        """in this step"""
        self._whose = whose
        self._activations = activations
        self._places = places
        self._devices: dict[int, _Device] = {}
        self._target: tuple[_Key, _Key] | None = None  # of this step
        self._traces: list[list[dict[str, object]]] | None = None
        self._turn = 0
        self.moved = False
        """what a walk found did not hold any more"""

    @property
    def alone(self) -> bool:
        """Whether the present step's peak may be composed without a walk."""
        target = self._target
        return (
            target is not None
            and not self.moved
            and all(mine.target != target or mine.walked.keys() >= set(target) for mine in self._devices.values())
        )

    def phase_ended(self, ledger: wire.Ledger, reading: Reading, device: int, saved: list[Alive]) -> None:
        """A boundary of a sampled step was read on one device."""
        if device == _CPU or ledger.requested is None:
            return
        mine = self._devices.setdefault(device, _Device())
        key = ledger.phase, ledger.index
        peak = reading.allocated_peak
        mine.phases.append((key, peak or 0))
        target = self._target
        if target is not None and key in target and self._activations.known:
            mine.walked[key] = _Walked(_stands(reading), saved)
            if key == target[0]:
                mine.walked_within = mine.within
        elif target is not None and key in target and self.wanted and mine.walked:
            walked = mine.walked.get(key)
            if walked is None or walked.stood != _stands(reading):
                self.moved = True
                mine.began = None
                self.history.stop()
                return
            saved = walked.saved
        if mine.began is not None:
            if target is not None and key == target[0] and peak is not None:
                if self.history.recording:
                    self._traces = self.history.end()
                mine.composed = self._compose(mine, ledger, peak, device, saved)
            else:
                self.history.stop()
            mine.began = None
        elif target is not None and key == target[1] and mine.target == target and self.wanted:
            if self.history.recording or self.history.begin():
                blocks = self._whose.blocks(ledger, device, saved, self._places())
                mine.began = _Began(ledger, blocks, _requested(reading, blocks))
        elif self.history.recording and all(each.began is None for each in self._devices.values()):
            self.history.stop()

    def graph_walked(self, *, backward: bool) -> None:
        """Backward begins: what autograd saved since the phase began may be gone by its end."""
        if self._target is not None and self._target[0][0] == wire.BACKWARD:
            for device, mine in self._devices.items():
                if mine.target == self._target:
                    mine.within = self._activations.newly(device) if backward else []

    def step_ended(self) -> list[wire.Ledger]:
        """The compositions of phases that made their device's peak."""
        self.stop()
        told = []
        for mine in self._devices.values():
            composed, mine.composed = mine.composed, None
            phases, mine.phases = mine.phases, []
            highest = max(range(len(phases)), key=lambda at: phases[at][1], default=0)
            target = (phases[highest][0], phases[highest - 1][0]) if highest else None
            if target != mine.target:
                mine.target = target
                mine.walked, mine.within, mine.walked_within = {}, [], []
            if composed is not None and (mine.target is None or (composed.phase, composed.index) == mine.target[0]):
                told.append(composed)
        targets = list(dict.fromkeys(mine.target for mine in self._devices.values() if mine.target is not None))
        self._turn += 1
        self._target = targets[self._turn % len(targets)] if targets else None
        return told

    def stop(self) -> None:
        """Nothing is recorded, nothing kept of the phase."""
        self.history.stop()
        self._traces = None
        for mine in self._devices.values():
            mine.began = None

    def _compose(
        self, mine: _Device, ended: wire.Ledger, peak: int, device: int, saved: list[Alive]
    ) -> wire.Ledger | None:
        assert mine.began is not None
        began, before, requested = mine.began
        if self._traces is None:
            return None
        after = self._whose.blocks(ended, device, saved, self._places())
        within = {
            each.address: Block("activations", each.nbytes, each.place)
            for each in mine.walked_within
            if each.address not in before
        }
        if self._activations.known:
            self.moved = False
        composed = compose(self._traces[device], requested, before, after, within, forward=ended.phase == wire.FORWARD)
        if composed.requested > peak:
            return None  # other threads allocated while the boundary was read
        lines = composed.lines
        buckets = sum(block.nbytes for block in before.values() if block.line == "buckets")
        if began.buckets is not None and began.buckets > buckets:  # DDP tells how large its buckets are, not where
            lines["buckets"] = lines.get("buckets", 0) + began.buckets - buckets
        known: dict[str, int | None] = {line: lines.get(line, 0) for line in _COMPOSED}
        if not mine.walked.keys() >= {(began.phase, began.index), (ended.phase, ended.index)}:
            known["activations"] = None
        for line in ("other_models", "workspaces", "variables"):
            if getattr(ended, line) is not None:
                known[line] = lines.get(line, 0)
        return wire.Ledger(
            ended.step,
            ended.phase,
            ended.index,
            ended.device,
            peak,
            composed.requested,
            None,
            **known,
            peak=True,
            module=composed.module,
            hidden=ended.hidden,
            held_by=ended.held_by,
        )


def _requested(reading: Reading, blocks: Blocks) -> int:
    """What live tensors asked for. What waits for a stream is known rounded only: no less than is held for sure."""
    allocated, requested = reading.allocated or 0, reading.requested or 0
    waits = max(0, (reading.active or 0) - allocated)
    if not waits:
        return requested
    return max(requested - waits, min(sum(block.nbytes for block in blocks.values()), allocated))


def _stands(reading: Reading) -> tuple[int | None, ...]:
    return reading.allocated, reading.requested, reading.reserved, reading.allocations
