"""What an agent found out, as it reaches a frame: the newest of each, and only whole."""

from __future__ import annotations

from synthetic import Run

from gpumon.link.recording_state import State
from gpumon.session.store import SessionStore
from gpumon_agent import wire

PICTURE = list(Run().picture())
SOURCE = PICTURE[0].source


def store_of(*events: wire.Event) -> SessionStore:
    store = SessionStore()
    for received in PICTURE:
        store.apply(received)
    for event in events:
        store.apply(wire.Received(SOURCE, 1, event))
    return store


def segment(blocks: int, address: int = 0) -> wire.Segment:
    blocks_ = tuple((512, i % 3) for i in range(blocks))
    return wire.Segment(address, 512 * blocks, True, 0, blocks=blocks_, owners=bytes(i % 131 for i in range(blocks)))


def test_segments_are_cut_to_frames_and_put_together_again() -> None:
    many = 3 * wire.BLOCKS_PER_PART + 5
    cut = list(wire.parts([segment(3), segment(many, 1 << 40), segment(0, 1 << 41)]))
    holders = tuple(wire.Holder(f"x{at}[*]", "local", "train.py:9", 1, "main") for at in range(wire.BLOCK_HOLDERS_MAX))
    messages = [
        wire.Segments(0, 4, 7, "backward", 1, "asked", at, len(cut), part, 5, holders, True)
        for at, part in enumerate(cut)
    ]
    assert all(len(wire.encode_event(message)) <= wire.EVENT_BYTES_MAX for message in messages)
    store = store_of(*reversed(messages[1:]))
    assert store.frame(2).ranks[0].segments == ()
    store.apply(wire.Received(SOURCE, 1, messages[0]))
    store.apply(
        wire.Received(SOURCE, 1, wire.Segments(0, 3, 6, "forward", 1, "asked", 0, 1))
    )  # an older set comes late
    (record,) = store.frame(2).ranks[0].segments
    assert (record.number, record.step, record.phase) == (4, 7, "backward")
    assert sum(len(part.blocks) for part in record.segments) == many + 3
    offsets = [
        (part.offset, sum(size for size, _ in part.blocks)) for part in record.segments if part.address == 1 << 40
    ]
    assert [offset for offset, _ in offsets] == [sum(size for _, size in offsets[:at]) for at in range(len(offsets))]
    assert all(len(part.owners) == len(part.blocks) for part in record.segments)
    assert b"".join(part.owners for part in record.segments) == segment(3).owners + segment(many).owners
    assert (record.holders, record.walked) == (holders, True)
    state = State()  # what a recording repeats where a reader may begin
    for received in PICTURE:
        state.take(received)
    again = SessionStore()
    for event in messages:
        state.take(wire.Received(SOURCE, 1, event))
    for received in state.messages(2):
        again.apply(received)
    assert again.frame(2).ranks[0].segments == (record,)


def test_a_part_with_the_longest_of_everything_fits_a_frame() -> None:
    wide = "\N{MUSICAL SYMBOL G CLEF}" * wire.TEXT_CHARS_MAX
    holders = (wire.Holder(wide, "attribute", wide, 1 << 60, wide),) * wire.BLOCK_HOLDERS_MAX
    least, most = -(1 << 63), 1 << 60
    each = wire.BLOCKS_PER_PART // wire.SEGMENTS_PER_PART
    segments = tuple(
        wire.Segment(least, most, False, least, most, True, True, ((most, 255),) * each, b"\xff" * each)
        for _ in range(wire.SEGMENTS_PER_PART)
    )
    whole = wire.Segments(4095, 1 << 31, 1 << 53, wide, least // 2, wide, 1 << 20, 1 << 20, segments, 1 << 62, holders)
    assert len(wire.encode_event(whole)) <= wire.EVENT_BYTES_MAX


def test_the_newest_census_checkpoint_outlook_and_snapshot_stand() -> None:
    group = wire.Group((8, 512), "float32", 0, 3, 49152, holders=(wire.Holder("losses[*]", "local", "train.py:9", 3),))
    first = wire.Checkpoint(0, 1, 5, 1, "torch.load", alive=100, tensors=2)
    rank = (
        store_of(
            wire.Census(9, 1, 1, "growth", (group,)),
            wire.Census(5, 1, 0, "growth"),
            first,
            wire.Checkpoint(0, 1, 5, 1, "torch.load", alive=0),
            wire.Checkpoint(0, 0, 5, 1, "torch.load", alive=7),
            wire.Outlook(4, 0, 1, 10, 9, 11, "backward", wire.FITS),
            wire.Outlook(5, 0, 2, 20, 19, 21, "backward", wire.OOM_AHEAD, -3),
            wire.Snapshot(1, 4, "x.pickle", 10),
        )
        .frame(2)
        .ranks[0]
    )
    assert rank.census is not None
    assert rank.census.groups == (group,)
    assert [(c.number, c.device, c.alive) for c in rank.checkpoints] == [(0, 0, 7), (0, 1, 0)]
    assert [(o.step, o.headroom) for o in rank.outlooks] == [(5, -3)]
    assert rank.snapshot is not None


def test_a_request_and_its_reply_are_as_they_were_sent() -> None:
    request = wire.Request(wire.ROOM, "ab", 1, 1 << 30)
    assert wire.decode_request(wire.encode_asked(request)) == request
    assert wire.decode_reply(wire.encode_asked(wire.Reply(False, "no CUDA"))) == wire.Reply(False, "no CUDA")


def test_where_the_loop_is_the_newest_counts_and_a_reader_that_begins_in_the_middle_has_it() -> None:
    newest = wire.Progress(9, 20, "lightning", "validate", 2, 3, 10)
    events = (wire.Progress(8, 10, "lightning", "train"), newest, wire.Progress(8, 10, "lightning", "train"))
    assert store_of(*events).frame(2).ranks[0].progress == newest
    state = State()
    for received in PICTURE:
        state.take(received)
    for event in events:
        state.take(wire.Received(SOURCE, 1, event))
    again = SessionStore()
    for received in state.messages(2):
        again.apply(received)
    assert again.frame(2).ranks[0].progress == newest
