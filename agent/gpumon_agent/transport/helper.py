"""The helper process: reads the training process's events from shared memory and answers viewers.

It keeps the recent past and the picture for late viewers, owns the ZeroMQ sockets, admits only this user's processes,
takes their requests, and writes to disk. It is a separate process so that its errors, and libzmq's abort(), cannot
reach the training. It ends when the training process has ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from threading import Thread

import msgspec

from gpumon_agent import cost, endpoint, noted, wire
from gpumon_agent.guard import guard, protect
from gpumon_agent.oom import last_known
from gpumon_agent.oom.memory_viz import SnapshotWriter
from gpumon_agent.oom.report_file import ReportFile
from gpumon_agent.transport import exit_code, messages, process
from gpumon_agent.transport.control import Control
from gpumon_agent.transport.memory import ANSWER, CALLED, START, Memory
from gpumon_agent.transport.pages import Current, Pages, Status
from gpumon_agent.transport.picture import Picture
from gpumon_agent.transport.publisher import Publisher
from gpumon_agent.transport.ring import LongReader, Reader
from gpumon_agent.wire.recording import recorded

WAITS = "at the next phase boundary"
_NO_CUDA = "PyTorch's allocator has no segments here: CUDA was not used"
_KEPT = 8  # requests and lines kept until the training process has seen them
_LINE_CHARS = 400  # so that all fit an answer
_KEPT_IN_S = 5.0  # a report of an out-of-memory, else it is only in the runtime directory
_EXIT_S = 10.0  # from Goodbye until the process is gone: CUDA and NCCL shut down slowly


class Helper:
    """A Publisher's source, in place of the training process."""

    def __init__(self, memory: Memory, start: messages.Start) -> None:
        self.descriptor = start.descriptor
        self.trainer = process.Trainer(self.descriptor.pid, self.descriptor.start_time, self.descriptor.program)
        self._memory = memory
        self._reader = Reader.oldest(memory)
        self._long = LongReader(memory)
        self._status = Status(memory)
        self._back = Pages(memory, ANSWER)
        self._picture = Picture()
        self._state = messages.State()
        self._now = Current(0, "", 0, (1, 0, 0, 0, 0))
        self._seq = start.seq
        self._lost = 0
        self._requests: list[tuple[int, wire.Request]] = []
        self._said: list[tuple[int, str]] = []
        self._number = start.number
        self._answered = messages.FromHelper()
        self._begins = True
        self._box = ReportFile()
        self._file: SnapshotWriter | None = None
        self._goodbye: wire.Goodbye | None = None
        self._goodbye_ns = 0
        guard.listen(self.tell)
        self._ahead = protect("outlook on the disk", self._write_ahead)
        self._failed: wire.Oom | None = None  # its past is not yet on disk
        self._keep_past = protect("out-of-memory's past on the disk", self._write_past)
        self._keeping: Thread | None = None
        self._last = last_known.File(self._box, self.descriptor.unix_ns, self.descriptor.pid, written=start.again)
        self._last_ns = time.monotonic_ns()
        self._last_phase: bytes | None = None
        self._resident: int | None = None
        self._keep_last = protect("last boundary on the disk", self._write_last)
        self._forget_last = protect("last boundary on the disk", self._last.remove)
        self.publisher = Publisher(
            self,
            self._picture.events,
            self.heartbeat,
            self.descriptor,
            control=Control(self.descriptor.nonce, self.take),
            tell=self.tell,
        )

    # ------------------------------------------------------------------------------- called by the publisher, each turn

    def drain(self) -> list[tuple[int, bytes]]:
        """Events since the last call. Most are not decoded; only their kind is read."""
        ended = self.trainer.ended(wrote=self._reader.has_more())  # first, so that its last events are read afterwards
        if self._begins and self.publisher.ready:
            self._begins = False
            process.lower_priority()  # not earlier: at nice 19 starting takes many seconds beside a busy training
        self._take_long()
        events: list[tuple[int, bytes]] = []
        for payload in (each for _, record in self._reader.take() for each in noted.encoded(record)):
            try:
                kind = wire.kind(payload)
                if kind == "phase":
                    self._last_phase = payload
                elif kind != "step" and self._heed(wire.decode_event(payload), payload):
                    continue
                events.append((self._seq, payload))
            except wire.WireError:  # viewers notice the gap in the numbers
                pass
            self._seq += 1
        self._seq += self._reader.lost - self._lost
        self._lost = self._reader.lost
        goodbye = self._last_word(ended)
        if goodbye is not None:
            events.append((self._seq, wire.encode_event(goodbye)))
            self._seq += 1
        if self._failed is not None:
            self._keep_past(self._failed, events)
            self._failed = None
        now = time.monotonic_ns()
        if ended or goodbye is not None:
            if ended and self._goodbye is None and not self.trainer.runs_another():
                self._keep_last(ended=True)
            else:
                self._forget_last()
            self.publisher.leave(goodbye)
        elif now - self._last_ns > last_known.EVERY_S * 1e9:
            self._last_ns = now
            self._keep_last(ended=False)
        self._answer()
        return events

    def heartbeat(self) -> wire.Heartbeat:
        self._answer(alive=True)
        now = time.monotonic_ns()
        at = self._at()
        share, error = cost.unpacked(at.counters[1]) or (None, None)
        return wire.Heartbeat(
            now,
            at.step,
            at.phase,
            max(0, now - at.since_ns),
            self._lost,
            at.counters[0],
            None,
            _resident(self.descriptor.pid),
            self._state.devices,
            self._state.off,
            at.counters[4] - 1 if at.counters[4] else None,
            max(0, time.time_ns() - self.descriptor.unix_ns) // 1_000_000_000,
            share,
            error,
        )

    def take(self, request: wire.Request) -> wire.Reply:
        """Accepts or refuses a viewer's request."""
        if request.what == wire.ROOM:
            if request.available is None or not 0 <= request.device < 64:
                return wire.Reply(False, "the request has no memory budget or no device")
        elif request.what not in (wire.CENSUS, wire.BLOCKS, wire.SNAPSHOT_FILE):
            return wire.Reply(False, f"this agent does not know the request {request.what!r}: upgrade gpumon-agent")
        elif request.what != wire.CENSUS and not self._at().counters[3]:
            return wire.Reply(False, _NO_CUDA)
        elif any(request.what == known.what and number > self._at().counters[2] for number, known in self._requests):
            return wire.Reply(True, f"already requested: {WAITS}")
        self._number += 1
        same = [each for each in self._requests if (each[1].what, each[1].device) != (request.what, request.device)]
        self._requests = [*same, (self._number, request)][-_KEPT:]
        self._answer()
        return wire.Reply(True, "" if request.what == wire.ROOM else WAITS)

    def tell(self, text: str) -> None:
        """Prints a line in the training's terminal."""
        self._number += 1
        self._said = [*self._said, (self._number, wire.clean(text, _LINE_CHARS))][-_KEPT:]

    def finish(self) -> None:
        """After `serve`: waits for a report that is being copied."""
        if self._keeping is not None:
            self._keeping.join(_KEPT_IN_S)

    # -------------------------------------------------------------------------------------------------------- internal

    def _at(self) -> Current:
        self._now = self._status.read() or self._now
        return self._now

    def _heed(self, event: wire.Event, payload: bytes) -> bool:
        """True: the event is held back (Goodbye waits for the exit code)."""
        if isinstance(event, wire.Goodbye):
            self._goodbye, self._goodbye_ns = event, time.monotonic_ns()
            return True
        if isinstance(event, wire.Ledger):
            self._picture.add(event, payload)
        elif isinstance(event, wire.Outlook) and event.verdict == wire.OOM_AHEAD:
            self._ahead(event)
        elif isinstance(event, wire.Oom) and event.report is not None:
            self._failed = event
        return False

    def _take_long(self) -> None:
        for kind, message in self._long.take():
            if kind == messages.LONG:
                raws = [bytes(raw) for raw in messages.decode_events(message)]
                for raw in raws:
                    self._picture.add(wire.decode_event(raw), raw)
                self.publisher.say(tuple(raws))
            elif kind == messages.STATE:
                state = messages.decode_state(message)
                self._state = state
                if state.descriptor is not None:
                    self.descriptor = state.descriptor
                    self.publisher.announce(self.descriptor)
            elif kind == messages.PIECE:
                self._write(messages.decode_piece(message))

    def _write(self, piece: messages.Piece) -> None:
        if self._file is None:
            self._file = SnapshotWriter(self._box, keep=True)
        self._file.add(piece.data)
        if piece.data:
            return
        file, self._file = self._file, None
        file.end()
        snapshot = wire.Snapshot(piece.t_ns, piece.step, file.path, file.size if file.path else None, file.why)
        self._picture.add(snapshot, wire.encode_event(snapshot))
        self.publisher.say((snapshot,))

    def _write_ahead(self, outlook: wire.Outlook) -> None:
        """Writes it to disk too: there may be no viewer."""
        hello = self._picture.hello
        if hello is not None:
            self._box.write_ahead(hello, outlook)

    def _write_past(self, failed: wire.Oom, newest: list[tuple[int, bytes]]) -> None:
        """Beside the out-of-memory report, so that `gpumon explain --last` knows as much as a viewer."""
        hello = self._picture.hello
        if hello is not None and failed.report is not None:
            described = [(-1, raw) for raw in self._picture.events()]
            events = [*described, *self.publisher.history.events(), *newest]
            self._box.write_past(failed.report, recorded(hello.nonce, time.time_ns(), events))
            self._keeping = Thread(target=self._box.keep, args=(failed.report,), daemon=True)
            self._keeping.start()  # a home on a network may not answer

    def _write_last(self, *, ended: bool) -> None:
        """In case this process is killed too, with its whole container."""
        hello, at = self._picture.hello, self._at()
        if hello is None:
            return
        phase = None if self._last_phase is None else wire.decode_event(self._last_phase)
        figures = (phase.device, phase.allocated, phase.reserved) if isinstance(phase, wire.Phase) else (None,) * 3
        self._resident = _resident(hello.pid) or self._resident  # unreadable once the process is gone
        in_it_s = max(0, time.monotonic_ns() - at.since_ns) / 1e9
        known = last_known.LastKnown(
            time.time(), ended, hello.host, hello.boot_id, hello.pid, hello.start_time, hello.rank, hello.name,
            hello.argv, at.step, at.phase, in_it_s, self._resident, *figures,
        )  # fmt: skip
        self._last.write(known)

    def _last_word(self, ended: bool) -> wire.Goodbye | None:
        """The Goodbye, once certain: a process that "finished" may still have a failing exit code."""
        goodbye = self._goodbye
        if goodbye is None:
            return self._gone() if ended and not self.trainer.runs_another() else None
        if goodbye.reason != "finished":
            return goodbye
        if not ended and time.monotonic_ns() - self._goodbye_ns < _EXIT_S * 1e9:
            return None
        code = exit_code.read(self._memory)
        if code:
            return msgspec.structs.replace(goodbye, reason="exception", detail=f"exit code {code}")
        return goodbye

    def _gone(self) -> wire.Goodbye:
        """It was killed, or ended without Python's exit. The helper notices at once, viewers do not."""
        text = f"process {self.descriptor.pid} is gone, and sent no goodbye"
        at = self._at()
        return wire.Goodbye("lost", time.monotonic_ns(), at.step, at.phase, text)

    def _answer(self, *, alive: bool = False) -> None:
        """Sent when it changes, and with each heartbeat as a sign of life to the training process."""
        answer = messages.FromHelper(
            self.publisher.ready,
            self.publisher.watched,
            self.publisher.answered,
            tuple(self._requests),
            tuple(self._said),
            self._answered.seq,  # alone, no change
        )
        if alive or answer != self._answered:
            answer.seq = self._seq
            self._answered = answer
            self._back.write(messages.encode(answer))
            self._memory.words[CALLED] = self._number


def _resident(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return None


def main() -> None:
    """The entry point, run by `spawn.start`."""
    process.prepare()
    memory = Memory.open(process.DESCRIPTOR)
    encoded = Pages(memory, START).read()
    assert encoded is not None  # written before this process was started
    start = messages.decode_start(encoded)
    if start.again:
        endpoint.remove_left(start.descriptor)
    helper = Helper(memory, start)
    helper.publisher.serve()
    helper.finish()
