"""A glance at all agents at once, for a listing: identity and current step."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import zmq

from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor

from .channel import Channel

GLANCE_S = 0.3


class Glance(msgspec.Struct, frozen=True):
    """`hello` and `heartbeat` are None if the agent did not answer; `why` then says so."""

    descriptor: Descriptor
    hello: wire.Hello | None
    heartbeat: wire.Heartbeat | None
    why: str | None


def glance(descriptors: Sequence[Descriptor], seconds: float = GLANCE_S) -> list[Glance]:
    """Asks all of them and waits until all have answered, `seconds` at most."""
    context = zmq.Context()
    channels = [Channel(context, descriptor.endpoint) for descriptor in descriptors]
    poller = zmq.Poller()
    for channel in channels:
        channel.ask(wire.GLANCE)
        poller.register(channel.socket, zmq.POLLIN)
    heard = [_Heard() for _ in channels]
    end = time.monotonic() + seconds
    while not all(one.complete for one in heard) and (left := end - time.monotonic()) > 0:
        poller.poll(int(left * 1000) + 1)
        for channel, one in zip(channels, heard, strict=True):
            one.listen(channel)
    for channel in channels:
        channel.close()
    context.term()
    return [
        Glance(descriptor, one.hello, one.heartbeat, one.why if one.complete else "not answering")
        for descriptor, one in zip(descriptors, heard, strict=True)
    ]


class _Heard:
    def __init__(self) -> None:
        self.hello: wire.Hello | None = None
        self.heartbeat: wire.Heartbeat | None = None
        self.why: str | None = None

    @property
    def complete(self) -> bool:
        return self.why is not None or (self.hello is not None and self.heartbeat is not None)

    def listen(self, channel: Channel) -> None:
        while not self.complete and (raw := channel.receive()) is not None:
            try:
                events = wire.decode_frame(raw).events
            except wire.WireError as error:
                self.why = str(error)
                return
            for event in events:
                if isinstance(event, wire.Hello):
                    self.hello = event
                elif isinstance(event, wire.Heartbeat):
                    self.heartbeat = event
