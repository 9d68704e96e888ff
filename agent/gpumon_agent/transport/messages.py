"""Messages between the training process and its helper, in shared memory."""

from __future__ import annotations

import msgspec

from gpumon_agent import endpoint, wire

LONG, STATE, PIECE = range(3)
"""Kinds of long messages: events of the picture, a `State`, a `Piece` of a file."""


class Start(msgspec.Struct):
    """The helper's parameters, as JSON: it can read that before it imports our code."""

    path: list[str]  # sys.path of the training process
    descriptor: endpoint.Descriptor
    seq: int = 0  # of the next event
    number: int = 0  # of the newest request or line received
    again: bool = False  # an earlier helper died


class State(msgspec.Struct, array_like=True, gc=False):
    """Fields of heartbeats that seldom change."""

    devices: tuple[int, ...] = ()
    off: tuple[wire.PartOff, ...] = ()
    descriptor: endpoint.Descriptor | None = None  # None: unchanged


class Piece(msgspec.Struct, array_like=True, gc=False):
    """A part of a snapshot file that the helper writes. The last one is empty."""

    step: int
    t_ns: int
    data: bytes


class FromHelper(msgspec.Struct, array_like=True, gc=False):
    """From the helper to the training process. Numbers only grow: known ones are skipped."""

    ready: bool = False  # viewers can attach
    watched: bool = False  # one is attached
    answered: bool = False  # one got the whole picture
    requests: tuple[tuple[int, wire.Request], ...] = ()  # the newest, with their numbers
    said: tuple[tuple[int, str], ...] = ()  # lines for the training's terminal
    seq: int = 0  # of the next event


_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_start = msgspec.json.Decoder(Start).decode
decode_state = msgspec.msgpack.Decoder(State).decode
decode_piece = msgspec.msgpack.Decoder(Piece).decode
decode_answer = msgspec.msgpack.Decoder(FromHelper).decode
decode_events = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
