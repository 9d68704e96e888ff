"""Breaks down a step's peak on each device: the owners of the bytes that were alive at the peak.

Model. The phase that made the last step's peak is expected to make this one's. PyTorch's allocation history is recorded
for one such phase per step, without stacks; if the devices' peaks are in different phases (a pipeline), these
alternate. If the phase did not make the peak, its breakdown is dropped.

Starting with the bytes requested at the beginning of the phase, we replay the history's allocations and frees. The
largest sum is the peak. A block alive at the peak belongs

- to the owner of its address at the beginning of the phase, if it was not freed before the peak;
- else to the owner of its address at the end of the phase, if it was not freed until then;
- else, allocated and freed within the phase, to activations if autograd saved it (for the loss), or to `temporaries`.

A block counts as freed when it is returned, as in `allocated`. If another stream still uses it (FSDP's gathered
parameters and gradients), torch's `requested` still includes it.

The rest of `requested` is *unexplained*. The running module is inferred: forward allocates activations in the order of
the modules, backward frees them and makes gradients in reverse order. The nearest such events before and after the peak
give two modules; the result is their innermost common parent, or None if one is missing.

Breaking down a peak does not need a fresh graph walk (`alone`); both in one step are slow with a large model. An
earlier walk is reused if the allocator's counters (blocks, allocated, requested, reserved) are unchanged since, at the
beginning and the end of the phase. If not, the next breakdown is made with a walk.

Source: history.History; the sizes in its trace are requested bytes.
Cost: 0.2 µs per allocation while it records; 1 µs per event to read and replay.
Known limitations. No breakdown once the user has recorded a history. We use the peak of requested bytes, which may be
at another moment than that of allocated bytes: they differ by rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from gpumon_agent import wire
from gpumon_agent.allocator import Reading
from gpumon_agent.attribution.activations import Activations, Alive, Saved
from gpumon_agent.attribution.block_owners import Block, BlockOwners, Blocks
from gpumon_agent.attribution.graph import Places
from gpumon_agent.attribution.history import AllocationHistory
from gpumon_agent.storages import CPU

_Key = tuple[str, int]
"""a phase and its index"""
_COMPOSED = ("weights", "buffers", "gradients", "optimizer", "buckets", "inputs", "activations", "temporaries")


class _Began(NamedTuple):
    """State of one device at the beginning of the phase to break down."""

    ledger: wire.Ledger
    blocks: Blocks
    requested: int
    """of allocated blocks, without those that wait for a stream"""


class _Walked(NamedTuple):
    """Results of a walk for one device at a boundary, and the allocator's counters then."""

    counters: tuple[int | None, ...]
    saved: Saved


class _Device:
    """One device, from step to step."""

    def __init__(self) -> None:
        self.walked: dict[_Key, _Walked] = {}  # at the beginning and the end of the target
        self.within: list[Alive] = []  # newly saved at the walk as this backward began
        self.walked_within: list[Alive] = []  # the same of the step of `walked`
        self.phases: list[tuple[_Key, int]] = []  # of this step, with their peaks
        self.target: tuple[_Key, _Key] | None = None  # the phase that makes the peak, and the one before it
        self.began: _Began | None = None
        self.composed: wire.Ledger | None = None


class PeakBreakdowns:
    """Breaks down the peaks of a process's devices."""

    def __init__(self, block_owners: BlockOwners, activations: Activations, places: Callable[[], Places]) -> None:
        self.history = AllocationHistory()
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
        """the counters have changed since the last walk: its results are invalid"""

    @property
    def alone(self) -> bool:
        """Whether the current step's peak can be broken down without a walk."""
        target = self._target
        return (
            target is not None
            and not self.moved
            and all(mine.target != target or mine.walked.keys() >= set(target) for mine in self._devices.values())
        )

    def phase_ended(self, ledger: wire.Ledger, reading: Reading, device: int, saved: Saved) -> None:
        """Call it after each boundary of a sampled step was read on a device."""
        if device == CPU or ledger.requested is None:
            return
        mine = self._devices.get(device)
        if mine is None:
            mine = self._devices[device] = _Device()
        key = ledger.phase, ledger.index
        peak = reading.allocated_peak
        mine.phases.append((key, peak or 0))
        target = self._target
        if target is not None and key in target and self._activations.known:
            mine.walked[key] = _Walked(_counters(reading), saved)
            if key == target[0]:
                mine.walked_within = mine.within
        elif target is not None and key in target and self.wanted and mine.walked:
            walked = mine.walked.get(key)
            if walked is None or walked.counters != _counters(reading):
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
        """Backward begins: records what was saved since the last boundary, which may be freed before the next one."""
        if self._target is not None and self._target[0][0] == wire.BACKWARD:
            for device, mine in self._devices.items():
                if mine.target == self._target:
                    mine.within = self._activations.newly(device) if backward else []

    def step_ended(self) -> list[wire.Ledger]:
        """The breakdowns of phases that made their device's peak."""
        self.stop()
        breakdowns = []
        for mine in self._devices.values():
            composed, mine.composed = mine.composed, None
            phases, mine.phases = mine.phases, []
            highest = max(range(len(phases)), key=lambda at: phases[at][1], default=0)
            target = (phases[highest][0], phases[highest - 1][0]) if highest else None
            if target != mine.target:
                mine.target = target
                mine.walked, mine.within, mine.walked_within = {}, [], []
            if composed is not None and (mine.target is None or (composed.phase, composed.index) == mine.target[0]):
                breakdowns.append(composed)
        targets = list(dict.fromkeys(mine.target for mine in self._devices.values() if mine.target is not None))
        self._turn += 1
        self._target = targets[self._turn % len(targets)] if targets else None
        return breakdowns

    def stop(self) -> None:
        """Stops recording and forgets the phase."""
        self.history.stop()
        self._traces = None
        for mine in self._devices.values():
            mine.began = None

    def _compose(self, mine: _Device, ended: wire.Ledger, peak: int, device: int, saved: Saved) -> wire.Ledger | None:
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
        if began.buckets is not None and began.buckets > buckets:  # DDP logs the sizes of its buckets, not addresses
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
    """Requested bytes of allocated blocks. For those that wait for a stream only the rounded size is known."""
    allocated, requested = reading.allocated or 0, reading.requested or 0
    waits = max(0, (reading.active or 0) - allocated)
    if not waits:
        return requested
    return max(requested - waits, min(sum(block.nbytes for block in blocks.values()), allocated))


def _counters(reading: Reading) -> tuple[int | None, ...]:
    return reading.allocated, reading.requested, reading.reserved, reading.allocations


class PeakBreakdown(NamedTuple):
    """A peak and its lines, in requested bytes."""

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

    `requested`: bytes at its beginning. `before`, `after`: owners of blocks at its beginning and end. `saved`: blocks
    that autograd saved within it, all alive at one moment, possibly freed before its end.
    """
    addresses: list[int] = []
    changes: list[int] = []
    for event in trace:  # a single pass: the trace is larger than the CPU caches
        action = event["action"]
        if action == "alloc":
            addresses.append(event["addr"])
            changes.append(event["size"])
        elif action == "free_requested":
            addresses.append(event["addr"])
            changes.append(-event["size"])
    sums = list(accumulate(changes, initial=requested))
    peak = max(sums)
    behind = sums.index(peak)  # number of events up to the peak
    # dicts keep the last of equal keys: an address's newest event, or in reverse order its first
    first = dict(zip(reversed(addresses), range(len(addresses) - 1, -1, -1), strict=True))
    newest = dict(zip(addresses[:behind], range(behind), strict=True))
    made = [first[address] for address in saved.keys() & first.keys()]
    latest = max((at for at in made if changes[at] > 0), default=-1)  # at that event all of `saved` were alive
    lines: defaultdict[str, int] = defaultdict(int)
    for line, nbytes, _ in before.values():
        lines[line] += nbytes
    for address in newest.keys() & before.keys():
        if changes[first[address]] < 0:  # freed before the peak
            lines[before[address].line] -= before[address].nbytes
    alive = {address: changes[at] for address, at in newest.items() if changes[at] > 0}
    later = reversed(addresses[behind:] if alive else ())
    freed = dict(zip(later, range(len(addresses) - 1, behind - 1, -1), strict=False))  # first event after the peak
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
    """The innermost common parent of the modules of the nearest events before and after the peak."""
    telling = "activations" if forward else "gradients"
    newest: dict[int, int] = {}

    def block_at(index: int) -> Block | None:
        address = addresses[index]
        if changes[index] > 0:  # an allocation counts if it stays until the end
            block = after.get(address)
            if block is None or block.line != telling:
                return None
            if not newest:
                newest.update(zip(addresses, range(len(addresses)), strict=True))
            return block if newest[address] == index else None
        block = None if forward else before.get(address) or saved.get(address)
        if block is None or block.line != "activations":
            return None
        counters = changes[first[address]] < 0  # alive as the phase began; else freed by the event after its allocation
        return (
            block if index == (first[address] if counters else addresses.index(address, first[address] + 1)) else None
        )

    earlier = next((block for index in range(at, -1, -1) if (block := block_at(index)) is not None), None)
    later = next((block for index in range(max(at, 0), len(changes)) if (block := block_at(index)) is not None), None)
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
