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

from collections.abc import Collection
from typing import Any

from gpumon_agent.leaks.holders import Files
from gpumon_agent.ledger.composition import History
from gpumon_agent.ledger.workspaces import snapshot

STEPS = 2
STEPS_MAX = 16
BLOCKS_MAX = 8_000


class Allocations:
    """Called in the training thread."""

    def __init__(self, history: History, files: Files) -> None:
        self._history = history
        self._files = files
        self._left = 0
        self._steps = STEPS
        self.read = False  # something was recorded that was not read yet

    @property
    def open(self) -> bool:
        return self._left > 0

    def begin(self) -> None:
        """From here on, for a few steps."""
        if not self._left and self._history.begin_stacks():
            self._left = self._steps
            self.read = True

    def step_closed(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._history.stop_stacks()

    def stop(self) -> None:
        self._left = 0
        self._history.stop_stacks()

    def lines(self, addresses: Collection[int]) -> dict[int, str]:
        """address → file.py:LINE, of those that were made while stacks were kept."""
        if not self.read:
            return {}
        self.read = False
        found: dict[int, str] = {}
        for segment in snapshot(traces=False)["segments"]:
            address = segment["address"]
            for block in segment["blocks"]:
                if address in addresses and block["state"] == "active_allocated":
                    line = self._line(block.get("frames") or ())
                    if line is not None:
                        found[address] = line
                address += block["size"]
        self._steps = STEPS if found else min(2 * self._steps, STEPS_MAX)
        return found

    def _line(self, frames: Any) -> str | None:
        for frame in frames:
            file = frame["filename"]
            if file.endswith(".py") and self._files.users_file(file):
                return f"{file.rpartition('/')[2]}:{frame['line']}"
        return None
