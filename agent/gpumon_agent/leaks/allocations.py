"""Where tensors were made: Python's stack at each allocation, switched on for a few steps, and read in slices.

Model. PyTorch's own history, told to keep a stack with every block and no trace of events. Blocks made while it is on
keep their stacks after it is off, so one snapshot later tells for each address the innermost line of the user's code.
The switch is composition.History's, which leaves a history alone that the script records.
Cost: some 4 µs an allocation while it is on, for `STEPS` steps (twice as many each time nothing was found, up to
`STEPS_MAX`); one snapshot of the segments a window, in one piece: 0.2 µs a block and 0.5 µs more for one with a stack,
not taken where there are more than `BLOCKS_MAX`. What it says is then gone through in slices. benchmarks/census.py.
Known limitations. Blocks made before it was on have no stack. A snapshot that the script takes later shows the stacks
of blocks which were made in those steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

from gpumon_agent import wire
from gpumon_agent.leaks.clock import Clock
from gpumon_agent.leaks.holders import Files
from gpumon_agent.ledger.composition import History
from gpumon_agent.ledger.workspaces import snapshot

STEPS = 2
STEPS_MAX = 16
STEPS_AFTER = 3  # by then gradients, batches and activations of those steps are gone
BLOCKS_MAX = 4_000  # of which the snapshot takes about a millisecond
_AT_ONCE = 16  # blocks between two looks at the clock


class Allocations:
    """Called in the training thread."""

    def __init__(self, history: History, files: Files) -> None:
        self._history = history
        self._files = files
        self._left = 0
        self._steps = STEPS
        self.unread = False  # something was recorded that was not read yet
        self._closed = 0  # steps since it was last on
        self._blocks: Iterator[tuple[int, int, Any]] | None = None  # while it is being read
        self.lines: dict[int, str] = {}  # address → file.py:LINE, as last read
        self.unclaimed: tuple[wire.Unclaimed, ...] = ()
        self._others: Counter[tuple[int, str]] = Counter()
        self._sizes: Counter[tuple[int, str]] = Counter()

    @property
    def open(self) -> bool:
        return self._left > 0

    def begin(self) -> None:
        """From here on, for a few steps."""
        if not self._left and self._history.begin_stacks():
            self._left = self._steps
            self.unread, self._closed, self._blocks = True, 0, None

    def step_closed(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._history.stop_stacks()
        else:
            self._closed += 1

    def stop(self) -> None:
        self._left, self._blocks = 0, None
        self._history.stop_stacks()

    @property
    def reading(self) -> bool:
        """A read has begun, and is not complete."""
        return self._blocks is not None

    @property
    def survived(self) -> bool:
        """Whether so many steps went by since that what is alive of it stays."""
        return not self._left and self._closed >= STEPS_AFTER

    def read(self, addresses: Collection[int], known: tuple[Collection[int], ...], clock: Clock) -> bool:
        """Finds the `lines` of those that were made while stacks were kept; and of the others that were made then and
        are in none of `known`, by line, what is `unclaimed`. True: it is complete."""
        if self._blocks is None:
            self.unread = False
            self.lines, self.unclaimed = {}, ()
            self._others, self._sizes = Counter(), Counter()
            self._blocks = _with_stacks(snapshot(traces=False)["segments"])
        for device, address, block in self._blocks:
            if block is not None:
                line = self._line(block["frames"])
                if line is not None and address in addresses:
                    self.lines[address] = line
                elif line is not None and not any(address in each for each in known):
                    self._others[device, line] += 1
                    self._sizes[device, line] += block["size"]
            if clock.over():
                return False
        self._blocks = None
        self._steps = STEPS if self.lines or self._others else min(2 * self._steps, STEPS_MAX)
        if self.survived:
            told = [wire.Unclaimed(at[1], count, self._sizes[at], at[0]) for at, count in self._others.items()]
            self.unclaimed = tuple(sorted(told, key=lambda each: -each.bytes)[: wire.HOLDERS_MAX])
        return True

    def _line(self, frames: Any) -> str | None:
        for frame in frames:
            file = frame["filename"]
            if file.endswith(".py") and self._files.users_file(file):
                return f"{file.rpartition('/')[2]}:{frame['line']}"
        return None


def _with_stacks(segments: Any) -> Iterator[tuple[int, int, Any]]:
    """(device, address, block) of those in use that have a stack; now and then one that has none, to look at the
    clock: then None is in its place."""
    passed = 0
    for segment in segments:
        device, address = segment["device"], segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block.get("frames"):
                yield device, address, block
            else:
                passed += 1
                if passed % _AT_ONCE == 0:
                    yield device, address, None
            address += block["size"]
