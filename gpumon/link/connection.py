"""The connection to one agent, from the first attempt to its Goodbye, and what its silence means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import zmq

from gpumon.session.incoming import Incoming, MessageRun
from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor
from gpumon_agent.wire import Received

from . import discovery
from .channel import Channel
from .errors import ForeignUser, LinkError, NotAnswering, NotGpumon, OtherProtocol
from .feed import Feed

TICK_S = 0.25
_SILENT_S = 3.0  # three heartbeats
_LAST_WORD_S = 15.0  # while its helper is connected: at nice 19 its Goodbye may take a while
_ASK_AGAIN_S = 2.0
_ASKS_MAX = 3
_FRAMES_A_TURN = 16  # then the event loop runs: a snapshot must not freeze the screen
_BACKLOG_MAX = 4_096  # messages not taken yet; above it nothing is read for a moment, or a history fills the memory
_PAUSE_S = 0.01
_BREAKS_MAX = 5
_LINK_AGAIN_S = 1.0  # between two connections to an agent on another machine
_TURNS = (wire.Hello, wire.Synced)


class Owner(Protocol):
    """The subscription, as its connections see it."""

    @property
    def context(self) -> zmq.Context[zmq.Socket[bytes]]: ...
    @property
    def channels(self) -> set[Channel]: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def backlog(self) -> int: ...
    @property
    def answer_s(self) -> float: ...
    def put(self, heard: Sequence[Incoming]) -> None: ...
    def wake(self) -> None: ...
    def know(self, hello: wire.Hello) -> None: ...
    def fail(self, agent: Connection, error: LinkError) -> None: ...


class Connection:
    def __init__(self, owner: Owner, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.feed = Feed(descriptor.nonce, descriptor.via, descriptor.ahead_ns)
        self._phase: wire.Phase | None = None  # the newest
        self.ended = False
        self._owner = owner
        self._began = self._heard = time.monotonic()
        self._requested_at = self._connected = 0.0
        self._attempts = 0
        self._breaks = 0  # connections in a row that broke without a frame
        self._channel: Channel | None = None
        self._full = False  # nothing is read until the backlog is taken
        self._connect()

    def close(self) -> None:
        if self._channel is not None:
            self._owner.loop.remove_reader(self._channel.socket.fileno())
            self._owner.loop.remove_reader(self._channel.monitor.fileno())
            self._channel.close()
            self._owner.channels.discard(self._channel)
            self._channel = None

    def _connect(self) -> None:
        self._connected = time.monotonic()
        self._channel = channel = Channel(self._owner.context, self.descriptor.endpoint)
        self._owner.channels.add(channel)
        channel.subscribe_live()
        self._ask(self._connected)
        self._owner.loop.add_reader(channel.socket.fileno(), self._read)
        self._owner.loop.add_reader(channel.monitor.fileno(), self._watch)
        self._owner.loop.call_soon(self._watch)  # a first read, without which ZeroMQ signals nothing

    def _ask(self, now: float) -> None:
        assert self._channel is not None
        self._requested_at = now
        self._attempts += 1
        self._channel.ask(wire.SNAPSHOT)
        self.feed.requested()
        self._owner.loop.call_soon(self._read)

    def _read(self) -> None:
        """Reads frames until there are none.

        ZeroMQ's file descriptor signals only changes since the last call on the socket, of any kind. So after each
        call, and when stopping early, the socket is read again without a signal.
        """
        if self.ended or self._channel is None:
            return
        for _ in range(_FRAMES_A_TURN):
            if self._owner.backlog > _BACKLOG_MAX:
                self._pause()
                return
            raw = self._channel.receive()
            if raw is None:
                return
            try:
                self._take(raw)
            except wire.ProtocolMismatch as error:
                self._owner.fail(self, OtherProtocol(*str(error).split(": ", 1)))
            except wire.WireError as error:
                self._owner.fail(self, NotGpumon(f"{self.descriptor.endpoint}: {error}", "attach to another endpoint"))
            if self.ended or self._channel is None:
                return
        self._owner.loop.call_soon(self._read)

    def _pause(self) -> None:
        if not self._full and self._channel is not None:
            self._full = True
            self._owner.loop.remove_reader(self._channel.socket.fileno())
            self._owner.loop.call_later(_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._full = False
        if self._channel is not None:
            self._owner.loop.add_reader(self._channel.socket.fileno(), self._read)
            self._read()

    def _take(self, raw: bytes) -> None:
        assert self._channel is not None
        packet = wire.decode_frame(raw)
        self._heard = time.monotonic()
        self._breaks = 0
        answer = self._channel.answers(raw)
        if answer:
            self._requested_at = self._heard  # it is arriving: restart the timeout
        came = self.feed.take(packet, time.time_ns(), answer=answer)
        came, goodbye = _before_goodbye(came)
        self._owner.put(came)
        for heard in came:
            event = self._newest(heard.events) if isinstance(heard, MessageRun) else heard.event
            if isinstance(event, wire.Phase):
                self._phase = event
            elif isinstance(event, _TURNS):
                if isinstance(event, wire.Hello):
                    self._owner.know(event)
                else:
                    self._channel.withdraw()
                    self._attempts = 0
        if goodbye is not None:
            self._owner.put([Received(self.feed.source, time.time_ns(), goodbye)])
            self._end()
            return
        if self.feed.wants_snapshot:
            self._ask(self._heard)

    @staticmethod
    def _newest(events: tuple[wire.Event, ...]) -> wire.Event:
        """The newest phase, or the last event if there is none."""
        return next((event for event in reversed(events) if isinstance(event, wire.Phase)), events[-1])

    def _watch(self) -> None:
        if self._channel is not None:
            self._channel.watch()
            if self._channel.down:
                self._owner.wake()

    def _end(self) -> None:
        self.ended = True
        self.close()
        self._owner.wake()

    # ---------------------------------------------------------------------------------------- what silence may mean

    def tick(self, now: float) -> None:
        if self.descriptor.via and self._waits_for_link(now):
            return
        if self._channel is None:
            return
        self._read()  # first read what arrived before the connection ended
        if self.ended or self._channel is None:
            return
        down = self._channel.down
        if self._channel.refused:
            self._owner.fail(
                self,
                ForeignUser(
                    f"the agent at {self.descriptor.endpoint} refused this user",
                    "gpumon attaches only to your own processes",
                ),
            )
        elif (down or now - self._heard > _LAST_WORD_S) and self._vanished():
            self._lost()
        elif self.feed.hello is None and now - self._began > self._patience_s():
            self._owner.fail(self, self._why_silent())
        elif down and now - self._connected >= TICK_S:  # once a tick: a process just killed may still look alive
            if self._has_left():
                self._left(now)
            else:
                self._reconnect()
        elif self._channel.waits and now - self._requested_at > _ASK_AGAIN_S:
            if self._attempts < _ASKS_MAX or self.feed.hello is None:
                self._ask(now)
            else:
                self._go_on()

    def _waits_for_link(self, now: float) -> bool:
        """Whether there is nothing to hear: the ssh link is lost, or tried again. Connects once it is back.

        While the link is lost its machine's sockets are missing here (`link.ssh`), but not the agents' files.
        """
        linked = self._socket.exists()
        if self._channel is None and linked and now - self._connected >= _LINK_AGAIN_S:
            self._began = self._heard = now
            self._connect()
        elif self._channel is not None and self._channel.down and not self._has_left():
            self._read()
            if self._channel is not None:
                self.close()
        elif self._channel is None and self._has_left():
            self._lost()
        return self._channel is None

    @property
    def _socket(self) -> Path:
        return Path(self.descriptor.endpoint.removeprefix("ipc://"))

    def _patience_s(self) -> float:
        """A live process with a descriptor is certainly an agent, but may be busy, so it gets more time."""
        known = self.descriptor.pid > 0 and not discovery.stopped(self.descriptor)
        return self._owner.answer_s * (3 if known else 1)

    def _go_on(self) -> None:
        """The end of a snapshot was lost three times: continue live without it."""
        assert self._channel is not None
        self._channel.withdraw()
        self._owner.loop.call_soon(self._read)
        self._owner.put(self.feed.go_on(time.time_ns()))

    def _vanished(self) -> bool:
        """The process is gone, or (if its pid is not visible) nothing listens on its socket any more."""
        alive = discovery.alive(self.descriptor)
        return self._has_left() if alive is None else not alive

    def _lost(self) -> None:
        if self.feed.hello is None:  # nothing was received that a Goodbye could end
            what = f"process {self.descriptor.pid} ended before it sent anything"
            self._owner.fail(self, NotAnswering(what, "attach sooner, or record it from its start"))
            return
        on = f" on {self.descriptor.via}" if self.descriptor.via else ""
        text = f"process {self.descriptor.pid}{on} is gone, and no goodbye of it reached this viewer"
        self._say_goodbye("lost", text)

    def _say_goodbye(self, reason: str, detail: str) -> None:
        """On behalf of the agent, with its last known step and phase."""
        last = [event for event in (self.feed.heartbeat, self._phase) if event is not None]
        newest = max(last, key=lambda event: event.t_ns, default=None)
        goodbye = (
            wire.Goodbye(reason, newest.t_ns, newest.step, newest.phase, detail)
            if newest is not None
            else wire.Goodbye(reason, 0, detail=detail)
        )
        self._owner.put([Received(self.feed.source, time.time_ns(), goodbye)])
        self._end()

    def _has_left(self) -> bool:
        """Nothing listens there any more, and the agent has not moved (a logout may remove its directory)."""
        if self.descriptor.via:  # ssh listens there; the agent's file goes once its machine says that it has ended
            return not self._socket.with_suffix(".json").exists()
        if not discovery.refuses(self._socket):
            return False
        moved = next((d for d in discovery.discover() if d.nonce == self.feed.source), None)
        if moved is None or moved.endpoint == self.descriptor.endpoint:
            return True
        self.descriptor = moved
        return False

    def _left(self, now: float) -> None:
        """The process is alive without its agent: it is ending, or continues and its Goodbye was lost."""
        if now - self._heard > _SILENT_S:
            text = "the agent ended, and no goodbye reached this viewer; the process goes on"
            self._say_goodbye("stopped", text)

    def _reconnect(self) -> None:
        self._breaks += 1
        if self._breaks > _BREAKS_MAX:
            self._owner.fail(
                self,
                NotGpumon(
                    f"the connection to {self.descriptor.endpoint} breaks repeatedly",
                    "it may send invalid messages; restart that job with this version's agent",
                ),
            )
            return
        self.close()
        self._connect()

    def _why_silent(self) -> LinkError:
        where = f"process {self.descriptor.pid}" if self.descriptor.pid > 0 else self.descriptor.endpoint
        if self.descriptor.pid > 0:
            if discovery.stopped(self.descriptor):
                return NotAnswering(f"{where} is stopped", f"continue it with `kill -CONT {self.descriptor.pid}`")
            return NotAnswering(f"{where} does not answer", "it may be busy in a long call: try again in a moment")
        return NotGpumon(
            f"the process listening at {where} is no gpumon agent", "`gpumon ls` lists the jobs to attach to"
        )


def _before_goodbye(came: Iterable[Incoming]) -> tuple[list[Incoming], wire.Goodbye | None]:
    """Events before the Goodbye, and the Goodbye."""
    before: list[Incoming] = []
    for heard in came:
        events = heard.events if isinstance(heard, MessageRun) else (heard.event,)
        if wire.Goodbye in map(type, events):
            at, goodbye = next((at, each) for at, each in enumerate(events) if isinstance(each, wire.Goodbye))
            if isinstance(heard, MessageRun) and at:
                before.append(heard._replace(events=events[:at]))
            return before, goodbye
        before.append(heard)
    return before, None
