"""Viewers' requests: noted when the helper's answer is read, done at the next boundary, in the training thread.

The allocator is read in one go, since the step must not go on meanwhile, and so are the owners of its blocks. The
result is encoded in slices at boundaries; the helper writes files. Only a step whose graph is read shows what autograd
saved: blocks wait for the next one, at most `GRAPH_WITHIN_NS`. One request of each kind can wait. Nothing is done
while a CUDA graph is captured, and nothing for a device before CUDA is initialized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from gpumon_agent import wire
from gpumon_agent.guard import Guard
from gpumon_agent.oom import memory_viz
from gpumon_agent.transport import blocks

if TYPE_CHECKING:
    from gpumon_agent.attribution.block_owners import Owned

PROMISED_NS = 100_000_000
GRAPH_WITHIN_NS = 5_000_000_000
OOM_AGAIN_NS = 10_000_000_000  # if a script catches one out-of-memory after another, blocks are read this often


class Requests:
    """`say` sends events to viewers, `tell` sends a notice, `rang` requests `carry_out` at the next boundary.

    `census` starts one and returns None, or why not. `now`: step, phase and its start. `owned`: the owners of a
    device's blocks. `walked`: whether a graph of this step was read; `graph_to_come`: whether it is worth waiting
    for one; `await_graph` is told whether one is awaited.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        now: Callable[[], tuple[int, str, int]],
        say: Callable[[Iterable[wire.Event | bytes | None]], None],
        write_file: Callable[[Iterable[bytes], int, int], None],
        tell: Callable[[str], None],
        rang: Callable[[], None],
        recording: Callable[[], bool],
        census: Callable[[], str | None] | None = None,
        owned: Callable[[int], Owned | None] = lambda _: None,
        walked: Callable[[], bool] = lambda: False,
        graph_to_come: Callable[[], bool] = lambda: False,
        await_graph: Callable[[bool], object] = bool,
    ) -> None:
        self.budget: dict[int, int] = {}
        """device → bytes this process can have there, as a viewer last sent"""
        self.kept: dict[int, tuple[bytes, ...]] = {}
        """device → its newest `Segments`, encoded, for the static picture"""
        self._now = now
        self._say = say
        self._write_file = write_file
        self._tell = tell
        self._rang = rang
        self._census = census
        self._owned = guard.protect("owners of blocks", owned)
        self._walked = walked
        self._graph_to_come = graph_to_come
        self._await_graph = await_graph
        self._wait_until_ns = 0  # when blocks are read even so; 0: none wait
        self._wanted: dict[str, wire.Request] = {}  # by what
        self._numbers = count()
        self._oom_ns: dict[int, int] = {}
        self._recording = recording
        self.take: Callable[[wire.Request], object] = guard.protect("request", self._take)
        self.carry_out = guard.protect("request carried out", self._carry_out)
        self.out_of_memory = guard.protect("blocks at out-of-memory", self._out_of_memory)

    def _take(self, request: wire.Request) -> None:
        """The helper has already checked and accepted it."""
        if request.what == wire.ROOM:
            if request.available is not None:
                self.budget[request.device] = request.available
            return
        self._wanted[request.what] = request
        self._rang()

    def picture(self) -> list[bytes]:
        """For late viewers."""
        return [part for parts in self.kept.values() for part in parts]

    def _segments(
        self,
        raw: blocks.Raw,
        device: int,
        at: tuple[int, str],
        t_ns: int,
        reason: str,
        owned: Owned | None,
        walked: bool | None,
    ) -> Iterator[bytes | None]:
        number = next(self._numbers)
        codes, holders = owned or (None, ())
        for made in blocks.made_of(raw, device, codes):
            yield None
            if made is not None:
                parts: list[bytes] = []
                for part in blocks.encoded(made, device, number, at, t_ns, reason, raw.spent_ns, holders, walked):
                    parts.append(part)
                    yield part
                self.kept[device] = tuple(parts)

    def _carry_out(self) -> None:
        if _cuda() and (_captures() or self._recording()):
            self._rang()
            return
        later: dict[str, wire.Request] = {}
        if wire.BLOCKS in self._wanted and self._waits():
            later[wire.BLOCKS] = self._wanted.pop(wire.BLOCKS)
        while self._wanted:
            what = next(iter(self._wanted))
            request = self._wanted.pop(what)
            if what == wire.CENSUS:
                refused = self._census() if self._census is not None else None
                if refused:
                    self._tell(f"{wire.NOT_DONE}a census: {refused}")
            elif what == wire.BLOCKS:
                self._read(request.device, "asked")
            else:
                self._dump()
        if later:
            self._wanted = later
            self._rang()

    def _waits(self) -> bool:
        """Whether blocks wait for the end of a forward whose graph is read."""
        now = time.monotonic_ns()
        waits = self._graph_to_come() and (not self._wait_until_ns or now < self._wait_until_ns)
        self._wait_until_ns = (self._wait_until_ns or now + GRAPH_WITHIN_NS) if waits else 0
        self._await_graph(waits)
        return waits

    def _read(self, device: int, reason: str) -> None:
        t_ns = time.monotonic_ns()
        step, phase, _ = self._now()
        walked = self._walked() and not (reason == "oom" and phase == wire.FORWARD)  # that graph is not complete
        try:
            raw = blocks.read(blocks.BLOCKS_AT_OOM_MAX if reason == "oom" else blocks.BLOCKS_MAX)
        except blocks.TooDear as why:
            self._tell(f"{wire.NOT_DONE if reason == 'asked' else ''}blocks were not read: {why}")
            return
        began = time.monotonic_ns()
        owned = self._owned(device)
        raw = raw._replace(spent_ns=raw.spent_ns + time.monotonic_ns() - began)
        if reason == "asked":
            self._dear(raw)
        self._say(self._segments(raw, device, (step, phase), t_ns, reason, owned, None if owned is None else walked))

    def _dump(self) -> None:
        t_ns = time.monotonic_ns()
        step, phase, _ = self._now()
        try:
            raw = blocks.read()
        except blocks.TooDear as why:
            self._say((wire.Snapshot(t_ns, step, why=str(why)),))
            return
        self._dear(raw)
        # memory_viz lists only devices with a trace, even an empty one
        rest = {**raw.rest, "device_traces": [[] for _ in range(raw.devices)], **memory_viz.moment(step, phase)}
        self._write_file(memory_viz.pieces(raw.segments, rest), step, t_ns)

    def _dear(self, raw: blocks.Raw) -> None:
        if raw.spent_ns > PROMISED_NS:
            self._tell(f"reading the allocator's blocks paused the training for {raw.spent_ns // 1_000_000} ms")

    def _out_of_memory(self, device: int) -> None:
        """Reads the blocks before the exception is raised."""
        now = time.monotonic_ns()
        last = self._oom_ns.get(device)
        if last is None or now - last >= OOM_AGAIN_NS:
            self._oom_ns[device] = now
            self._read(device, "oom")


def _cuda() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())


def _captures() -> bool:
    import torch

    return bool(torch.cuda.is_current_stream_capturing())
