"""The publishing socket and its gate: only this user's processes may subscribe."""

from __future__ import annotations

import os

import zmq

from . import wire
from .history import BYTES_MAX

_SUBSCRIPTION_BYTES_MAX = 64  # ours take 19, the handshake's READY 38; libzmq keeps each subscribed byte as a node
# Frames a viewer may lag behind. A whole history is at most 128 half-full frames, a description of 10,000 modules about
# 40; the rest is room for gaps, which begin a frame of their own. A stopped viewer holds this many small live frames.
SEND_HWM = 4 * BYTES_MAX // wire.FRAME_BYTES_MAX


def open_sockets(context: zmq.Context[zmq.Socket[bytes]]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """The gate, which `admit` answers for, and the publisher, not bound yet.

    libzmq asks the gate about every connection from the moment the publisher is bound.
    """
    gate = context.socket(zmq.REP)
    gate.linger = 0
    gate.bind("inproc://zeromq.zap.01")
    publish = context.socket(zmq.XPUB)
    publish.linger = 0
    publish.sndhwm = SEND_HWM
    publish.maxmsgsize = _SUBSCRIPTION_BYTES_MAX
    publish.setsockopt(zmq.XPUB_VERBOSE, 1)
    publish.zap_domain = b"gpumon"
    return gate, publish


def admit(gate: zmq.Socket[bytes]) -> None:
    """Answers libzmq's question about one connection (ZAP, RFC 27): only our own uid may subscribe.

    Over ipc the address is `localhost:UID:GID:PID`, from the kernel. A flood of subscriptions from another user would
    grow the training process by gigabytes.
    """
    try:
        version, request, _domain, address, *_ = gate.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return
    fields = address.split(b":")
    ours = len(fields) == 4 and fields[1] == str(os.geteuid()).encode()
    verdict = (b"200", b"") if ours else (b"400", b"another user")
    gate.send_multipart([version, request, *verdict, b"", b""])
