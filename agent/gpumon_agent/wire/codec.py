"""The one codec: events to packets to frames, and back."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, TypeVar, get_args

import msgspec
from msgspec import Meta

from .base import NAME_CHARS_MAX, TEXT_CHARS_MAX, Message, Nanoseconds, Seq, Text, clean_fields
from .evidence import Census, Checkpoint, Reply, Request, Segments, Snapshot
from .host import Host, Link
from .speaking import Heartbeat, Hello, Synced, Trackers
from .stream import Goodbye, Ledger, Notice, Oom, Outlook, PastStep, Phase, Progress, Step, Thinned
from .trained import Layers, Model, Module

_T = TypeVar("_T")

PROTOCOL_MAJOR = 1  # tests/data/wire-1.0.json holds its layout
PROTOCOL_MINOR = 1

LIVE = b"d"
SNAPSHOT = b"s"  # requests picture, history, Synced. No topic is a prefix of another: ZeroMQ matches by prefix
GLANCE = b"g"  # requests Hello, Heartbeat, Synced only, for a listing
NONCE_BYTES = 8
FRAME_BYTES_MAX = 64 * 1024
EVENT_BYTES_MAX = FRAME_BYTES_MAX - 256  # topic, nonce and the packet's own header


class Unread(Message, frozen=True, tag="unread"):
    """Replaces an event that this side cannot read. It keeps the event's number.

    Its kind is from a later minor version, or the event breaks the bounds of its kind; then `why` says which.
    """

    kind: Text
    why: Text | None = None

    def __post_init__(self) -> None:
        clean_fields(self, "kind")
        clean_fields(self, "why", limit=TEXT_CHARS_MAX)


NumberedEvent = Phase | Step | Ledger | Oom | Notice | Goodbye | Outlook
Event = (
    Hello
    | Model
    | Module
    | Phase
    | Step
    | Ledger
    | Oom
    | Notice
    | Goodbye
    | Heartbeat
    | Synced
    | Host
    | Layers
    | Outlook
    | Census
    | Checkpoint
    | Segments
    | Snapshot
    | PastStep
    | Thinned
    | Progress
    | Link
    | Trackers
    | Unread
)


class WireError(Exception):
    """A frame that is not ours, or not valid. The text is one sentence for a person."""


class ProtocolMismatch(WireError):
    """The other side speaks another major version of this protocol."""


class Packet(Message, frozen=True):
    """Content of one frame. Its numbered events are consecutive from `seq`; -1: none is numbered."""

    seq: Seq
    replayed: bool
    events: Annotated[tuple[Event, ...], Meta(max_length=4096)]


class Received(Message, frozen=True):
    """One event as a viewer received it: yielded by `link`, stored in recordings, applied by sessions."""

    source: Text  # Hello.nonce of the agent; "host:NAME" and "link:NAME" for what the viewer adds
    unix_ns: Nanoseconds  # the receiver's clock
    event: Event
    seq: Seq = -1
    replayed: bool = False

    def __post_init__(self) -> None:
        source = self.source
        if not (source.isascii() and source.isprintable() and len(source) <= NAME_CHARS_MAX):  # runs for every event
            clean_fields(self, "source")


class _Tag(Message, frozen=True):
    kind: str


class _RawPacket(Message, frozen=True):
    seq: Seq
    replayed: bool
    events: Annotated[list[msgspec.Raw], Meta(max_length=4096)]


class _RawReceived(Message, frozen=True):
    source: Text
    unix_ns: Nanoseconds
    event: msgspec.Raw
    seq: Seq = -1
    replayed: bool = False


class _RawPastStep(msgspec.Struct, frozen=True, array_like=True, tag="past"):
    closed: msgspec.Raw
    phases: list[msgspec.Raw]
    ledgers: list[msgspec.Raw]


class _PhasePeak(msgspec.Struct, frozen=True, array_like=True, tag="phase", gc=False):
    """The first fields of a Phase; `object`: skipped."""

    step: int
    phase: object
    index: int
    device: int
    t_ns: int
    duration_ns: int
    allocated: object = None
    allocated_peak: int | None = None


class _LedgerStep(msgspec.Struct, frozen=True, array_like=True, tag="ledger", gc=False):
    step: int


_HELLO = "hello"
_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Event))
_encoder = msgspec.msgpack.Encoder()
_TAGS: dict[bytes, str] = {_encoder.encode(name): name for name in _KINDS}
_packet_decoder = msgspec.msgpack.Decoder(Packet)
_raw_packet_decoder = msgspec.msgpack.Decoder(_RawPacket)
_head_decoder = msgspec.msgpack.Decoder(_PhasePeak | _LedgerStep)
_tag_decoder = msgspec.msgpack.Decoder(_Tag)
_event_decoder = msgspec.msgpack.Decoder(Event)
_received_decoder = msgspec.msgpack.Decoder(Received)
_raw_received_decoder = msgspec.msgpack.Decoder(_RawReceived)
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def past_step(closed: bytes, phases: list[bytes], ledgers: list[bytes]) -> bytes:
    raw = msgspec.Raw
    return _encoder.encode(_RawPastStep(raw(closed), [raw(each) for each in phases], [raw(each) for each in ledgers]))


def peak_of(phase: bytes) -> tuple[int, int, int | None]:
    """(step, device, allocated_peak) of an encoded Phase. A fifth of the cost of decoding it. Raises WireError."""
    seen = _decode_head(phase)
    assert isinstance(seen, _PhasePeak)
    return seen.step, seen.device, seen.allocated_peak


def step_of(ledger: bytes) -> int:
    """The step of an encoded Ledger or Phase. Raises WireError."""
    return _decode_head(ledger).step


def _decode_head(raw: bytes) -> _PhasePeak | _LedgerStep:
    try:
        head: _PhasePeak | _LedgerStep = _head_decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"an event could not be read: {error}") from error
    return head


def encode_event(event: Event) -> bytes:
    return _encoder.encode(event)


def decode_event(raw: bytes) -> Event:
    """One event by itself. Raises WireError."""
    try:
        return _read_event(msgspec.Raw(raw))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"an event could not be read: {error}") from error


def kind(raw: bytes) -> str:
    """Which event `raw` is, by its tag. A third of the cost of decoding it. Raises WireError if it is none."""
    try:
        return _tag_decoder.decode(raw).kind
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"an event could not be read: {error}") from error


def kind_of_sound(raw: bytes) -> str:
    """The same for bytes known to be an event, in 0.15 µs."""
    at = 3 if raw[0] == 0xDC else 1  # an array of more than 15 fields has a longer head
    return _TAGS[raw[at : at + 1 + (raw[at] & 0x1F)]]


def pack(events: Iterable[tuple[int, bytes]], *, replayed: bool) -> Iterator[bytes]:
    """Packets, each small enough for a frame, from (seq, encoded event) pairs in order; seq -1 marks unnumbered."""
    batch: list[msgspec.Raw] = []
    first = expected = -1
    size = 0
    for seq, encoded in events:
        if batch and (size + len(encoded) > EVENT_BYTES_MAX or seq != expected or len(batch) == 4096):
            yield _encoder.encode(_RawPacket(first, replayed, batch))
            batch, size = [], 0
        if not batch:
            first = seq
        batch.append(msgspec.Raw(encoded))
        size += len(encoded)
        expected = seq + 1 if seq >= 0 else -1
    if batch:
        yield _encoder.encode(_RawPacket(first, replayed, batch))


def frame(packet: bytes, topic: bytes = LIVE) -> bytes:
    """`topic` is LIVE, or a whole request topic: SNAPSHOT or GLANCE and a nonce."""
    return topic + packet


def is_request(topic: bytes) -> bool:
    """Whether a subscription to `topic` requests an answer."""
    return topic[:1] in (SNAPSHOT, GLANCE) and len(topic) == 1 + NONCE_BYTES


def decode_frame(raw: bytes) -> Packet:
    """The packet of a frame. Raises WireError for anything else, ProtocolMismatch for another major version.

    An event of a kind from a later minor version is Unread, and so is one that breaks the bounds of its kind: the other
    events must stay readable. Only a Hello must be valid: all others depend on it.
    """
    head = 1 if raw[:1] == LIVE else 1 + NONCE_BYTES if raw[:1] in (SNAPSHOT, GLANCE) else 0
    if not head:
        raise WireError("this endpoint does not speak gpumon's protocol")
    if len(raw) > FRAME_BYTES_MAX:
        raise WireError(f"a message of {len(raw)} bytes is larger than gpumon's protocol allows")
    body = memoryview(raw)[head:]
    try:
        try:
            return _packet_decoder.decode(body)
        except msgspec.ValidationError:
            said = _raw_packet_decoder.decode(body)
            return Packet(said.seq, said.replayed, tuple(_read_event(event) for event in said.events))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        spoken = _spoken_protocol(raw[head:])
        if spoken is not None and spoken[0] != PROTOCOL_MAJOR:
            raise ProtocolMismatch(mismatch_sentence(spoken)) from error
        raise WireError(f"a message could not be read: {error}") from error


def _read_event(raw: msgspec.Raw) -> Event:
    """Raises ValidationError if it is no event at all, or an invalid Hello."""
    try:
        event: Event = _event_decoder.decode(raw)
        return event
    except msgspec.ValidationError as error:
        untyped: Any = msgspec.msgpack.decode(raw)
        if not (isinstance(untyped, list) and untyped and isinstance(untyped[0], str)) or untyped[0] == _HELLO:
            raise
        return Unread(untyped[0], str(error) if untyped[0] in _KINDS else None)


def check_protocol(hello: Hello) -> None:
    """Raises ProtocolMismatch if this side cannot read what `hello`'s side writes."""
    if hello.protocol[0] != PROTOCOL_MAJOR:
        raise ProtocolMismatch(mismatch_sentence(hello.protocol))


def mismatch_sentence(spoken: tuple[int, int]) -> str:
    newer = spoken[0] > PROTOCOL_MAJOR
    return f"the agent speaks protocol {spoken[0]}.{spoken[1]}, this gpumon {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}: " + (
        "upgrade gpumon here" if newer else "upgrade gpumon-agent in the training environment"
    )


def _spoken_protocol(packet: bytes) -> tuple[int, int] | None:
    """The version in a Hello, read without relying on the rest of its layout."""
    try:
        untyped: Any = msgspec.msgpack.decode(packet)
        for event in untyped[2]:
            if event[0] == _HELLO:
                major, minor = event[1]
                return int(major), int(minor)
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError, ValueError, OverflowError):
        return None
    return None


def encode_received(received: Received) -> bytes:
    return _encoder.encode(received)


def encode_recorded(source: str, unix_ns: int, event: bytes, seq: int) -> bytes:
    """The same for an encoded event, marked as replayed."""
    return _encoder.encode(_RawReceived(source, unix_ns, msgspec.Raw(event), seq, True))


def unpack(packet: bytes) -> list[tuple[int, bytes]]:
    """The inverse of `pack`: encoded events with their numbers."""
    said = _raw_packet_decoder.decode(packet)
    return [(said.seq + at if said.seq >= 0 else -1, bytes(raw)) for at, raw in enumerate(said.events)]


def decode_received(raw: bytes) -> Received:
    """Raises WireError if `raw` is none. Its event may be Unread, as in a frame."""
    try:
        try:
            return _received_decoder.decode(raw)
        except msgspec.ValidationError:
            said = _raw_received_decoder.decode(raw)
            return Received(said.source, said.unix_ns, _read_event(said.event), said.seq, said.replayed)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"a recorded message could not be read: {error}") from error


def encode_asked(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(raw: bytes) -> Request:
    """Raises WireError when `raw` is not one."""
    return _decode_request(_request_decoder, raw)


def decode_reply(raw: bytes) -> Reply:
    """Raises WireError when `raw` is not one."""
    return _decode_request(_reply_decoder, raw)


def _decode_request(decoder: msgspec.msgpack.Decoder[_T], raw: bytes) -> _T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"a request could not be read: {error}") from error
