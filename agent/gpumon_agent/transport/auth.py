"""The publishing socket and its gate: only this user's processes may subscribe, and none may flood.

libzmq keeps every subscription (each of its bytes a node of a trie) and every message about one until we have read it,
and reads on as long as more come: a flood of them grows the training by megabytes a second and holds its publisher up.
So little is taken in at a time, and who subscribes more often than any viewer does is shut out, by process id. One
peer cannot be disconnected: the socket is closed, with all that it kept, and another bound in its place. Viewers come
back by themselves.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import zmq

from gpumon_agent import wire
from gpumon_agent.transport.history import BYTES_MAX

_SUBSCRIPTION_BYTES_MAX = 64  # ours take 19, the handshake's READY 38; libzmq keeps each subscribed byte as a node
# Frames a viewer may lag behind. A whole history is at most 128 half-full frames, a description of 10,000 modules about
# 40; the rest is room for gaps, which begin a frame of their own. A stopped viewer holds this many small live frames.
SEND_HWM = 4 * BYTES_MAX // wire.FRAME_BYTES_MAX
_RECEIVE_HWM = 16  # subscriptions that libzmq takes from a peer before we have looked
SUBSCRIPTIONS_MAX = 128
"""Of one process within `WINDOW_S`. A viewer needs three, and three more each time it comes back."""
WINDOW_S = 1.0
SHUT_OUT_S = 60.0
"""Then the process may try again, or another that has its number by now."""


class Turnstile:
    """Counts who subscribes how often, and knows who did so too often."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._began = 0.0
        self._shut_out: dict[str, float] = {}  # process id → until when

    def passes(self, pid: str, now: float) -> bool:
        """One more subscription of `pid`: False if that is too many."""
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
    """What `admit` answers on. libzmq asks it about every connection from the moment a publisher is bound."""
    gate = context.socket(zmq.REP)
    gate.linger = 0
    gate.bind("inproc://zeromq.zap.01")
    return gate


def open_publisher(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    """Not bound yet."""
    publish = context.socket(zmq.XPUB)
    publish.linger = 0
    publish.sndhwm = SEND_HWM
    publish.rcvhwm = _RECEIVE_HWM
    publish.maxmsgsize = _SUBSCRIPTION_BYTES_MAX
    publish.setsockopt(zmq.XPUB_VERBOSE, 1)
    publish.zap_domain = b"gpumon"
    return publish


def subscriber(message: zmq.Frame) -> str:
    """The process id that `admit` gave to the connection a message came by."""
    try:
        return str(message.get("User-Id"))
    except zmq.ZMQError:  # a libzmq that tells nothing: all are counted as one
        return ""


def admit(gate: zmq.Socket[bytes], turnstile: Turnstile) -> None:
    """Answers libzmq's question about one connection (ZAP, RFC 27): only our own uid may subscribe.

    Over ipc the address is `localhost:UID:GID:PID`, from the kernel; the pid comes back with every message of the
    connection, as its User-Id.
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
