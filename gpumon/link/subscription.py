"""Listening to one agent or to all the ranks of a job, as one stream of messages."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path

import zmq

from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor
from gpumon_agent.wire import Received

from . import discovery
from .channel import Channel
from .errors import ForeignUser, LinkError, NotAnswering, NotGpumon, OtherProtocol
from .feed import Feed

ANSWER_S = 3.0  # how long an agent may take for its first word
_TICK_S = 0.25
_LOOK_S = 0.5  # between two looks for new ranks or a restarted job
_SILENT_S = 3.0  # three heartbeats
_ASK_AGAIN_S = 2.0
_ASKS_MAX = 3
_FRAMES_A_TURN = 16  # then the event loop gets its turn: a snapshot must not freeze the screen
_BACKLOG_MAX = 50_000  # messages nobody took yet; beyond it this viewer stops reading, and ZeroMQ drops for it
_BREAKS_MAX = 5


async def subscribe(
    descriptors: Iterable[Descriptor], *, follow: bool = False, answer_s: float = ANSWER_S
) -> AsyncGenerator[Received, None]:
    """Everything the agents say, in order of `seq` per agent, from the static picture and the recent past on.

    A process that vanished is told as `Goodbye(reason="lost")`. Ends when every agent said or got its Goodbye; with
    `follow` never: a job of the same name that starts afterwards is picked up. Ranks of the same job that come later
    are always picked up. Raises LinkError when none of the agents can be listened to; if only some cannot, a Notice
    says so.
    """
    subscription = _Subscription(tuple(descriptors), follow, answer_s)
    try:
        turn = 0
        while True:
            while subscription.out:
                yield subscription.out.popleft()
                turn += 1
                if turn % 512 == 0:
                    await asyncio.sleep(0)
            if subscription.failure is not None:
                raise subscription.failure
            if subscription.finished:
                return
            await subscription.wait()
    finally:
        subscription.close()


class _Subscription:
    def __init__(self, descriptors: tuple[Descriptor, ...], follow: bool, answer_s: float) -> None:
        self.out: deque[Received] = deque()
        self.failure: LinkError | None = None
        self.context = zmq.Context()
        self.loop = asyncio.get_running_loop()
        self.answer_s = answer_s
        self._follow = follow
        self._something = asyncio.Event()
        self._names = {d.name for d in descriptors}
        self._keys = {d.key for d in descriptors}
        self._next_tick = 0.0
        self._next_look = time.monotonic() + _LOOK_S
        self._files: frozenset[Path] = frozenset()
        self._over = False
        self._seen = {d.nonce for d in descriptors} | {d.nonce for d in discovery.discover() if d.key not in self._keys}
        self._agents = [_Agent(self, d) for d in descriptors]

    @property
    def finished(self) -> bool:
        return not self._follow and all(agent.ended for agent in self._agents)

    async def wait(self) -> None:
        """Until there is something to yield, or a tick has passed."""
        timer = self.loop.call_later(_TICK_S, self._something.set)  # wait_for would make a task each time
        await self._something.wait()
        timer.cancel()
        self._something.clear()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._tick(now)

    def put(self, received: Received) -> None:
        self.out.append(received)
        self._something.set()

    def wake(self) -> None:
        """Something ended: look at once."""
        self._next_tick = 0.0
        self._something.set()

    def know(self, hello: wire.Hello) -> None:
        """Who is behind a bare endpoint is known from its Hello only."""
        self._seen.add(hello.nonce)
        self._names.add(hello.name)

    def close(self) -> None:
        for agent in self._agents:
            agent.close()
        self.context.term()  # every socket is closed without linger: nothing to wait for

    def fail(self, agent: _Agent, error: LinkError) -> None:
        """One agent cannot be listened to: the end if it was the only one, a Notice beside others."""
        agent.close()
        agent.ended = True
        if any(other.feed.synced or not other.ended for other in self._agents if other is not agent):
            notice = wire.Notice(time.monotonic_ns(), f"pid {agent.descriptor.pid}: {error}")
            self.put(Received(agent.feed.source, time.time_ns(), notice))
        else:
            self.failure = error
        self.wake()

    def _tick(self, now: float) -> None:
        for agent in self._agents:
            if not agent.ended:
                agent.tick(now)
        if now >= self._next_look:
            self._next_look = now + _LOOK_S
            self._look()

    def _look(self) -> None:
        over = all(agent.ended for agent in self._agents)
        files = discovery.listing()
        if files <= self._files and over == self._over:
            return
        self._files, self._over = files, over
        for descriptor in discovery.discover():
            if descriptor.nonce in self._seen:
                continue
            same_job = descriptor.key in self._keys
            if same_job or (self._follow and over and descriptor.name in self._names):
                self._seen.add(descriptor.nonce)
                self._keys.add(descriptor.key)
                self._agents.append(_Agent(self, descriptor))
        if over and self._follow:
            self._agents = [agent for agent in self._agents if not agent.ended]


class _Agent:
    """The connection to one agent, from the first attempt to its Goodbye."""

    def __init__(self, owner: _Subscription, descriptor: Descriptor) -> None:
        self.descriptor = descriptor
        self.feed = Feed(descriptor.nonce)
        self.ended = False
        self._owner = owner
        self._began = self._heard = time.monotonic()
        self._asked = self._connected = 0.0
        self._attempts = 0
        self._breaks = 0  # connections that broke without a word on them
        self._channel: Channel | None = None
        self._connect()

    def close(self) -> None:
        if self._channel is not None:
            self._owner.loop.remove_reader(self._channel.socket.fileno())
            self._owner.loop.remove_reader(self._channel.monitor.fileno())
            self._channel.close()
            self._channel = None

    def _connect(self) -> None:
        self._connected = time.monotonic()
        self._channel = channel = Channel(self._owner.context, self.descriptor.endpoint)
        channel.subscribe_live()
        self._ask(self._connected)
        self._owner.loop.add_reader(channel.socket.fileno(), self._read)
        self._owner.loop.add_reader(channel.monitor.fileno(), self._watch)
        self._owner.loop.call_soon(self._watch)  # a first look, without which ZeroMQ signals nothing

    def _ask(self, now: float) -> None:
        assert self._channel is not None
        self._asked = now
        self._attempts += 1
        self._channel.ask(wire.SNAPSHOT)
        self.feed.asked()
        self._owner.loop.call_soon(self._read)

    def _read(self) -> None:
        """Takes frames until there are none.

        ZeroMQ's file descriptor tells of changes since the last call on the socket, whichever call that was. So after
        each call, and when stopping early, the socket is read again without being told.
        """
        if self.ended or self._channel is None:
            return
        if len(self._owner.out) > _BACKLOG_MAX:
            self._owner.loop.remove_reader(self._channel.socket.fileno())
            self._owner.loop.call_later(_TICK_S, self._resume)
            return
        for _ in range(_FRAMES_A_TURN):
            raw = self._channel.receive()
            if raw is None:
                return
            try:
                self._take(raw)
            except wire.ProtocolMismatch as error:
                self._owner.fail(self, OtherProtocol(*str(error).split(": ", 1)))
            except wire.WireError as error:
                self._owner.fail(self, NotGpumon(f"{self.descriptor.endpoint}: {error}", "attach to another endpoint"))
            if self.ended:
                return
        self._owner.loop.call_soon(self._read)

    def _resume(self) -> None:
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
            self._asked = self._heard  # it is on its way: patience begins anew
        for received in self.feed.take(packet, time.time_ns(), answer=answer):
            self._owner.put(received)
            if isinstance(received.event, wire.Hello):
                self._owner.know(received.event)
            elif isinstance(received.event, wire.Synced):
                self._channel.withdraw()
                self._attempts = 0
            elif isinstance(received.event, wire.Goodbye):
                self._end()
                return
        if self.feed.wants_snapshot:
            self._ask(self._heard)

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
        if self._channel is None:
            return
        self._read()  # what came before the connection ended is heard first
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
        elif (down or now - self._heard > _SILENT_S) and self._vanished():
            self._lost()
        elif self.feed.hello is None and now - self._began > self._patience_s():
            self._owner.fail(self, self._why_silent())
        elif down and now - self._connected >= _TICK_S:  # once a tick: what was just killed may still look alive
            if self._has_left():
                self._left(now)
            else:
                self._reconnect()
        elif self._channel.waits and now - self._asked > _ASK_AGAIN_S:
            if self._attempts < _ASKS_MAX or self.feed.hello is None:
                self._ask(now)
            else:
                self._go_on()

    def _patience_s(self) -> float:
        """A live process with a descriptor is an agent for certain: it may be busy starting CUDA, lock held."""
        known = self.descriptor.pid > 0 and not discovery.stopped(self.descriptor.pid)
        return self._owner.answer_s * (3 if known else 1)

    def _go_on(self) -> None:
        """A snapshot's end was lost, three times over: what is live goes on without it."""
        assert self._channel is not None
        self._channel.withdraw()
        self._owner.loop.call_soon(self._read)
        for received in self.feed.go_on(time.time_ns()):
            self._owner.put(received)

    def _vanished(self) -> bool:
        """The process is gone, or (where its pid cannot be seen) nobody holds the other end of its socket any more."""
        alive = discovery.alive(self.descriptor)
        return self._has_left() if alive is None else not alive

    def _lost(self) -> None:
        text = f"process {self.descriptor.pid} is gone, and no last word of it reached this viewer"
        self._say_goodbye("lost", text)

    def _say_goodbye(self, reason: str, detail: str) -> None:
        """In the agent's stead, with the place where it was last heard."""
        beat = self.feed.heartbeat
        goodbye = wire.Goodbye(
            reason, beat.t_ns if beat else 0, beat.step if beat else None, beat.phase if beat else None, detail
        )
        self._owner.put(Received(self.feed.source, time.time_ns(), goodbye))
        self._end()

    def _has_left(self) -> bool:
        """Nobody listens there any more, and the agent has not moved (a logout may take its directory away)."""
        if not discovery.refuses(Path(self.descriptor.endpoint.removeprefix("ipc://"))):
            return False
        moved = next((d for d in discovery.discover() if d.nonce == self.feed.source), None)
        if moved is None or moved.endpoint == self.descriptor.endpoint:
            return True
        self.descriptor = moved
        return False

    def _left(self, now: float) -> None:
        """The process lives, its agent does not: it is just ending, or goes on without, its Goodbye not heard."""
        if now - self._heard > _SILENT_S:
            text = "the agent ended without a word that reached this viewer; the process goes on"
            self._say_goodbye("stopped", text)

    def _reconnect(self) -> None:
        self._breaks += 1
        if self._breaks > _BREAKS_MAX:
            self._owner.fail(
                self,
                NotGpumon(
                    f"the connection to {self.descriptor.endpoint} breaks again and again",
                    "it may send what gpumon's protocol does not allow; restart that job with this version's agent",
                ),
            )
            return
        self.close()
        self._connect()

    def _why_silent(self) -> LinkError:
        where = f"process {self.descriptor.pid}" if self.descriptor.pid > 0 else self.descriptor.endpoint
        if self.descriptor.pid > 0:
            if discovery.stopped(self.descriptor.pid):
                return NotAnswering(f"{where} is stopped", f"continue it with `kill -CONT {self.descriptor.pid}`")
            return NotAnswering(f"{where} does not answer", "it may be busy in one long call: try again in a moment")
        return NotGpumon(f"what listens at {where} is no gpumon agent", "`gpumon ls` lists the jobs to attach to")
