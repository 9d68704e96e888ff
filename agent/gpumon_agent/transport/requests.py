"""What viewers asked for: noted as the helper's answer is heard, done at the next boundary, in the training thread.

Reading the allocator takes one moment, for nothing else of the step may run; what is made of it is encoded a slice a
boundary, and the helper writes it to the disk. One request of a kind waits at a time. Nothing is done while a CUDA
graph is captured; nothing for a device before CUDA began.
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
OOM_AGAIN_NS = 10_000_000_000  # a script that catches one out-of-memory after the other is read this often


class Requests:
    """`say` hands events to viewers, `tell` is a notice, `rang` asks for `carry_out` at the next boundary.

    `census` begins one: None, or why not. `now`: step, phase and its beginning.
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
        self.room: dict[int, int] = {}
        """device → bytes this process can have there, as a viewer told last"""
        self.kept: dict[int, tuple[bytes, ...]] = {}
        """device → its newest `Segments`, encoded: part of the static picture"""
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
        """The helper has looked at it already, and told the viewer that it will be done."""
        if request.what == wire.ROOM:
            if request.available is not None:
                self.room[request.device] = request.available
            return
        self._wanted[request.what] = request
        self._rang()

    def picture(self) -> list[bytes]:
        """What a viewer that comes late is shown."""
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
        # the page offers the devices that have a trace, be it an empty one
        rest = {**raw.rest, "device_traces": [[] for _ in range(raw.devices)]}
        self._write_file(memory_viz.pieces(raw.segments, rest), step, t_ns)

    def _dear(self, raw: blocks.Raw) -> None:
        if raw.spent_ns > PROMISED_NS:
            self._tell(f"reading the allocator's blocks stopped the training for {raw.spent_ns // 1_000_000} ms")

    def _out_of_memory(self, device: int) -> None:
        """Before the exception is raised: the allocator as it was when it could not go on."""
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
