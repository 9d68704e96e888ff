"""Records PyTorch's allocation history for one phase or a few steps, and hides it from the user's code.

Model. Torch has one history per process. We record without stacks for a phase of a sampled step (`begin`, `end`), and
with stacks for the steps of a leak search (`begin_stacks`, `stop_stacks`). Switching it off clears torch's ring of
events, but a block allocated with a stack keeps it until it is freed. So we clean what the user reads:

- while we record, `device_traces` and `external_annotations` are empty and `_cuda_isHistoryEnabled` returns False;
- once we have recorded stacks, all stacks of blocks and segments are removed from every snapshot;
- once the user records, we remove only the stacks that blocks and segments had when the user began. They are removed
  from the user's events too: torch gives a free the allocation's stack, unless `context="all"` (the default).

Once the user has recorded, we never record again.

Known limitations. If a block with one of our stacks is freed after the user began and reallocated at the same address
by the same lines, its stack is the user's but equals ours. It is kept if the user's history has its `alloc` event or
C++ frames (torch's default), and removed with `stacks="python"` and no events. Since torch 2.15
`torch.cuda.memory._allocation_traceback` reads one block's stack; it is not cleaned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from gpumon_agent.attribution.workspaces import snapshot, tracks_blocks
from gpumon_agent.guard import leave_no_frame, pass_on, protect
from gpumon_agent.patching import Patches

ENTRIES_MAX = 100_000
"""of the trace: a phase with more events is dropped"""
_COUNTED = frozenset({"alloc", "free_requested"})
_SKIPPED = ["free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"]
_MORE: tuple[tuple[Any, ...], ...] = (
    (True, False, False, _SKIPPED, False, True),  # clear the history, two we leave off, skip, pinned memory, CUDA: 2.15
    (True, False, False, _SKIPPED),
    (True, False, False),
    (True, False),
    (True,),
    (),  # torch 2.4
)
"""Arguments after the four that all torch versions take, newest first."""
_MAKES = frozenset({"alloc", "segment_alloc", "segment_map"})
_Stacks = dict[tuple[str, int], list[Any]]
"""("block" or "segment", address) → frames"""


class AllocationHistory:
    """Switches the history; all recording by the agent goes through here."""

    def __init__(self) -> None:
        self.recording = False
        self.stacks = False  # recording stacks instead of events
        self._inherited = False  # in a forked child: the parent's recording is on, and cannot be switched off
        self._kept_stacks = False  # blocks may have our stacks
        self._standing: _Stacks | None = None  # our stacks when the user began to record
        self._own_stacks = False  # each of the user's events has its own stack
        self._record = getattr(torch._C, "_cuda_record_memory_history", None)
        self._enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
        self._theirs = self._is_theirs()
        self._give_way = protect("history", self._leave_it_to_the_user, stays_on=True)
        self._clean = protect("snapshots", _clean, stays_on=True)
        self._patches = Patches()
        self._replace("_cuda_record_memory_history", self._records)
        self._replace("_cuda_record_memory_history_legacy", self._records)
        self._replace("_cuda_memorySnapshot", self._reads)
        self._replace("_cuda_isHistoryEnabled", self._asks)

    def begin(self) -> bool:
        """Starts to record events. False: this torch has no history, or the user records or has recorded."""
        if not self._is_free():
            return False
        self.recording = True  # first: another thread may read a snapshot at any moment
        self._switch("all", None, ENTRIES_MAX)
        return True

    def begin_stacks(self, entries: int = 1) -> bool:
        """Starts to record the stack of every new block. With `entries` > 1 also keeps that many newest allocations as
        events, without stacks. False as above."""
        if not torch.cuda.is_initialized() or not self._is_free():
            return False
        self.stacks = self._kept_stacks = True
        if entries > 1:
            self._switch("all", "state", entries, only="alloc")
        else:
            self._switch("state", "state", 1)
        return True

    def newest(self) -> list[list[dict[str, Any]]]:
        traces: list[list[dict[str, Any]]] = snapshot(segments=False)["device_traces"] if self.stacks else []
        return traces

    def stop_stacks(self) -> None:
        if self.stacks:
            self._switch(None, None, 1)
            self.stacks = False

    def end(self) -> list[list[dict[str, Any]]] | None:
        """The events since `begin` by device, oldest first. None if the user took over, or there were too many."""
        if not self.recording:
            return None
        traces: list[list[dict[str, Any]]] = snapshot(segments=False)["device_traces"]
        self.stop()
        return None if any(len(trace) >= ENTRIES_MAX for trace in traces) else traces

    def stop(self) -> None:
        """Stops recording events; torch drops them."""
        if self.recording:
            self._switch(None, None, ENTRIES_MAX)
            self.recording = False

    def remove(self) -> None:
        """Restores the patches, unless some of our stacks may still have to be hidden."""
        if not (self._kept_stacks or self._inherited):
            self._patches.restore()

    def disown(self) -> None:
        """In a forked child: the recording cannot be switched off there, but stays hidden."""
        self._inherited = self.on()
        self.recording = self.stacks = False

    @property
    def theirs(self) -> bool:
        """Whether the user records, or has recorded."""
        return self._theirs

    def on(self) -> bool:
        """Whether we record, or a forked child inherited a recording."""
        return self.recording or self.stacks or self._inherited

    def _is_theirs(self) -> bool:
        """Whether the user records already, or blocks have stacks from an earlier recording by the user."""
        if self._record is None or self._enabled is None or not torch.cuda.is_initialized() or not tracks_blocks():
            return False
        return bool(self._enabled()) or any(_with_stack(torch.cuda.memory._snapshot()))

    def _is_free(self) -> bool:
        if self._record is None or self._enabled is None or self.on() or self._theirs or not tracks_blocks():
            return False
        return not self._enabled()

    def _switch(self, kept: str | None, stacks: str | None, entries: int, *, only: str | None = None) -> None:
        assert self._record is not None
        arguments: list[Any] = [kept, stacks, "python", entries]
        for more in _MORE:
            if only is not None and _SKIPPED in more:
                more = tuple([*_SKIPPED, *_COUNTED - {only}] if each is _SKIPPED else each for each in more)
            try:
                self._record(*arguments, *more)
            except TypeError as error:  # arguments of another torch version
                pass_on(error)
                continue
            return
        self.recording = self.stacks = False
        raise RuntimeError("this torch's history of allocations takes arguments that are not known here")

    # ------------------------------------------------------------------------------------------- what the user calls

    def _replace(self, name: str, instead: Callable[..., Any]) -> None:
        original = getattr(torch._C, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            try:
                return instead(original, *args, **kwargs)
            except BaseException as error:
                leave_no_frame(error)
                leave_no_frame(error)  # that of `instead`
                raise

        self._patches.replace(torch._C, name, replaced)

    def _records(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        enabled, context = (*args, *kwargs.values(), None, None)[:2]
        self._give_way(enabled, context)
        return original(*args, **kwargs)

    def _leave_it_to_the_user(self, enabled: object, context: object) -> None:
        self.stop()
        self.stop_stacks()
        self._own_stacks = context == "all"
        if enabled and not self._theirs:
            self._theirs = True
            if self._kept_stacks:
                self._standing = {}
                for of, each in _with_stack(snapshot(traces=False)):
                    self._standing[of, each["address"]] = each["frames"]

    def _reads(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        on = self.on()
        read = original(*args, **kwargs)
        if on or self.on():
            read["device_traces"] = [[] for _ in read["device_traces"]]
            if "external_annotations" in read:  # newer torch: begin and end of each optimizer step
                read["external_annotations"] = []
        if self._kept_stacks:
            self._clean(read, self._standing, self._own_stacks)
        return read

    def _asks(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        enabled = original(*args, **kwargs)
        return False if self.on() else enabled


def _with_stack(read: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The segments and blocks of a snapshot that have a stack."""
    for segment in read["segments"]:
        if segment.get("frames"):
            yield "segment", segment
        for block in segment["blocks"]:
            if block.get("frames"):
                yield "block", block


def _clean(read: dict[str, Any], standing: _Stacks | None, own_stacks: bool) -> None:
    """Removes all stacks, or with `standing` only those, then also from events without stacks of their own."""
    nothing: list[Any] = []
    if standing is None:
        for _, each in _with_stack(read):
            each["frames"] = nothing
        return
    made: set[tuple[str, int]] = set()
    for trace in read["device_traces"] if standing else ():
        for event in trace:
            action = event["action"]
            key = ("segment" if action.startswith("segment") else "block", event.get("addr", 0))
            if action in _MAKES:
                made.add(key)
            elif not own_stacks and key not in made and key in standing and event.get("frames") == standing[key]:
                del event["frames"]
    for of, each in _with_stack(read):
        key = of, each["address"]
        if key not in made and each["frames"] == standing.get(key):
            each["frames"] = nothing
