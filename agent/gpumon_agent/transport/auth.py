"""The publishing socket and its access control: only this user's processes may subscribe, at a limited rate.

libzmq stores every subscription (one trie node per byte), queues the messages about them until we read them, and keeps
reading as long as more arrive: a flood grows this process by megabytes a second and blocks the publisher. So the
receive queue is short, and a process that subscribes more often than any viewer is banned by its pid. libzmq cannot
disconnect a single peer, so the socket is closed, with all that it stored, and a new one is bound. Viewers reconnect by
themselves.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import zmq

from gpumon_agent import wire
from gpumon_agent.transport.history import BYTES_MAX

_SUBSCRIPTION_BYTES_MAX = 64  # ours take 19, the handshake's READY 38; libzmq stores a trie node per byte
# Frames a viewer may lag behind. A whole history is at most 128 half-full frames, a description of 10,000 modules about
# 40; the rest is for gaps, each of which starts a new frame. For a stopped viewer this many small live frames are kept.
SEND_HWM = 4 * BYTES_MAX // wire.FRAME_BYTES_MAX
WAITING_MAX = 8  # subscriptions or requests that libzmq queues per connection
SUBSCRIPTIONS_MAX = 128
"""Of one process within `WINDOW_S`. A viewer needs three, and three more per reconnect."""
WINDOW_S = 1.0
SHUT_OUT_S = 60.0
"""After this the process may try again, or a new one with its pid."""


class Turnstile:
    """Counts subscriptions by process and bans those with too many."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._began = 0.0
        self._shut_out: dict[str, float] = {}  # pid → until when

    def passes(self, pid: str, now: float) -> bool:
        """Counts a subscription of `pid`. False: too many."""
        if now - self._began > WINDOW_S:
            self._counts.clear()
            self._began = now
        self._counts[pid] += 1
        if self._counts[pid] <= SUBSCRIPTIONS_MAX:
            return True
        self._counts.clear()
        self._shut_out = {other: until for other, until in self._shut_out.items() if until > now}
        self._shut_out[pid] = now + SHUT_OUT_S
        return False

    def admits(self, pid: str, now: float) -> bool:
        return self._shut_out.get(pid, now) <= now


def open_gate(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """The socket `admit` answers on. libzmq asks it about every connection once a publisher is bound."""
    gate = context.socket(zmq.REP)
    gate.linger = 0
    gate.bind("inproc://zeromq.zap.01")
    return gate


def open_publisher(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Not bound yet."""
    publish = context.socket(zmq.XPUB)
    publish.linger = 0
    publish.sndhwm = SEND_HWM
    publish.rcvhwm = WAITING_MAX
    publish.maxmsgsize = _SUBSCRIPTION_BYTES_MAX
    publish.setsockopt(zmq.XPUB_VERBOSE, 1)
    publish.zap_domain = b"gpumon"
    return publish


def subscriber(message: zmq.Frame) -> str:
    """The pid that `admit` assigned to the connection of a message."""
    try:
        return str(message.get("User-Id"))
    except zmq.ZMQError:  # libzmq without User-Id: all peers count as one
        return ""


def admit(gate: zmq.Socket[bytes], turnstile: Turnstile) -> None:
    """Answers one ZAP request (RFC 27), about one connection: only our own uid may subscribe.

    Over ipc the address is `localhost:UID:GID:PID`, from the kernel. The pid is returned as User-Id, which libzmq
    attaches to every message of the connection.
    """
    try:
        version, request, _domain, address, *_ = gate.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return
    fields = address.split(b":")
    if len(fields) != 4 or fields[1] != str(os.geteuid()).encode():
        verdict = (b"400", b"another user")
    elif not turnstile.admits(fields[3].decode(), time.monotonic()):
        verdict = (b"400", b"too many subscriptions")
    else:
        verdict = (b"200", b"")
    gate.send_multipart([version, request, *verdict, fields[-1], b""])
