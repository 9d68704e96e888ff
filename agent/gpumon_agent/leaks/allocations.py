"""Where tensors were made: Python's stack at each allocation, switched on for a few steps, and read once.

Model. PyTorch's own history, told to keep a stack with every block and no trace of events. Blocks made while it is on
keep their stacks after it is off, so one snapshot later tells for each address the innermost line of the user's code.
The switch is composition.History's, which leaves a history alone that the script records.
Cost: some 4 µs an allocation while it is on, for `STEPS` steps (twice as many each time nothing was found, up to
`STEPS_MAX`); one snapshot of the segments, 1 µs a block, not taken where there are more than `BLOCKS_MAX`.
Known limitations. Blocks made before it was on have no stack. A snapshot that the script takes later shows the stacks
of blocks which were made in those steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from gpumon_agent import wire
from gpumon_agent.leaks.holders import Files
from gpumon_agent.ledger.composition import History
from gpumon_agent.ledger.workspaces import snapshot

STEPS = 2
STEPS_MAX = 16
STEPS_AFTER = 3  # by then gradients, batches and activations of those steps are gone
BLOCKS_MAX = 8_000


class Allocations:
    """Called in the training thread."""

    def __init__(self, history: History, files: Files) -> None:
        self._history = history
        self._files = files
        self._left = 0
        self._steps = STEPS
        self.unread = False  # something was recorded that was not read yet
        self._closed = 0  # steps since it was last on

    @property
    def open(self) -> bool:
        return self._left > 0

    def begin(self) -> None:
        """From here on, for a few steps."""
        if not self._left and self._history.begin_stacks():
            self._left = self._steps
            self.unread, self._closed = True, 0

    def step_closed(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._history.stop_stacks()
        else:
            self._closed += 1

    def stop(self) -> None:
        self._left = 0
        self._history.stop_stacks()

    @property
    def survived(self) -> bool:
        """Whether so many steps went by since that what is alive of it stays."""
        return not self._left and self._closed >= STEPS_AFTER

    def read(
        self, addresses: Collection[int], known: tuple[Collection[int], ...]
    ) -> tuple[dict[int, str], tuple[wire.Unclaimed, ...]]:
        """address → file.py:LINE, of those that were made while stacks were kept; and of the others that were made
        then and are in none of `known`, by line."""
        self.unread = False
        found: dict[int, str] = {}
        others: Counter[tuple[int, str]] = Counter()
        sizes: Counter[tuple[int, str]] = Counter()
        for segment in snapshot(traces=False)["segments"]:
            address = segment["address"]
            for block in segment["blocks"]:
                wanted = address in addresses
                if block["state"] == "active_allocated" and block.get("frames"):
                    line = self._line(block["frames"])
                    if line is not None and wanted:
                        found[address] = line
                    elif line is not None and not any(address in each for each in known):
                        others[segment["device"], line] += 1
                        sizes[segment["device"], line] += block["size"]
                address += block["size"]
        self._steps = STEPS if found or others else min(2 * self._steps, STEPS_MAX)
        if not self.survived:
            return found, ()
        told = [wire.Unclaimed(at[1], count, sizes[at], at[0]) for at, count in others.items()]
        return found, tuple(sorted(told, key=lambda each: -each.bytes)[: wire.HOLDERS_MAX])

    def _line(self, frames: Any) -> str | None:
        for frame in frames:
            file = frame["filename"]
            if file.endswith(".py") and self._files.users_file(file):
                return f"{file.rpartition('/')[2]}:{frame['line']}"
        return None
