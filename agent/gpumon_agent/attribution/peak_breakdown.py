"""Takes apart the peak of a step: whose bytes were alive at its highest moment, on each device.

Model. The phase that made the last step's peak is expected to make this one's. PyTorch's history of allocations is
recorded for one such phase a step, without stacks; where the devices' peaks lie in different phases (a pipeline), these
take turns. If the phase turns out not to have made the peak, its breakdown is dropped.

From the bytes requested at the phase's beginning, every event of the history adds or subtracts its requested bytes. The
largest sum is the peak. A block that was alive then belongs

- to the owner that held its address at the beginning of the phase, if it was not freed since;
- else to the owner that holds it at the end of the phase, if it is not freed until then;
- else, if it was made and freed within the phase, to what autograd saved in it (of the loss), or to `temporaries`.

A block counts as freed as soon as it is given back, as `allocated` counts it. A block that another stream still uses
(FSDP's gathered parameters and gradients) waits, and torch goes on counting it as requested.

The rest of `requested` is *unexplained*. The module that was running: forward allocates what each module saves in the
order of the modules, backward frees it and makes gradients in the opposite order. So the nearest such events before and
after the peak name two modules, and the answer is the innermost module around both; None if one of them is missing.

Breaking down a peak does not need a fresh graph walk (`alone`); both in one step are slow with a large model. An
earlier walk is reused if the allocator's counters (blocks, allocated, requested, reserved) are unchanged since, at the
beginning and the end of the phase. If not, the next breakdown is made with a walk.

Source: history.History; the sizes in its trace are requested bytes.
Cost: 0.2 µs an allocation while it records; 1 µs an event to read and replay: benchmarks/inventory.py.
Known limitations. No breakdown once the user has recorded a history. The largest sum of requested bytes is taken for
the peak of allocated ones: they differ by rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from gpumon_agent import wire
from gpumon_agent.allocator import Reading
from gpumon_agent.attribution.activations import Activations, Alive
from gpumon_agent.attribution.block_owners import Block, BlockOwners, Blocks
from gpumon_agent.attribution.graph import Places
from gpumon_agent.attribution.history import History

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


class PeakBreakdowns:
    """Composes the peaks of a process's devices."""

    def __init__(self, block_owners: BlockOwners, activations: Activations, places: Callable[[], Places]) -> None:
        self.history = History()
        self.wanted = True
        """in this step"""
        self._block_owners = block_owners
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
                blocks = self._block_owners.blocks(ledger, device, saved, self._places())
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
        after = self._block_owners.blocks(ended, device, saved, self._places())
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


class PeakBreakdown(NamedTuple):
    """A peak, taken apart: requested bytes."""

    requested: int
    lines: dict[str, int]
    module: str | None


def compose(
    trace: Iterable[dict[str, Any]],
    requested: int,
    before: Blocks,
    after: Blocks,
    saved: Blocks,
    *,
    forward: bool,
) -> PeakBreakdown:
    """The peak of one phase; see the module.

    `requested`: bytes as it began. `before`, `after`: whose the blocks are at its beginning and its end; `saved`: those
    that autograd saved within it, all of them alive at one moment, and that may be gone by its end.
    """
    addresses: list[int] = []
    changes: list[int] = []
    for event in trace:  # once: they are more than a processor's cache holds
        action = event["action"]
        if action == "alloc":
            addresses.append(event["addr"])
            changes.append(event["size"])
        elif action == "free_requested":
            addresses.append(event["addr"])
            changes.append(-event["size"])
    sums = list(accumulate(changes, initial=requested))
    peak = max(sums)
    behind = sums.index(peak)  # so many events led to the peak
    # dicts keep the last of equal keys: an address's newest event, and going backwards its first
    first = dict(zip(reversed(addresses), range(len(addresses) - 1, -1, -1), strict=True))
    newest = dict(zip(addresses[:behind], range(behind), strict=True))
    made = [first[address] for address in saved.keys() & first.keys()]
    latest = max((at for at in made if changes[at] > 0), default=-1)  # until then the saved were all there
    lines: defaultdict[str, int] = defaultdict(int)
    for line, nbytes, _ in before.values():
        lines[line] += nbytes
    for address in newest.keys() & before.keys():
        if changes[first[address]] < 0:  # given back before the peak
            lines[before[address].line] -= before[address].nbytes
    alive = {address: changes[at] for address, at in newest.items() if changes[at] > 0}
    later = reversed(addresses[behind:] if alive else ())
    freed = dict(zip(later, range(len(addresses) - 1, behind - 1, -1), strict=False))  # after the peak, if they are
    for address, size in alive.items():
        until = freed.get(address)
        if until is None:
            owner = after.get(address)
            if owner is not None:
                lines[owner.line] += size
        else:
            kept = address in saved and newest[address] <= latest < until
            lines["activations" if kept else "temporaries"] += size
    running = _running(addresses, changes, behind - 1, before, after, saved, first, forward=forward)
    return PeakBreakdown(peak, {line: nbytes for line, nbytes in lines.items() if nbytes > 0}, running)


def _running(
    addresses: list[int],
    changes: list[int],
    at: int,
    before: Blocks,
    after: Blocks,
    saved: Blocks,
    first: dict[int, int],
    *,
    forward: bool,
) -> str | None:
    """The innermost module around the nearest events that tell a module, before and after the peak."""
    telling = "activations" if forward else "gradients"
    newest: dict[int, int] = {}

    def told(index: int) -> Block | None:
        address = addresses[index]
        if changes[index] > 0:  # tells if it stays
            block = after.get(address)
            if block is None or block.line != telling:
                return None
            if not newest:
                newest.update(zip(addresses, range(len(addresses)), strict=True))
            return block if newest[address] == index else None
        block = None if forward else before.get(address) or saved.get(address)
        if block is None or block.line != "activations":
            return None
        stood = changes[first[address]] < 0  # as the phase began; else it is freed by the first event after it was made
        return block if index == (first[address] if stood else addresses.index(address, first[address] + 1)) else None

    earlier = next((block for index in range(at, -1, -1) if (block := told(index)) is not None), None)
    later = next((block for index in range(max(at, 0), len(changes)) if (block := told(index)) is not None), None)
    if earlier is None or later is None or earlier.place is None or later.place is None:
        return None
    if earlier.place[0] != later.place[0]:
        return None
    return _around(earlier.place[1], later.place[1]) or None


def _around(left: str, right: str) -> str:
    common = []
    for a, b in zip(left.split("."), right.split("."), strict=False):
        if a != b:
            break
        common.append(a)
    return ".".join(common)
