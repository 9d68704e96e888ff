"""Viewers' requests: noted when the helper's answer is read, done at the next boundary, in the training thread.

The allocator is read in one go, since the step must not go on meanwhile. The result is encoded in slices at boundaries;
the helper writes files. One request of each kind can wait. Nothing is done while a CUDA graph is captured, and nothing
for a device before CUDA is initialized.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from gpumon_agent import wire
from gpumon_agent.guard import Guard
from gpumon_agent.oom import memory_viz
from gpumon_agent.transport import blocks

PROMISED_NS = 100_000_000
OOM_AGAIN_NS = 10_000_000_000  # if a script catches one out-of-memory after another, blocks are read this often


class Requests:
    """`say` sends events to viewers, `tell` sends a notice, `rang` requests `carry_out` at the next boundary.

    `census` starts one and returns None, or why not. `now`: step, phase and its start.
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
        self, raw: blocks.Raw, device: int, at: tuple[int, str], t_ns: int, reason: str
    ) -> Iterator[bytes | None]:
        number = next(self._numbers)
        for made in blocks.made_of(raw, device):
            yield None
            if made is not None:
                parts: list[bytes] = []
                for part in blocks.encoded(made, device, number, at, t_ns, reason, raw.spent_ns):
                    parts.append(part)
                    yield part
                self.kept[device] = tuple(parts)

    def _carry_out(self) -> None:
        if _cuda() and (_captures() or self._recording()):
            self._rang()
            return
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

    def _read(self, device: int, reason: str) -> None:
        t_ns = time.monotonic_ns()
        step, phase, _ = self._now()
        try:
            raw = blocks.read(blocks.BLOCKS_AT_OOM_MAX if reason == "oom" else blocks.BLOCKS_MAX)
        except blocks.TooDear as why:
            self._tell(f"{wire.NOT_DONE if reason == 'asked' else ''}blocks were not read: {why}")
            return
        if reason == "asked":
            self._dear(raw)
        self._say(self._segments(raw, device, (step, phase), t_ns, reason))

    def _dump(self) -> None:
        t_ns = time.monotonic_ns()
        step, _, _ = self._now()
        try:
            raw = blocks.read()
        except blocks.TooDear as why:
            self._say((wire.Snapshot(t_ns, step, why=str(why)),))
            return
        self._dear(raw)
        # memory_viz lists only devices with a trace, even an empty one
        rest = {**raw.rest, "device_traces": [[] for _ in range(raw.devices)]}
        self._write_file(memory_viz.pieces(raw.segments, rest), step, t_ns)

    def _dear(self, raw: blocks.Raw) -> None:
        if raw.spent_ns > PROMISED_NS:
            self._tell(f"reading the allocator's blocks stopped the training for {raw.spent_ns // 1_000_000} ms")

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
