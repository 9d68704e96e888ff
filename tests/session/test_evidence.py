"""What an agent found out, as it reaches a frame: the newest of each, and only whole."""

from __future__ import annotations

from synthetic import Run

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
    return wire.Segment(address, 512 * blocks, True, 0, blocks=tuple((512, i % 3) for i in range(blocks)))


def test_segments_are_cut_to_frames_and_put_together_again() -> None:
    many = 3 * wire.BLOCKS_PER_PART + 5
    cut = list(wire.parts([segment(3), segment(many, 1 << 40), segment(0, 1 << 41)]))
    messages = [wire.Segments(0, 4, 7, "backward", 1, "asked", at, len(cut), part) for at, part in enumerate(cut)]
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
