"""Subscribes to one agent or to all ranks of a job, as one stream of messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence

import zmq

from gpumon.session.incoming import Incoming, MessageRun, singly
from gpumon_agent import endpoint, wire
from gpumon_agent.endpoint import Descriptor
from gpumon_agent.wire import Received

from . import discovery
from .channel import Channel
from .connection import TICK_S, Connection
from .errors import LinkError

ANSWER_S = 3.0  # time for an agent's first message
_BATCH_MAX = 512  # events, then the event loop runs


async def subscribe(
    descriptors: Iterable[Descriptor], *, follow: bool = False, answer_s: float = ANSWER_S
) -> AsyncGenerator[Received, None]:
    """All events of the agents, in order of `seq` per agent, starting with the static picture and the recent past.

    A vanished process gets `Goodbye(reason="lost")`. Ends when every agent has its Goodbye and no torchrun that may
    restart them is left; with `follow` never: a later job of the same name is picked up. Later ranks of the same job
    are always picked up. Raises LinkError if no agent can be reached; if only some cannot, a Notice says so.
    """
    async with contextlib.aclosing(subscribe_batches(descriptors, follow=follow, answer_s=answer_s)) as batches:
        async for batch in batches:
            for received in singly(batch):
                yield received


async def subscribe_batches(
    descriptors: Iterable[Descriptor], *, follow: bool = False, answer_s: float = ANSWER_S
) -> AsyncGenerator[list[Incoming], None]:
    """As `subscribe`, in lists of available events: with many ranks, yielding them singly is most of the work."""
    subscription = _Subscription(tuple(descriptors), follow, answer_s)
    try:
        while True:
            while batch := subscription.take():
                yield batch
                if subscription.backlog:
                    await asyncio.sleep(0)
            if subscription.failure is not None:
                raise subscription.failure
            if subscription.finished:
                return
            await subscription.wait()
    finally:
        subscription.close()


def _events(heard: Incoming) -> int:
    return len(heard.events) if isinstance(heard, MessageRun) else 1


def _release(context: zmq.Context[zmq.Socket[bytes]], channels: set[Channel]) -> None:
    """For a subscription that nobody closed: its loop was closed first. A context waits for ever for open sockets."""
    for channel in channels:
        channel.close()
    context.term()


class _Subscription:
    def __init__(self, descriptors: tuple[Descriptor, ...], follow: bool, answer_s: float) -> None:
        self.backlog = 0  # events not taken yet
        self._out: deque[Incoming] = deque()
        self.failure: LinkError | None = None
        self.context = zmq.Context()
        self.channels = set[Channel]()  # that are open
        weakref.finalize(self, _release, self.context, self.channels).atexit = False
        self.loop = asyncio.get_running_loop()
        self.answer_s = answer_s
        self._follow = follow
        self._something = asyncio.Event()
        self._names = {d.name for d in descriptors}
        self._keys = {d.key for d in descriptors}
        self._next_tick = 0.0
        self._files: frozenset[str] = frozenset()
        self._over = False
        self._launchers: dict[int, int | None] = {}  # torchruns on this machine: pid → start time
        self._may_restart = False
        self._ours = {d.nonce for d in descriptors}
        self._seen = {d.nonce for d in discovery.discover() if d.key not in self._keys}
        self._agents = [Connection(self, d) for d in descriptors]

    @property
    def finished(self) -> bool:
        return not self._follow and not self._may_restart and all(agent.ended for agent in self._agents)

    async def wait(self) -> None:
        """Waits for something to yield, or for a tick."""
        timer = self.loop.call_later(TICK_S, self._something.set)  # wait_for would create a task each time
        await self._something.wait()
        timer.cancel()
        self._something.clear()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._tick(now)

    def put(self, heard: Sequence[Incoming]) -> None:
        self._out.extend(heard)
        self.backlog += sum(map(_events, heard))
        self._something.set()

    def take(self) -> list[Incoming]:
        """What there is, up to about `_BATCH_MAX` events."""
        out, batch, events = self._out, [], 0
        while out and events < _BATCH_MAX:
            heard = out.popleft()
            events += _events(heard)
            batch.append(heard)
        self.backlog -= events
        return batch

    def wake(self) -> None:
        """Something ended: tick at once."""
        self._next_tick = 0.0
        self._something.set()

    def know(self, hello: wire.Hello) -> None:
        """For a bare endpoint, nonce and name are known only from Hello."""
        self._ours.add(hello.nonce)
        self._names.add(hello.name)

    def close(self) -> None:
        for agent in self._agents:
            agent.close()
        self.context.term()  # all sockets are closed without linger: it does not wait

    def fail(self, agent: Connection, error: LinkError) -> None:
        """One agent cannot be reached: a failure if it was the only one, else a Notice."""
        agent.close()
        agent.ended = True
        if any(other.feed.synced or not other.ended for other in self._agents if other is not agent):
            notice = wire.Notice(time.monotonic_ns(), f"pid {agent.descriptor.pid}: {error}")
            self.put([Received(agent.feed.source, time.time_ns(), notice)])
        else:
            self.failure = error
        self.wake()

    def _tick(self, now: float) -> None:
        for agent in self._agents:
            if not agent.ended:
                agent.tick(now)
                self._know_launcher(agent)
        if self._may_restart and all(agent.ended for agent in self._agents):
            self._may_restart = any(
                began is not None and endpoint.start_time(pid) == began for pid, began in self._launchers.items()
            )
        self._look()

    def _know_launcher(self, agent: Connection) -> None:
        """Between the end of its workers and their restart an elastic job has no agent."""
        hello, parent = agent.feed.hello, agent.descriptor.parent
        if hello is None or hello.restarts is None or parent in self._launchers or parent <= 1:
            return
        began = endpoint.start_time(parent) if agent.descriptor.pid_ns == endpoint.pid_namespace() else None
        self._launchers[parent] = began
        self._may_restart = self._may_restart or began is not None

    def _look(self) -> None:
        over = all(agent.ended for agent in self._agents)
        files = discovery.listing()
        if files <= self._files and over == self._over:
            return
        self._files, self._over = files, over
        for job in discovery.jobs(discovery.discover()):
            ours = any(d.nonce in self._ours or d.key in self._keys for d in job.descriptors)
            for descriptor in job.descriptors:
                new = self._follow and over and descriptor.name in self._names and descriptor.nonce not in self._seen
                if descriptor.nonce not in self._ours and (ours or new):
                    self._ours.add(descriptor.nonce)
                    self._keys.add(descriptor.key)
                    self._agents.append(Connection(self, descriptor))
        if over and self._follow:
            self._agents = [agent for agent in self._agents if not agent.ended]
