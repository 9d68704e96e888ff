"""One connection to an agent, as its subscription drives it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import zmq

from gpumon import link
from gpumon.link.channel import Channel
from gpumon.link.connection import Connection
from gpumon.session.incoming import Incoming, singly
from gpumon_agent import endpoint, wire

Start = Callable[..., Any]


class Viewer:
    """What a connection needs of a subscription, with a backlog of its own choice."""

    answer_s = 10.0

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], descriptor: endpoint.Descriptor, backlog: int) -> None:
        self.context, self.backlog = context, backlog
        self.channels = set[Channel]()
        self.loop = asyncio.get_running_loop()
        self.heard: list[wire.Event] = []
        self.frames = 0
        self.synced = asyncio.Event()
        self.connection = Connection(self, descriptor)

    def put(self, heard: Sequence[Incoming]) -> None:
        self.frames += 1
        self.heard += [received.event for received in singly(heard)]
        if any(isinstance(event, wire.Synced) for event in self.heard):
            self.synced.set()

    def wake(self) -> None: ...

    def know(self, hello: wire.Hello) -> None: ...

    def fail(self, agent: Connection, error: link.LinkError) -> None:
        raise error


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


async def test_above_4096_messages_not_taken_a_viewer_stops_reading_until_they_are(
    start: Start, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Its memory: ZeroMQ drops what the viewer does not read."""
    start().ask("steps 100")
    (descriptor,) = link.resolve()
    full, not_yet = (Viewer(context, descriptor, backlog) for backlog in (4_097, 4_096))
    try:
        await asyncio.wait_for(not_yet.synced.wait(), 30)
        assert not_yet.heard
        assert not full.heard
        full.backlog = 0
        await asyncio.wait_for(full.synced.wait(), 30)
    finally:
        full.connection.close()
        not_yet.connection.close()


async def test_16_frames_are_read_at_a_time(start: Start, context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """At most a MiB, then keys and the screen have their turn: a snapshot has 4 MiB, and a viewer has many ranks."""
    agent = start()
    (descriptor,) = link.resolve()
    viewer = Viewer(context, descriptor, 0)
    try:
        await asyncio.wait_for(viewer.synced.wait(), 60)
        read, end = 0, time.monotonic() + 60
        while read < 16 and time.monotonic() < end:
            agent.ask("steps 8000")  # some thirty frames; the loop does not run meanwhile
            before = viewer.frames
            viewer.connection.tick(time.monotonic())
            read = viewer.frames - before
        assert read == 16
    finally:
        viewer.connection.close()
