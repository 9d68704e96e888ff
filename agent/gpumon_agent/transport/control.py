"""The control socket: viewers send one of four requests and learn at once whether it will be done.

A REP socket beside the publisher's, with the same access control (only this user's processes), served by the
publisher. A request is one small frame: an enum word, the agent's nonce, at most two numbers; no path, no
code. The socket never waits and never does the work: `answer` only notes the request. After `REQUESTS_A_SECOND`
requests (of all viewers) the socket is not polled until the second is over, and libzmq blocks the senders.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import zmq

from gpumon_agent import wire
from gpumon_agent.transport.auth import WAITING_MAX

REQUEST_BYTES_MAX = 512  # a valid one takes about 40
REQUESTS_A_SECOND = 20


class Control:
    """Used by the publisher alone."""

    def __init__(self, nonce: str, answer: Callable[[wire.Request], wire.Reply | None]) -> None:
        self._nonce = nonce
        self._answer = answer
        self._socket: zmq.Socket[bytes] | None = None
        self._poller: zmq.Poller | None = None
        self._left = REQUESTS_A_SECOND
        self._second = 0.0
        self._listening = False
        self.refused = 0

    def open(self, context: zmq.Context[zmq.Socket[bytes]], poller: zmq.Poller) -> None:
        socket = context.socket(zmq.REP)
        socket.linger = 0
        socket.rcvhwm = socket.sndhwm = WAITING_MAX
        socket.maxmsgsize = REQUEST_BYTES_MAX
        socket.zap_domain = b"gpumon"
        self._socket, self._poller = socket, poller

    def bind(self, address: str) -> None:
        """Raises ZMQError. The path must be free: libzmq would replace a file."""
        assert self._socket is not None
        self._socket.bind(address)

    def hear(self, now: float, ready: Container[object]) -> None:
        """Answers pending requests. Stops polling for the rest of the second if there were too many.

        `ready`: what the poller found. Receiving nothing costs as much as reading the ring.
        """
        if self._socket is None or self._poller is None or (self._listening and self._socket not in ready):
            return
        if now - self._second >= 1.0:
            self._second, self._left = now, REQUESTS_A_SECOND
        while self._left:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self._left -= 1
            reply = self._reply(frames)
            self.refused += not reply.accepted
            self._send(wire.encode_asked(reply))
        if self._listening != bool(self._left):
            self._listening = bool(self._left)
            if self._listening:
                self._poller.register(self._socket, zmq.POLLIN)
            else:
                self._poller.unregister(self._socket)

    def _reply(self, frames: list[bytes]) -> wire.Reply:
        if len(frames) != 1:
            return wire.Reply(False, "a request is one frame")
        try:
            request = wire.decode_request(frames[0])
        except wire.WireError as error:
            return wire.Reply(False, str(error))
        if request.nonce != self._nonce:
            return wire.Reply(False, "another process than the requested one answers here: attach again")
        return self._answer(request) or wire.Reply(False, "the agent failed; its log has details")

    def _send(self, reply: bytes) -> None:
        assert self._socket is not None
        try:
            self._socket.send(reply, zmq.NOBLOCK)
        except zmq.Again:  # the asker is gone, its queue full: the REP socket drops it at the next send
            return

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
