"""The codec: every message comes back, and nothing else gets through."""

from __future__ import annotations

import gc
import tracemalloc
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumon_agent import wire
from gpumon_agent.wire import LIVE, SNAPSHOT, Packet, WireError

CLOCK = wire.Clock(1, 2)
HELLO = wire.Hello((wire.PROTOCOL_MAJOR, 0), "0", "ab", "x.py", "h", 1, 2, "b", ("x.py",), "3.12", CLOCK)
PHASE = wire.Phase(3, "forward", 0, 0, 10, 5, 1 << 36, 1 << 36, 1 << 37, None)
EVENTS = [HELLO, PHASE, wire.Step(3, 10, 5, 100, ((2, 3),)), wire.Notice(1, "x"), wire.Synced(4)]
FRAME = wire.frame(next(wire.pack([(-1, wire.encode_event(e)) for e in EVENTS], replayed=True)))


def outcome(raw: bytes) -> Packet | WireError:
    try:
        return wire.decode_frame(raw)
    except WireError as error:
        return error


def test_the_types_of_fields_are_no_strings_that_each_start_would_evaluate() -> None:
    for message in (*get_args(wire.Event), Packet, wire.Received, wire.Request, wire.Reply):
        assert not any(isinstance(kind, str) for kind in message.__annotations__.values()), message


def test_every_event_comes_back_as_it_was() -> None:
    assert wire.decode_frame(FRAME) == Packet(-1, True, tuple(EVENTS))


@pytest.mark.parametrize("event", EVENTS)
def test_the_kind_of_an_event_is_its_tag_and_what_is_not_whole_has_none(event: wire.Event) -> None:
    raw = wire.encode_event(event)
    assert wire.kind(raw) == event.__struct_config__.tag
    for broken in (raw[:-1], raw + b"\0", raw[1:], b"", b"\x91\x05"):
        with pytest.raises(WireError):
            wire.kind(broken)


OTHERS = {
    wire.decode_event: wire.Event,
    wire.kind: str,
    wire.decode_received: wire.Received,
    wire.decode_request: wire.Request,
    wire.decode_reply: wire.Reply,
}
SOUND = [
    *map(wire.encode_event, EVENTS),
    wire.encode_received(wire.Received("ab", 1, PHASE, 3)),
    wire.encode_asked(wire.Request("census", "ab12")),
    wire.encode_asked(wire.Reply(True, "why")),
]


def others(raw: bytes) -> None:
    for decode, kind in OTHERS.items():
        try:
            assert isinstance(decode(raw), kind)
        except WireError:
            continue


@given(st.binary(max_size=2000))
def test_any_bytes_are_a_packet_or_a_wire_error(raw: bytes) -> None:
    for topic in (b"", LIVE, SNAPSHOT + bytes(8)):
        assert isinstance(outcome(topic + raw), Packet | WireError)
    others(raw)


@given(st.sampled_from(SOUND), st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), max_size=8))
def test_a_message_with_changed_bytes_is_one_or_a_wire_error(sound: bytes, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(sound)
    for at, value in changes:
        raw[at % len(raw)] = value
    others(bytes(raw))


@given(st.lists(st.tuples(st.integers(0, len(FRAME) - 1), st.integers(0, 255)), max_size=8))
def test_a_frame_with_changed_bytes_is_a_packet_or_a_wire_error(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(FRAME)
    for index, value in changes:
        raw[index] = value
    assert isinstance(outcome(bytes(raw)), Packet | WireError)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(anything, st.sampled_from(["hello", "phase", "model", "ledger", "goodbye", "host", "nothing"]))
def test_sound_msgpack_of_any_shape_is_a_packet_or_a_wire_error(content: object, tag: str) -> None:
    encode = msgspec.msgpack.encode
    assert isinstance(outcome(LIVE + encode(content)), Packet | WireError)
    assert isinstance(outcome(LIVE + encode([0, False, [[tag, content, content]]])), Packet | WireError)


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",  # an array that claims four billion elements
        b"\x93\x00\xc2\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x91" * 60_000,  # nested sixty thousand deep
        b"\x93\x00\xc2" + b"\x91" * 60_000,
        b"\x94\x00\xc2\x90" + b"\x91" * 60_000,  # where a newer minor's field would be skipped
        b"\x80" * 60_000,
        b"\xdc\xff\xff" + b"\x80" * 65_000,
    ],
    ids=lambda body: f"{body[:4].hex()}-{len(body)}",
)
def test_hostile_sizes_cost_little_memory(body: bytes) -> None:
    outcome(LIVE + body)
    tracemalloc.start()
    assert isinstance(outcome(LIVE + body), WireError)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


def test_a_frame_above_the_limit_is_refused_unread() -> None:
    assert "larger than gpumon's protocol allows" in str(outcome(LIVE + bytes(wire.FRAME_BYTES_MAX)))


def test_bounds_are_kept() -> None:
    for broken in (
        wire.Module(0, 0, "x" * 5000, "k", 0, 0, 0, 0),
        wire.Phase(0, "f", 0, 0, 0, 0, allocated=-1),
        wire.Step(0, 0, 0, None, ((1,) * 17,)),
    ):
        frame = LIVE + msgspec.msgpack.encode([0, False, [msgspec.Raw(msgspec.msgpack.encode(broken))]])
        if isinstance(broken, wire.Module):
            continue  # its name is cut where the message is made
        packet = outcome(frame)
        assert isinstance(packet, Packet)
        assert [type(event) for event in packet.events] == [wire.Unread]


@given(st.text(max_size=300))
def test_a_cleaned_text_is_printable_and_short_and_stays_as_it_is(text: str) -> None:
    cleaned = wire.clean(text)
    assert cleaned.isprintable()
    assert len(cleaned) <= wire.NAME_CHARS_MAX
    assert wire.clean(cleaned) == cleaned


@given(st.lists(st.text(max_size=5000), max_size=20))
def test_any_command_line_fits_a_frame(argv: list[str]) -> None:
    hello = msgspec.structs.replace(HELLO, argv=tuple(argv))
    assert len(wire.encode_event(hello)) < wire.EVENT_BYTES_MAX + 4096


@given(st.lists(st.tuples(st.integers(0, 30_000), st.booleans()), max_size=40))
def test_packets_fit_frames_and_lose_nothing(sizes: list[tuple[int, bool]]) -> None:
    seq, events = 0, []
    for size, gap in sizes:
        seq += 1 + gap
        events.append((seq, wire.encode_event(wire.Notice(size, "x" * min(size, 4000)))))
    back = []
    for packet in wire.pack(events, replayed=False):
        raw = wire.frame(packet, SNAPSHOT + bytes(8))
        assert len(raw) <= wire.FRAME_BYTES_MAX
        decoded = wire.decode_frame(raw)
        back += [(decoded.seq + i, wire.encode_event(event)) for i, event in enumerate(decoded.events)]
    assert back == events


def test_of_many_small_events_a_packet_fills_a_frame_and_no_more() -> None:
    events = [(seq, wire.encode_event(wire.Notice(seq, "x" * 4000))) for seq in range(64)]
    frames = [wire.frame(packet, SNAPSHOT + bytes(8)) for packet in wire.pack(events, replayed=False)]
    assert len(frames) == 4
    assert max(map(len, frames)) <= wire.FRAME_BYTES_MAX


def test_another_major_version_is_told_from_garbage() -> None:
    for major, advice in ((wire.PROTOCOL_MAJOR + 1, "upgrade gpumon here"),):
        packet = [-1, True, [["hello", [major, 0], {"another": "layout"}]]]
        with pytest.raises(wire.ProtocolMismatch, match=advice):
            wire.decode_frame(LIVE + msgspec.msgpack.encode(packet))


def test_a_newer_minor_versions_fields_are_skipped() -> None:
    hello = msgspec.msgpack.decode(wire.encode_event(HELLO))
    packet = [-1, True, [[*hello, "a field of the future", {"and": ["another"]}]], "and one of Packet's"]
    assert wire.decode_frame(LIVE + msgspec.msgpack.encode(packet)).events == (HELLO,)


def test_layers_with_the_longest_names_fit_a_frame() -> None:
    longest = "\N{PILE OF POO}" * wire.NAME_CHARS_MAX
    parts = wire.layers(63, 63, 10**9, [wire.Layer(longest, longest, 1 << 60, 1 << 60, 1 << 60)] * 100, 1 << 60)
    assert [len(part.layers) for part in parts] == [48, 48, 4]
    assert max(len(wire.encode_event(part)) for part in parts) <= wire.EVENT_BYTES_MAX


def test_the_garbage_collector_does_not_look_at_what_is_kept_of_a_run() -> None:
    kept = (wire.Phase(1, "forward", 0, 0, 0, 1), wire.Step(1, 0, 1), wire.Ledger(1, "forward", 0, 0, 1, 1, 1))
    assert not any(gc.is_tracked(message) for message in kept)


def test_a_step_tells_the_shapes_of_64_inputs_at_most() -> None:
    fits, more = (wire.Step(0, 0, 1, 4, ((1,),) * count) for count in (64, 65))
    assert wire.decode_event(wire.encode_event(fits)) == fits
    assert isinstance(wire.decode_event(wire.encode_event(more)), wire.Unread)


def test_a_step_tells_the_ends_of_320_quiet_steps_at_most() -> None:
    """An agent keeps fewer than 256, to which the reading of one step adds up to 64 devices'."""
    fits, more = (
        wire.Step(999, 0, 1, quiet=count, quiet_ends=tuple(wire.QuietEnd(at, 0, 1, 1) for at in range(count)))
        for count in (320, 321)
    )
    assert wire.decode_event(wire.encode_event(fits)) == fits
    assert isinstance(wire.decode_event(wire.encode_event(more)), wire.Unread)


def test_a_ledger_s_phase_is_printable() -> None:
    assert wire.Ledger(1, "for\x1bward", 0, 0, 1, 1, 1).phase == "for\N{REPLACEMENT CHARACTER}ward"
