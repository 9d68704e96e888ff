"""Format 2 of recordings: messages in compressed blocks, blocks in frames.

magic (8 bytes), format version (2 × uint8), then blocks: head, payload. Little endian. A frame begins a new stream of
zstandard, and every block ends where the stream was flushed, so that a file that was cut off anywhere can be read up to
its last complete block. All frames but the first begin with blocks of STATE: what a reader that begins there must know.
The last block of a recording that was closed is its INDEX; the last 16 bytes say where that begins.

Format 1 (gpumon_agent.wire.recording) is not compressed. The agent writes it beside a report of an out-of-memory.
"""

from __future__ import annotations

import struct
import sys
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from gpumon_agent import wire
from gpumon_agent.wire.recording import MAGIC, MESSAGE_BYTES_MAX

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

VERSION = (2, 0)
HEADER = MAGIC + bytes(VERSION)

BEGINS, STATE, INDEX, MARKED = 1, 2, 4, 8
"""A block's flags: it begins a frame; it repeats what is known; it is the index; from there on a bit for each kind of
mark (recording_index.KINDS) that it has."""

HEAD = struct.Struct("<IIIIIHqQ")
_CRC = struct.Struct("<I")
LENGTH = struct.Struct("<I")
FOOT = struct.Struct("<Q8s")
FOOT_MAGIC = b"gpumon.\n"

RAW_MAX = 2 * MESSAGE_BYTES_MAX
"""Bytes of a block's messages: so much memory is taken before a checksum of them was seen."""

INDEX_RAW_MAX = 64 * 1024 * 1024

WINDOW_LOG = 20
"""A reader needs a window of a MiB, and refuses a file that asks for more."""


class Head(NamedTuple):
    crc: int
    length: int  # of the payload
    raw: int  # of it uncompressed
    messages: int
    frame: int  # number of the frame, counted from 0; some may be missing (see recording_thinning)
    flags: int
    step: int  # the newest that was closed, -1: none
    unix_ns: int  # of the newest message

    @property
    def sound(self) -> bool:
        """Whether the lengths are possible."""
        limit = INDEX_RAW_MAX if self.flags & INDEX else RAW_MAX
        return self.raw <= limit and self.length <= self.raw + 1024


class Damaged(Exception):
    """A block that is cut off, or not as it was written."""


def compressor() -> zstd.ZstdCompressor:
    made: zstd.ZstdCompressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: WINDOW_LOG})
    return made


def decompressor() -> zstd.ZstdDecompressor:
    made: zstd.ZstdDecompressor = zstd.ZstdDecompressor(
        options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG}
    )
    return made


def block(
    stream: zstd.ZstdCompressor, raw: bytes, messages: int, frame: int, flags: int, step: int, unix_ns: int
) -> bytes:
    payload = stream.compress(raw, stream.FLUSH_FRAME if flags & INDEX else stream.FLUSH_BLOCK)
    head = HEAD.pack(0, len(payload), len(raw), messages, frame, flags, step, unix_ns)
    return _CRC.pack(zlib.crc32(payload, zlib.crc32(head[4:]))) + head[4:] + payload


def head_of(data: bytes) -> Head | None:
    return Head(*HEAD.unpack(data)) if len(data) == HEAD.size else None


def opened(stream: zstd.ZstdDecompressor, head: Head, data: bytes, payload: bytes) -> bytes:
    """The block's messages. `data`: its head as it was read. Never more memory than the head says. Raises Damaged."""
    if len(payload) < head.length or zlib.crc32(payload, zlib.crc32(data[4:])) != head.crc:
        raise Damaged
    try:
        raw = stream.decompress(payload, max_length=head.raw + 1)
    except (zstd.ZstdError, EOFError) as error:
        raise Damaged from error
    if len(raw) != head.raw:
        raise Damaged
    return raw


def messages_of(raw: bytes) -> Iterator[wire.Received]:
    """Raises Damaged."""
    at, end = 0, len(raw)
    view = memoryview(raw)
    while at < end:
        if at + LENGTH.size > end:
            raise Damaged
        (length,) = LENGTH.unpack_from(raw, at)
        at += LENGTH.size
        if at + length > end:
            raise Damaged
        try:
            yield wire.decode_received(view[at : at + length])  # type: ignore[arg-type]
        except wire.WireError as error:
            raise Damaged from error
        at += length
