"""Requests to an agent: one request on its control socket, one reply, or one sentence why there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor

from . import discovery
from .channel import NEVER_MS
from .errors import ForeignUser, LinkError, NoJob, NotAnswering, NotGpumon

ANSWER_S = 2.0  # the helper answers within 0.1 s if it gets a core
_LOOK_S = 0.01
_EVENTS = zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_CONNECT_RETRIED
_AGAIN = "attach to it again, or see `gpumon ls`"


async def ask(descriptor: Descriptor, request: wire.Request, timeout_s: float = ANSWER_S) -> wire.Reply:
    """The agent's reply. Puts its nonce into `request`. Raises LinkError if there is no reply, and why."""
    who = f"process {descriptor.pid}" if descriptor.pid > 0 else descriptor.endpoint
    if discovery.alive(descriptor) is False:
        raise NoJob(f"{who} has ended", "it takes no more requests")
    if not descriptor.control:
        raise NotAnswering(
            f"the agent of {who} has no control socket",
            "it is older than this gpumon: upgrade gpumon-agent in the training environment",
        )
    context = zmq.Context()
    try:
        socket = context.socket(zmq.REQ)
        socket.linger = 0
        socket.maxmsgsize = wire.FRAME_BYTES_MAX
        socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        monitor = socket.get_monitor_socket(_EVENTS)
        monitor.linger = 0
        try:
            socket.connect(descriptor.control)
            socket.send(wire.encode_asked(msgspec.structs.replace(request, nonce=descriptor.nonce)), zmq.NOBLOCK)
            return await _reply(socket, monitor, descriptor, who, timeout_s)
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)
    finally:
        context.term()


async def _reply(
    socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], descriptor: Descriptor, who: str, timeout_s: float
) -> wire.Reply:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return wire.decode_reply(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            pass
        except wire.WireError as error:
            raise NotGpumon(
                f"the process listening at {descriptor.control} is no gpumon agent: {error}", _AGAIN
            ) from error
        try:
            event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))["event"]
        except zmq.Again:
            event = None
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            raise ForeignUser(
                f"the agent of {who} refused this user", "gpumon sends requests only to your own processes"
            )
        if event is not None or time.monotonic() > deadline:
            raise _why_silent(descriptor, who)
        await asyncio.sleep(_LOOK_S)


def _why_silent(descriptor: Descriptor, who: str) -> LinkError:
    if discovery.alive(descriptor) is False:
        return NoJob(f"{who} has ended", "it takes no more requests")
    if discovery.stopped(descriptor):
        return NotAnswering(f"{who} is stopped", f"continue it with `kill -CONT {descriptor.pid}`")
    return NotAnswering(f"the agent of {who} does not answer", "it may be busy in a long call: try again in a moment")


class Asker:
    """Sends requests to the agent of a message's source. `known`: agents outside of the usual folders."""

    def __init__(self, known: Iterable[Descriptor] = ()) -> None:
        self._known = {descriptor.nonce: descriptor for descriptor in known}

    async def __call__(
        self, source: str, what: str, device: int = 0, available: int | None = None, timeout_s: float = ANSWER_S
    ) -> wire.Reply:
        """As `ask`, for the agent whose nonce is `source`."""
        here = next((found for found in discovery.discover() if found.nonce == source), self._known.get(source))
        if here is None:
            raise NoJob("the process that was watched has ended", "it takes no more requests")
        return await ask(here, wire.Request(what, device=device, available=available), timeout_s)
