"""What viewers asked for: noted on the publisher's thread, done in the training thread at the next boundary.

Reading the allocator is the training thread's, for at that moment nothing else of the step runs; the rest of the work,
and the disk, are the publisher's, a slice a turn. One request of a kind waits at a time. Nothing is done while a CUDA
graph is captured; nothing for a device before CUDA began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import count

from gpumon_agent import wire
from gpumon_agent.guard import Guard
from gpumon_agent.oom.blackbox import BlackBox
from gpumon_agent.viewers import blocks, snapshots

WAITS = "at the next phase boundary"
PROMISED_NS = 100_000_000
OOM_AGAIN_NS = 10_000_000_000  # a script that catches one out-of-memory after the other is read this often
_NO_CUDA = "PyTorch's allocator has no segments here: CUDA was not used"


class Errands:
    """`say` hands events to viewers, `tell` is a notice, `rang` asks for `carry_out` at the next boundary.

    `census` begins one: None, or why not. `now`: step, phase and its beginning.
    """

    def __init__(
        self,
        guard: Guard,
        *,
        now: Callable[[], tuple[int, str, int]],
        say: Callable[[tuple[wire.Event | bytes, ...]], None],
        tell: Callable[[str], None],
        rang: Callable[[], None],
        recording: Callable[[], bool],
        census: Callable[[], str | None] | None = None,
    ) -> None:
        self.room: dict[int, int] = {}
        """device → bytes this process can have there, as a viewer told last"""
        self.kept: dict[int, tuple[bytes, ...]] = {}
        """device → its newest `Segments`, encoded: part of the static picture"""
        self.snapshot: wire.Snapshot | None = None
        self._now = now
        self._say = say
        self._tell = tell
        self._rang = rang
        self._census = census
        self._box = BlackBox()
        self._wanted: dict[str, wire.Request] = {}  # by what; each thread only adds or takes one
        self._works: list[Iterator[None]] = []
        self._numbers = count()
        self._oom_ns: dict[int, int] = {}
        self._recording = recording
        self.take: Callable[[wire.Request], wire.Reply | None] = guard.protect("request", self._take)
        self.carry_out = guard.protect("request carried out", self._carry_out)
        self.out_of_memory = guard.protect("blocks at out-of-memory", self._out_of_memory)

    # ------------------------------------------------------------------------------------------- the publisher's thread

    def _take(self, request: wire.Request) -> wire.Reply:
        if request.what == wire.ROOM:
            if request.available is None or not 0 <= request.device < 64:
                return wire.Reply(False, "how much room, and on which device?")
            self.room[request.device] = request.available
            return wire.Reply(True)
        if request.what not in (wire.CENSUS, wire.BLOCKS, wire.SNAPSHOT_FILE):
            return wire.Reply(False, f"this agent does not know what {request.what!r} is: upgrade gpumon-agent")
        if request.what == wire.CENSUS:
            if self._census is None:
                return wire.Reply(False, "this agent takes no census")
        elif not _cuda():
            return wire.Reply(False, _NO_CUDA)
        waits = request.what in self._wanted
        self._wanted[request.what] = request
        self._rang()
        return wire.Reply(True, f"asked for already: {WAITS}" if waits else WAITS)

    def work(self) -> bool:
        """The next slice of what is to be made ready; False where there is nothing."""
        if not self._works:
            return False
        if next(self._works[0], self) is self:
            self._works.pop(0)
        return True

    def picture(self) -> list[wire.Event | bytes]:
        """What a viewer that comes late is shown."""
        kept: list[wire.Event | bytes] = [part for parts in self.kept.copy().values() for part in parts]
        return kept if self.snapshot is None else [*kept, self.snapshot]

    def _segments(self, raw: blocks.Raw, device: int, at: tuple[int, str], t_ns: int, reason: str) -> Iterator[None]:
        number = next(self._numbers)
        for made in blocks.made_of(raw, device):
            yield
            if made is not None:
                parts: list[bytes] = []
                for part in blocks.encoded(made, device, number, at, t_ns, reason, raw.spent_ns):
                    parts.append(part)
                    yield
                self.kept[device] = tuple(parts)
                self._say(self.kept[device])

    def _file(self, raw: blocks.Raw, at: tuple[int, str], t_ns: int) -> Iterator[None]:
        written = snapshots.Written(self._box)
        # the page offers the devices that have a trace, be it an empty one
        rest = {**raw.rest, "device_traces": [[] for _ in range(raw.devices)]}
        try:
            for piece in snapshots.pieces(raw.segments, rest):
                written.add(piece)
                yield
            written.end()
        finally:
            written.abandon()
        self._told(wire.Snapshot(t_ns, at[0], written.path, written.size if written.path else None, written.why))

    def _told(self, snapshot: wire.Snapshot) -> None:
        self.snapshot = snapshot
        self._say((snapshot,))

    # ---------------------------------------------------------------------------------------------- the training thread

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
        self._works.append(self._segments(raw, device, (step, phase), t_ns, reason))

    def _dump(self) -> None:
        t_ns = time.monotonic_ns()
        step, phase, _ = self._now()
        try:
            raw = blocks.read()
        except blocks.TooDear as why:
            self._told(wire.Snapshot(t_ns, step, why=str(why)))
            return
        self._dear(raw)
        self._works.append(self._file(raw, (step, phase), t_ns))

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
