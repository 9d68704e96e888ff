"""The format of a recording: messages in a file that stays valid wherever it is cut off.

magic (8 bytes), format version (2 × uint8), then per message: length (uint32), CRC-32 (uint32), the message
from `encode_received`. Little endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

from .codec import encode_recorded

MAGIC = b"\x89gpumon\n"  # a byte that is no text, and a line end that a text-mode copy would change
VERSION = (1, 0)
HEADER = MAGIC + bytes(VERSION)
FRAME_HEAD = struct.Struct("<II")
MESSAGE_BYTES_MAX = 1024 * 1024


def framed(message: bytes) -> bytes:
    return FRAME_HEAD.pack(len(message), zlib.crc32(message)) + message


def recorded(source: str, unix_ns: int, events: Iterable[tuple[int, bytes]]) -> bytes:
    """A recording of encoded events with their numbers (-1: none), all received at one moment."""
    return HEADER + b"".join(framed(encode_recorded(source, unix_ns, raw, seq)) for seq, raw in events)
