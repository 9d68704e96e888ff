"""Finds the lines that allocated tensors: records Python stacks for a few steps, and reads them in slices.

Model. PyTorch's allocation history records a stack with every block. Blocks keep their stacks after recording ends, so
the innermost line of the user's code can be read later. history.History switches the recording: it leaves a history
that the script records alone, and removes these stacks from the snapshots that the script reads. Stacks are read

- with up to `BLOCKS_MAX` live blocks: from one snapshot of the segments, taken in one piece and processed in slices;
- with more, from torch 2.15: by address, for the census's finds and for up to `BLOCKS_MAX` newest allocations of the
  recorded steps, whose addresses come from a trace without stacks;
- with more, on older torch: from one snapshot, during the pause of a census requested by key.

Cost: some 4 µs per allocation while recording, for `STEPS` steps (doubled each time nothing is found, up to
`STEPS_MAX`). A snapshot: 0.2 µs per block, plus 0.5 µs with a stack. By address: 0.5 µs, plus 6 to 10 µs with a stack.
benchmarks/census.py.
Known limitations. Blocks allocated before the recording have no stack.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch

from gpumon_agent import source_lines, wire
from gpumon_agent.attribution.history import AllocationHistory
from gpumon_agent.attribution.workspaces import reads_traces_alone, snapshot, user_records
from gpumon_agent.frames import Place
from gpumon_agent.leaks.object_children import Files
from gpumon_agent.thread_clock import ThreadClock
from gpumon_agent.units import rounded

STEPS = 2
STEPS_MAX = 16
STEPS_AFTER = 3  # by then gradients, batches and activations of the recorded steps are freed
BLOCKS_MAX = 500  # their snapshot takes less than 1 ms even on a slow machine
BLOCKS_IN_PAUSE_MAX = 60_000  # some 30 ms
_STALE_STEPS = 64  # by then the recorded blocks are no longer the newest
_ask: Any = getattr(torch._C, "_cuda_allocationTraceback", None)  # since torch 2.15


class Made(NamedTuple):
    device: int
    address: int
    nbytes: int
    frames: Any


class Allocations:
    """Called in the training thread."""

    def __init__(self, history: AllocationHistory, files: Files) -> None:
        self._history = history
        self._files = files
        self._left = 0
        self._steps = STEPS
        self.unread = False  # recorded stacks wait to be read
        self._closed = 0  # steps since the recording ended
        self._blocks: Iterator[Made | None] | None = None  # of the read in progress
        self._whole: list[Made] | None = None  # read in a pause
        self._traced: list[tuple[int, int, int]] | None = None  # device, address, bytes: to be read by address
        self.lines: dict[int, Place] = {}  # address → the user's line that made it, of the last read
        self.unclaimed: tuple[wire.Unclaimed, ...] = ()
        self._others: Counter[tuple[int, Place]] = Counter()
        self._sizes: Counter[tuple[int, Place]] = Counter()

    @property
    def open(self) -> bool:
        return self._left > 0

    def begin(self, blocks: int) -> None:
        """Records stacks for the next steps. `blocks`: number of live blocks."""
        singly = _ask is not None and blocks > BLOCKS_MAX // 2  # there may be more when it is read
        if not self._left and self._history.begin_stacks(BLOCKS_MAX if singly and reads_traces_alone else 1):
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
        """Whether stacks recorded from here on could be read, and no unprocessed read would be lost."""
        return self._whole is None and (_ask is not None or blocks <= BLOCKS_MAX)

    def readable(self, blocks: int) -> bool:
        """Whether it can be read in slices with this many live blocks."""
        return self._traced is not None or self._whole is not None or blocks <= BLOCKS_MAX

    def waits_for_pause(self, blocks: int) -> bool:
        """Whether a requested pause must wait for stacks that can only be read in a pause; may start to record."""
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
        return self._blocks is not None

    @property
    def survived(self) -> bool:
        """Whether enough steps have passed since the recording that blocks still alive are retained."""
        return not self._left and self._closed >= STEPS_AFTER

    def read(self, addresses: Collection[int], known: tuple[Collection[int], ...], clock: ThreadClock) -> bool:
        """Fills `lines` for `addresses`, and sums recorded blocks that are in neither `addresses` nor `known` by line
        into `unclaimed`. True: complete."""
        if self._blocks is None:
            self.unread = False
            self.lines, self.unclaimed = {}, ()
            self._others, self._sizes = Counter(), Counter()
            if self._traced is not None:
                self._blocks = _made(addresses, self._traced)
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
            most = sorted(self._sizes, key=lambda at: -self._sizes[at])[: wire.HOLDERS_MAX]
            self.unclaimed = tuple(
                wire.Unclaimed(
                    str(line), self._others[device, line], self._sizes[device, line], device, source_lines.text(line)
                )
                for device, line in most
            )
        return True

    def _line(self, frames: Any) -> Place | None:
        for frame in frames:
            file = frame["filename"]
            if file.endswith(".py") and self._files.users_file(file):
                return Place(file, frame["line"])
        return None


def _with_stacks(segments: Any) -> Iterator[Made | None]:
    """Live blocks with a stack. Yields None for every other one, for a clock check."""
    for segment in segments:
        device, address = segment["device"], segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block.get("frames"):
                yield Made(device, address, block["size"], block["frames"])
            else:
                yield None
            address += block["size"]


def _traced(traces: Any) -> list[tuple[int, int, int]]:
    return [
        (device, event["addr"], rounded(event["size"]))
        for device, trace in enumerate(traces)
        for event in trace
        if event["action"] == "alloc"
    ]


def _made(addresses: Collection[int], traced: Iterable[tuple[int, int, int]]) -> Iterator[Made | None]:
    """The same by address: a block has a stack if it was allocated during the recording."""
    others = ((device, address, nbytes) for device, address, nbytes in traced if address not in addresses)
    seen = set()
    for device, address, nbytes in chain(((0, each, 0) for each in addresses), others):
        if address not in seen:
            seen.add(address)
            frames = _ask(address)
            if frames:
                yield Made(device, address, nbytes, frames)
                continue
        yield None
