"""The training process's side: writes the agent's events to shared memory and reads viewers' requests.

There is no thread, socket, open descriptor or lasting child of ours in the training process: a helper process has all
of them (helper.py). Everything here runs in the training thread, at phase boundaries, and never waits. Events go into a
ring, which loses the oldest if the helper does not keep up; descriptions, censuses and block maps into a queue that
loses nothing, a little at each boundary.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpumon_agent import endpoint, environment, wire
from gpumon_agent.guard import is_the_users, pass_on, say
from gpumon_agent.noted import Noted
from gpumon_agent.oom import report_file
from gpumon_agent.quiet_mark import QuietMark
from gpumon_agent.registry import REGISTRY
from gpumon_agent.thread_clock import ThreadClock
from gpumon_agent.transport import exit_code, messages, spawn
from gpumon_agent.transport.memory import ANSWER, CALLED, QUIET, START, Memory
from gpumon_agent.transport.pages import Pages, Status
from gpumon_agent.transport.process import DESCRIPTOR
from gpumon_agent.transport.ring import CHUNK_BYTES, LongWriter, Writer, one_thread_at_a_time

_FIRST = START.offset + START.page_bytes  # the page written first, with a header of 16 bytes
BOOTSTRAP = (
    "import json, os, struct, sys; "
    f"n = struct.unpack('=QII', os.pread({DESCRIPTOR}, 16, {_FIRST}))[1]; "
    f"sys.path[:] = json.loads(os.pread({DESCRIPTOR}, n, {_FIRST + 16}))['path']; "
    "sys.modules['typing_extensions'] = None; "
    "from gpumon_agent.transport import helper; helper.main()"
)
"""The helper gets the training's sys.path, wherever pyzmq is; its other parameters are beside it.

msgspec prefers typing_extensions to `typing`. The former imports inspect, ast and tokenize: 2.7 of the helper's 16.4
MiB.
"""
RESTARTS_MAX = 3
_SILENT_NS = 3_000_000_000  # of the helper, which writes every second: then we check that it is alive
_PUMP_NS, _PUMP_MAX_NS = 200_000, 5_000_000  # per boundary, for encoding long messages
_TOGETHER_NS = 50_000_000
_PUMP_SHARE = 50  # 1/50 of the time since the last boundary
_VIEWER_AWAITED_S = 30.0  # if GPUMON_AWAIT_VIEWER is 1: a dry run may end before a viewer can attach
_LAST_WORDS_S = 0.04


class Transport:
    """One agent's. `drain`: events since the last call; `now`: what the training does now."""

    def __init__(
        self,
        drain: Callable[[], list[tuple[int, Any]]],
        picture: Callable[[], Iterable[wire.Event | bytes]],
        state: Callable[[], messages.State],
        descriptor: endpoint.Descriptor,
        *,
        now: Callable[[], tuple[int, str, int]],
        counters: Callable[[], tuple[int, int, bool, int | None]],
        take: Callable[[wire.Request], object],
        mark: QuietMark,
    ) -> None:
        """`picture`: what viewers need besides events, for a new helper. `counters`: the governor's rate, what the
        agent costs (`Cost.packed`), whether CUDA has begun, and torch's pinned bytes. `take`: a viewer's request."""
        self.descriptor = descriptor
        self.unsent = 0
        """events or messages that were too long or had no room"""
        self._drain = drain
        self._picture = picture
        self._state = state
        self._now = now
        self._counters = counters
        self._take = take
        self._mark = mark
        self._memory: Memory | None = None
        self._events: Writer | None = None
        self._long: LongWriter | None = None
        self._status: Status
        self._back: Pages
        self._helper = 0  # its pid
        self._helper_began: int | None = None
        self._restarts = 0
        self._waiting: deque[tuple[int, Iterator[bytes | None]]] = deque()
        self._told_state: messages.State | None = None
        self._answer = messages.FromHelper()
        self._request = self._line = 0  # the newest handled
        self._called = 0  # the word CALLED, as last looked at
        self._looked_ns = self._flushed_ns = 0
        self._counted = (0, 0, 0, False, 0)  # the counters of the status, as last flushed
        self._picture_due = False  # a new helper needs all of it
        self._unwatched = False  # there is and will be no helper
        self._busy = False  # meanwhile calls by other threads or signal handlers do nothing

    @property
    def running(self) -> bool:
        return self._memory is not None

    @property
    def asked(self) -> bool:
        """Of one that runs: whether `flush` has something to hear, or to send besides events."""
        assert self._memory is not None
        assert self._long is not None
        called = self._memory.words[CALLED] != self._called
        return called or self._picture_due or bool(self._waiting) or self._long.waiting_bytes > 0

    # --------------------------------------------------------------------------------------------------- start and end

    def start(self) -> None:
        """Starts the helper. If that fails, prints one line, and training goes on unwatched."""
        try:
            memory = Memory.create()
        except OSError as error:
            pass_on(error)
            self._unwatched = True
            say(f"no viewer can attach to this process: no memory to share with the helper ({error.strerror})")
            return
        if self._begin(memory):
            REGISTRY.transports.add(self)
            self._say_all()
            self.pump(ThreadClock(_PUMP_NS * 100))
            if environment.value("GPUMON_AWAIT_VIEWER") == "1":
                self._await_viewer()

    def _begin(self, memory: Memory) -> bool:
        try:
            number = max(self._request, self._line)
            start = messages.Start(_path(), self.descriptor, self._answer.seq, number, self._restarts > 0)
            memory.words[START.latest] = memory.words[ANSWER.latest] = memory.words[CALLED] = 0  # of a copy
            Pages(memory, START).write(msgspec.json.encode(start))
            helper = spawn.start(BOOTSTRAP, memory.fd, environment=_environment())
        except (OSError, ValueError, spawn.CannotStart) as error:
            pass_on(error)
            memory.close()
            self._unwatched = True
            say(f"no viewer can attach to this process: {error}")
            return False
        finally:
            memory.close_descriptor()
        began, now = endpoint.start_time(helper), time.monotonic_ns()
        events, long = Writer(memory, after=self._events), LongWriter(memory, after=self._long)
        status, back = Status(memory), Pages(memory, ANSWER)
        answer = messages.FromHelper(seq=self._answer.seq)  # the old helper's state is void
        self._mark.share(memory.words, QUIET, CALLED)
        # no calls from here on, so that no signal handler can raise in between
        self._helper, self._helper_began, self._memory = helper, began, memory
        self._events, self._long, self._status, self._back = events, long, status, back
        self._answer, self._looked_ns, self._picture_due, self._called = answer, now, True, 0
        return True

    def _await_viewer(self) -> None:
        until = time.monotonic() + _VIEWER_AWAITED_S
        while not self._answer.answered and time.monotonic() < until and self.running:
            time.sleep(0.01)
            self.flush()

    def wait_ready(self, seconds: float) -> bool:
        """Whether viewers can attach now."""
        until = time.monotonic() + seconds
        while not self._answer.ready and time.monotonic() < until and self.running:
            time.sleep(0.005)
            self.flush()
        return self._answer.ready

    def close(self, *, exits: bool) -> None:
        """Call after Goodbye is recorded. `exits`: the process ends now; its exit code is left for the helper."""
        if self._memory is None:
            return
        memory = self._memory
        self.flush()
        until = time.monotonic() + _LAST_WORDS_S
        while self._waiting or (self._long is not None and self._long.waiting_bytes):
            self.pump(ThreadClock(int(_LAST_WORDS_S * 1e9)))
            if time.monotonic() > until:
                break
            time.sleep(0.002)
        REGISTRY.transports.discard(self)
        self._memory = None
        if exits:
            exit_code.write_at_exit(memory)  # which stays mapped for it
        else:
            self._forget(memory)

    def in_child(self) -> None:
        self.disown()

    def disown(self) -> None:
        """For a forked child: the memory is the parent's."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._forget(memory)

    def _forget(self, memory: Memory) -> None:
        self._mark.keep()
        self._events = self._long = None
        del self._status, self._back
        memory.close()

    # --------------------------------------------------------------------------------------------- at phase boundaries

    # A lock would stay taken if a signal handler raises when `acquire` returns. Between reading `_busy` and `try` no
    # handler and no other thread runs (see ring.Writer).

    @one_thread_at_a_time
    def flush(self) -> None:
        """Sends recorded events and reads viewers' requests."""
        if self._busy:
            return
        self._busy = True
        try:
            if self._memory is not None:
                self._flush()
            elif self._unwatched:
                self._drain()  # outlooks still learn from it
        finally:
            self._busy = False

    @one_thread_at_a_time
    def tell(self) -> None:
        """At each boundary: what the training does now. Short phases are sent together: a kill loses the last 50 ms."""
        if self._busy:
            return
        step, phase, since = self._now()
        if since - self._flushed_ns > _TOGETHER_NS:
            self.flush()
        elif self._memory is not None:
            self._status.write(step, phase, since, *self._counted)

    def _flush(self) -> None:
        events, long = self._events, self._long
        assert events is not None
        assert long is not None
        if self._picture_due:
            self._say_all()
        for _, event in self._drain():
            self._put(events, event)
        step, phase, since = self._now()
        rate, cost, cuda, pinned = self._counters()
        self._counted = rate, cost, self._request, cuda, 0 if pinned is None else pinned + 1
        self._status.write(step, phase, since, *self._counted)
        if self._waiting or long.waiting_bytes:
            self._pump(ThreadClock(min(max(_PUMP_NS, (since - self._flushed_ns) // _PUMP_SHARE), _PUMP_MAX_NS)))
        self._flushed_ns = since
        assert self._memory is not None
        self._called = self._memory.words[CALLED]  # before the pages, which are written first
        encoded = self._back.read()
        if encoded is not None:
            self._hear(encoded)
        elif since - self._looked_ns > _SILENT_NS:
            self._look_at_helper(since)

    def _put(self, events: Writer, event: Any) -> None:
        try:
            events.put(wire.encode_event(event))
        except ValueError as error:  # too long
            pass_on(error)
            if isinstance(event, Noted):
                for each in event.events():
                    self._put(events, each)
            else:
                self.unsent += 1

    def _hear(self, encoded: bytes) -> None:
        self._looked_ns = time.monotonic_ns()
        self._answer = answer = messages.decode_answer(encoded)
        for number, text in answer.said:
            if number > self._line:
                self._line = number
                say(text)
        for number, request in answer.requests:
            if number > self._request:
                self._request = number
                self._take(request)

    def _look_at_helper(self, now_ns: int) -> None:
        """It is silent. If it is gone, a new one is started."""
        self._looked_ns = now_ns
        if endpoint.start_time(self._helper) == self._helper_began:
            return
        old = self._memory
        assert old is not None
        self._memory = None
        try:
            self._mark.keep()
            self._replace_helper(old)
        except BaseException:
            if self._memory is None:  # a signal handler's: try again next time
                self._memory = old
            raise
        old.close()

    def _replace_helper(self, old: Memory) -> None:
        self._waiting.clear()
        self._restarts += 1
        if self._restarts > RESTARTS_MAX:
            self._unwatched = True
            say("its helper process died repeatedly: no viewer can watch this run any more")
            return
        try:
            memory = old.copied()
        except OSError as error:
            pass_on(error)
            self._unwatched = True
            say(f"its helper process died, and there is no memory for another ({error.strerror})")
            return
        if self._begin(memory):
            self._say_all()

    # -------------------------------------------------------------------------------------------------- long messages

    def announce(self, descriptor: endpoint.Descriptor | None = None) -> None:
        """Call when the descriptor file or fields of heartbeats may have changed."""
        if descriptor is not None:
            self.descriptor = descriptor
        self.tell_state(descriptor)

    def tell_state(self, descriptor: endpoint.Descriptor | None = None) -> None:
        state = self._state()
        if descriptor is not None:
            state.descriptor = descriptor
        if state != self._told_state:
            self._told_state = state
            self._send(messages.STATE, iter((messages.encode(state),)))

    def _say_all(self) -> None:
        self._told_state = None
        self.say(self._picture())
        self.tell_state()
        self._picture_due = False

    def say(self, events: Iterable[wire.Event | bytes | None]) -> None:
        """Queues new parts of the picture, encoded as time allows. None: a slice of work ends."""
        self._send(messages.LONG, _batches(iter(events)))

    def write_file(self, pieces: Iterable[bytes | None], step: int, t_ns: int) -> None:
        """The helper writes them beside the out-of-memory reports."""
        self._send(messages.PIECE, _pieces(iter(pieces), step, t_ns))

    def _send(self, kind: int, made: Iterator[bytes | None]) -> None:
        """Without a helper it would wait for ever."""
        if self._memory is not None:
            self._waiting.append((kind, made))

    @one_thread_at_a_time
    def pump(self, clock: ThreadClock) -> None:
        """Encodes as much as fits that time."""
        if self._busy:
            return
        self._busy = True
        try:
            if self._memory is not None:
                self._pump(clock)
        finally:
            self._busy = False

    def _pump(self, clock: ThreadClock) -> None:
        long = self._long
        assert long is not None
        try:
            while self._waiting and not clock.over():
                kind, made = self._waiting[0]
                message = next(made, self)
                if message is self:
                    self._waiting.popleft()
                elif isinstance(message, bytes) and not long.put(kind, message):
                    self.unsent += 1
        except BaseException as error:
            self._picture_due = self._picture_due or is_the_users(error)  # the half-encoded message is lost
            raise
        long.pump()


def _path() -> list[str]:
    """sys.path, absolute: the helper has another working directory."""
    here = [os.path.abspath(each) for each in sys.path if isinstance(each, str)]  # noqa: PTH100
    own = str(Path(__file__).parents[2])
    return here if own in here else [*here, own]


def _environment() -> dict[str, str]:
    known = dict(os.environ)
    folder = known.get(report_file.VARIABLE)
    if folder and folder != report_file.OFF:
        known[report_file.VARIABLE] = os.path.abspath(folder)  # noqa: PTH100
    return known


def _batches(events: Iterator[wire.Event | bytes | None]) -> Iterator[bytes | None]:
    batch: list[msgspec.Raw] = []
    size = 0
    for event in events:
        if event is None:
            yield None
            continue
        data = event if isinstance(event, bytes) else wire.encode_event(event)
        batch.append(msgspec.Raw(data))
        size += len(data)
        if size > CHUNK_BYTES // 2:  # a usual message is one chunk
            yield messages.encode(batch)
            batch, size = [], 0
        elif not len(batch) % 16:
            yield None
    if batch:
        yield messages.encode(batch)


def _pieces(pieces: Iterator[bytes | None], step: int, t_ns: int) -> Iterator[bytes | None]:
    for piece in pieces:
        yield None if piece is None else messages.encode(messages.Piece(step, t_ns, piece))
    yield messages.encode(messages.Piece(step, t_ns, b""))
