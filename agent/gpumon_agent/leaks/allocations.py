"""Where tensors were made: Python's stack at each allocation, switched on for a few steps, and read in slices.

Model. PyTorch's own history, told to keep a stack with every block. Blocks made while it is on keep their stacks after
it is off, so that each can be asked later for the innermost line of the user's code. The switch is
history.History's, which leaves a history alone that the script records, and takes these stacks out of the snapshots
that the script reads. How they are asked:

- up to `BLOCKS_MAX` live blocks, by one snapshot of the segments, in one piece; what it says is gone through in slices;
- of more, address by address (torch 2.15 can): those that the census found, and the newest `TRACE_MAX` that the last of
  those steps made, of which a trace without stacks tells the addresses;
- of more with an older torch, by one snapshot within the pause of a census that is asked for by key.

Cost: some 4 µs an allocation while it is on, for `STEPS` steps (twice as many each time nothing was found, up to
`STEPS_MAX`); of a snapshot 0.2 µs a block and 0.5 µs more for one with a stack; 0.5 µs an address and 6 to 10 more for
one with a stack. benchmarks/census.py.
Known limitations. Blocks made before it was on have no stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from gpumon_agent import wire
from gpumon_agent.attribution.history import History
from gpumon_agent.attribution.workspaces import reads_traces_alone, snapshot, user_records
from gpumon_agent.leaks.object_children import Files
from gpumon_agent.thread_clock import ThreadClock

STEPS = 2
STEPS_MAX = 16
STEPS_AFTER = 3  # by then gradients, batches and activations of those steps are gone
BLOCKS_MAX = 500  # of which the snapshot takes less than a millisecond on a slow machine, too
BLOCKS_IN_PAUSE_MAX = 60_000  # some 30 ms
TRACE_MAX = 400  # allocations, read in one piece
_AT_ONCE = 16  # blocks between two looks at the clock
_STALE_STEPS = 64  # by then what was made in those steps is not among the newest any more
_BLOCK_BYTES = 512
_ROOM = 0.9  # of BLOCKS_MAX as it begins: there are more by the time it is read
_ask: Any = getattr(torch._C, "_cuda_allocationTraceback", None)  # since torch 2.15


class Made(NamedTuple):
    """A block that has a stack."""

    device: int
    address: int
    nbytes: int
    frames: Any


class Allocations:
    """Called in the training thread."""

    def __init__(self, history: History, files: Files) -> None:
        self._history = history
        self._files = files
        self._left = 0
        self._steps = STEPS
        self.unread = False  # something was recorded that was not read yet
        self._closed = 0  # steps since it was last on
        self._blocks: Iterator[Made | None] | None = None  # while it is being read
        self._whole: list[Made] | None = None  # read in a pause
        self._traced: list[tuple[int, int, int]] | None = None  # device, address, bytes: to be asked one by one
        self.lines: dict[int, str] = {}  # address → file.py:LINE, as last read
        self.unclaimed: tuple[wire.Unclaimed, ...] = ()
        self._others: Counter[tuple[int, str]] = Counter()
        self._sizes: Counter[tuple[int, str]] = Counter()

    @property
    def open(self) -> bool:
        return self._left > 0

    def begin(self, blocks: int) -> None:
        """From here on, for a few steps. `blocks`: that are alive."""
        singly = _ask is not None and blocks > _ROOM * BLOCKS_MAX
        if not self._left and self._history.begin_stacks(TRACE_MAX if singly and reads_traces_alone else 1):
            self._left = self._steps
            self.unread, self._closed, self._blocks, self._whole = True, 0, None, None
            self._traced = [] if singly else None

    def step_closed(self) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                if self._traced is not None and reads_traces_alone:
                    self._traced = _traced(self._history.newest())
                self._history.stop_stacks()
        else:
            self._closed += 1

    def stop(self) -> None:
        self._left, self._blocks, self._whole = 0, None, None
        self._history.stop_stacks()

    def worth_beginning(self, blocks: int) -> bool:
        """Whether what is kept from here on could be read; and nothing that was read in a pause would be lost."""
        return self._whole is None and (_ask is not None or blocks <= BLOCKS_MAX)

    def readable(self, blocks: int) -> bool:
        """Whether it can be read in slices, of so many that are alive."""
        return self._traced is not None or self._whole is not None or blocks <= BLOCKS_MAX

    def waits_for_pause(self, blocks: int) -> bool:
        """A pause was asked for, and has to wait: stacks are being kept, for only in a pause can they be read."""
        if _ask is not None or not BLOCKS_MAX < blocks <= BLOCKS_IN_PAUSE_MAX:
            return False
        if not self.unread or self._closed > _STALE_STEPS:
            self.begin(blocks)
        return self.unread and not self.survived

    def read_in_pause(self, blocks: int) -> None:
        if self.unread and self.survived and not self.readable(blocks) and blocks <= BLOCKS_IN_PAUSE_MAX:
            segments = [] if user_records() else snapshot(traces=False)["segments"]
            self._whole = [made for made in _with_stacks(segments) if made is not None]

    @property
    def reading(self) -> bool:
        """A read has begun, and is not complete."""
        return self._blocks is not None

    @property
    def survived(self) -> bool:
        """Whether so many steps went by since that what is alive of it stays."""
        return not self._left and self._closed >= STEPS_AFTER

    def read(self, addresses: Collection[int], known: tuple[Collection[int], ...], clock: ThreadClock) -> bool:
        """Finds the `lines` of those that were made while stacks were kept; and of the others that were made then and
        are in none of `known`, by line, what is `unclaimed`. True: it is complete."""
        if self._blocks is None:
            self.unread = False
            self.lines, self.unclaimed = {}, ()
            self._others, self._sizes = Counter(), Counter()
            if self._traced is not None:
                self._blocks = _asked(addresses, self._traced)
            elif self._whole is not None:
                self._blocks = iter(self._whole)
            else:
                self._blocks = _with_stacks([] if user_records() else snapshot(traces=False)["segments"])
        for made in self._blocks:
            if made is not None:
                line = self._line(made.frames)
                if line is not None and made.address in addresses:
                    self.lines[made.address] = line
                elif line is not None and not any(made.address in each for each in known):
                    self._others[made.device, line] += 1
                    self._sizes[made.device, line] += made.nbytes
            if clock.over():
                return False
        self._blocks = self._whole = None
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


def _with_stacks(segments: Any) -> Iterator[Made | None]:
    """Those in use that have a stack; now and then one that has none, to look at the clock: then None is in its
    place."""
    passed = 0
    for segment in segments:
        device, address = segment["device"], segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block.get("frames"):
                yield Made(device, address, block["size"], block["frames"])
            else:
                passed += 1
                if passed % _AT_ONCE == 0:
                    yield None
            address += block["size"]


def _traced(traces: Any) -> list[tuple[int, int, int]]:
    return [
        (device, event["addr"], -(-event["size"] // _BLOCK_BYTES) * _BLOCK_BYTES)
        for device, trace in enumerate(traces)
        for event in trace
        if event["action"] == "alloc"
    ]


def _asked(addresses: Collection[int], traced: Iterable[tuple[int, int, int]]) -> Iterator[Made | None]:
    """The same, each address by itself: it has a stack if the block there now was made while stacks were kept."""
    others = ((device, address, nbytes) for device, address, nbytes in traced if address not in addresses)
    seen = set()
    for passed, (device, address, nbytes) in enumerate(chain(((0, each, 0) for each in addresses), others)):
        if address not in seen:
            seen.add(address)
            frames = _ask(address)
            if frames:
                yield Made(device, address, nbytes, frames)
                continue
        if passed % _AT_ONCE == 0:
            yield None
