"""One connection to one agent: a subscriber socket and its monitor, read without waiting."""

from __future__ import annotations

import os

import zmq
from zmq.utils.monitor import parse_monitor_message

from gpumon_agent import wire

from .feed import HELD_FRAMES_MAX

NEVER_MS = 2**31 - 1  # libzmq's largest; -1 would also drop what arrived before the connection ended: the Goodbye
_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


class Channel:
    """Connects at once. `down`: the connection ended or failed, and will not come back by itself.

    To reconnect, the caller makes a new Channel: libzmq's own reconnecting would go on for ever after the process is
    gone, and would not happen after a frame above the allowed size.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.rcvhwm = HELD_FRAMES_MAX
        self.socket.maxmsgsize = wire.FRAME_BYTES_MAX
        self.socket.setsockopt(zmq.RECONNECT_IVL, NEVER_MS)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.monitor.linger = 0
        self.down = False
        self.refused = False  # the other side's access control rejected us: another user
        self.speaks_zmq = False
        self._request = b""
        self.socket.connect(endpoint)

    def subscribe_live(self) -> None:
        self.socket.subscribe(wire.LIVE)

    def ask(self, kind: bytes) -> None:
        """Requests a snapshot or a glance; withdraws an earlier request."""
        self.withdraw()
        self._request = kind + os.urandom(wire.NONCE_BYTES)
        self.socket.subscribe(self._request)

    def withdraw(self) -> None:
        if self._request:
            self.socket.unsubscribe(self._request)
            self._request = b""

    @property
    def waits(self) -> bool:
        return bool(self._request)

    def receive(self) -> bytes | None:
        """The next frame; None if there is none now. Skips answers to withdrawn requests."""
        while True:
            try:
                raw = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if raw.startswith(wire.LIVE) or not wire.is_request(raw[: 1 + wire.NONCE_BYTES]) or self.answers(raw):
                return raw

    def answers(self, raw: bytes) -> bool:
        return bool(self._request) and raw.startswith(self._request)

    def watch(self) -> None:
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.speaks_zmq = True
            else:
                self.down = True
                self.refused |= event == zmq.EVENT_HANDSHAKE_FAILED_AUTH

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=0)
