"""Recordings in frames: read from a step on, thinned at a size, safe to open."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic import MIB, Run

from gpumon import link
from gpumon.link.recording_blocks import (
    BEGINS,
    FOOT,
    HEAD,
    HEADER,
    INDEX,
    INDEX_RAW_MAX,
    RAW_MAX,
    STATE,
    Head,
    compressor,
    zstd,
)
from gpumon.link.recording_index import Marks
from gpumon.link.recording_thinning import spared
from gpumon.session.frame import RankFrame
from gpumon.session.store import SessionStore
from gpumon_agent import wire

EXAMPLE = Path(__file__).parents[1] / "data" / "json-example.gpumon"
STEPS = 6_600


def leaking() -> Run:
    """4 kB a step, so that a thousand of them are a frame."""
    return Run(
        kept=lambda step: step * 1024,
        activations=lambda step: (900 if step == 2_500 else 300) * MIB,
        beside=lambda step: (wire.Notice(step, f"{step}".ljust(3_000, ".")),),
    )


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of five frames and more, with its index."""
    path = tmp_path_factory.mktemp("frames") / "long.gpumon"
    with link.Recording(path) as recording:
        for received in leaking().stream(STEPS, host_every=20):
            recording.write(received)
    return path


def rank_of(messages: Iterator[wire.Received]) -> RankFrame:
    store = SessionStore(replaying=True)
    for received in messages:
        store.apply(received)
    return store.frame(0).ranks[0]


def until(messages: Iterator[wire.Received], step: int) -> Iterator[wire.Received]:
    for received in messages:
        yield received
        if isinstance(received.event, wire.Step) and received.event.step == step:
            return


def heads(path: Path) -> list[Head]:
    whole, found, at = path.read_bytes(), [], len(HEADER)
    while at + HEAD.size <= len(whole) - FOOT.size:
        found.append(Head(*HEAD.unpack_from(whole, at)))
        at += HEAD.size + found[-1].length
    return found


def test_recordings_of_before_are_read_and_have_marks(tmp_path: Path) -> None:
    old = link.replay(EXAMPLE)
    said = list(old)
    with link.Recording(tmp_path / "new.gpumon") as recording:
        for received in said:
            recording.write(received)
    new = link.replay(tmp_path / "new.gpumon")
    assert (list(new), new.cut) == (said, None)
    assert old.index().marks == new.index().marks
    assert [mark.kind for mark in new.index().marks if mark.kind == "out of memory"] == ["out of memory"]
    assert list(old.near(5)) == said
    cut = tmp_path / "cut.gpumon"
    cut.write_bytes((tmp_path / "new.gpumon").read_bytes()[: -FOOT.size])
    walked = link.replay(cut).index()
    assert {mark.kind for mark in walked.marks} == {mark.kind for mark in new.index().marks}
    assert {mark.step for mark in walked.marks} == {walked.last_step}  # of the one block


def test_frames_hold_four_mib_each_and_one_begins_with_what_is_known(long: Path) -> None:
    of_frame: dict[int, int] = {}
    for head in heads(long):
        if not head.flags & (STATE | INDEX):
            of_frame[head.frame] = of_frame.get(head.frame, 0) + head.raw
    *full, _ = of_frame.values()
    assert len(full) >= 5
    assert all(4 * MIB <= raw < 4.3 * MIB for raw in full)


def test_a_step_is_read_as_it_is_from_the_beginning(long: Path) -> None:
    for step in (0, 40, 3_700, STEPS - 1):
        replay = link.replay(long)
        near, whole = (rank_of(until(each, step)) for each in (replay.near(step), iter(link.replay(long))))
        assert near.steps[-1] == whole.steps[-1]
        assert near.steps[-1].step == step
        assert near.lost_events == 0
        assert near.hello == whole.hello
        assert near.models == whole.models
        shown = 600  # and more in full before it
        assert [s.step for s in near.steps[-shown:]] == [s.step for s in whole.steps[-shown:]]


def test_what_was_long_ago_is_known_at_the_end_thinned(long: Path) -> None:
    messages = list(link.replay(long).near(STEPS))
    past = [r.event.closed.step for r in messages if isinstance(r.event, wire.PastStep)]
    assert past[:16] == list(range(16))
    assert 2_500 in past  # with the highest peak
    assert 128 < len(past) <= 256 + 24
    begin = next(at for at, received in enumerate(messages) if received.seq >= 0)
    assert sum(isinstance(received.event, wire.Host) for received in messages[:begin]) == 4
    read = sum(isinstance(r.event, wire.Step) for r in messages)
    assert 1_000 < read < STEPS / 2


def test_a_recording_of_four_frames_is_read_from_its_beginning(tmp_path: Path, long: Path) -> None:
    for frames in (4, 5):
        path = tmp_path / "short.gpumon"
        begin = link.replay(long).index().frames[frames].offset
        path.write_bytes(long.read_bytes()[:begin])
        replay = link.replay(path)
        assert len(replay.index().frames) == frames
        steps = sum(isinstance(r.event, wire.Step) for r in replay.near(STEPS))
        assert (steps == replay.index().last_step + 1) == (frames == 4)


def test_without_its_index_the_same_frames_are_found(tmp_path: Path, long: Path) -> None:
    known = link.replay(long).index()
    assert (known.first_step, known.last_step) == (0, STEPS - 1)
    whole = long.read_bytes()
    (begin,) = FOOT.unpack(whole[-FOOT.size :])[:1]
    cut = tmp_path / "cut.gpumon"
    for end in (begin, begin + 7, len(whole) - 1, len(whole) - 20):
        cut.write_bytes(whole[:end])
        found = link.replay(cut).index()
        assert (found.frames, found.last_step, found.last_ns) == (known.frames, known.last_step, known.last_ns)
    damaged = bytearray(whole)
    damaged[begin + HEAD.size + 3] ^= 0x55
    cut.write_bytes(damaged)
    assert link.replay(cut).index().frames == known.frames


def test_at_its_limit_gaps_are_made_and_nothing_counts_as_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.gpumon"
    limit = 900_000
    with link.Recording(path, max_size=limit) as recording:
        for received in leaking().stream(STEPS):
            recording.write(received)
            assert recording.nbytes <= limit + 400_000  # and a frame
    assert recording.thinned >= 1
    assert path.stat().st_size < limit + 400_000
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.gpumon"]
    replay = link.replay(path)
    rank = rank_of(iter(replay))
    assert replay.cut is None
    assert rank.lost_events == 0
    assert rank.steps[-1].step == STEPS - 1
    read = [r.event.step for r in link.replay(path) if isinstance(r.event, wire.Step)]
    assert read[:1_000] == list(range(1_000))
    assert read[-1_000:] == list(range(STEPS - 1_000, STEPS))
    assert len(read) < STEPS
    assert max(step.highest for step in (*rank.older, *rank.steps)) >= 900 * MIB  # step 2,500
    assert [f.number for f in replay.index().frames] == sorted({h.frame for h in heads(path)})


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    link_, pipe = tmp_path / "a.gpumon", tmp_path / "pipe"
    link_.symlink_to(tmp_path / "disk" / "a.gpumon")
    os.mkfifo(pipe)
    got: list[int] = []

    def drain() -> None:
        with pipe.open("rb") as file:
            while data := file.read(65536):
                got.append(len(data))

    reader = threading.Thread(target=drain)
    reader.start()
    for path in (link_, pipe):
        with link.Recording(path, force=True, max_size=100_000) as recording:
            for received in leaking().stream(2_600):
                recording.write(received)
        assert (recording.thinned > 0) == (path == link_)
    reader.join(60)
    assert sum(got) == recording.nbytes
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert link_.is_symlink()
    assert [each.name for each in (tmp_path / "disk").iterdir()] == ["a.gpumon"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.gpumon", "disk", "pipe"]
    rank = rank_of(iter(link.replay(link_)))
    assert (rank.steps[-1].step, rank.lost_events) == (2_599, 0)


def test_the_first_and_the_newest_frames_stay_and_the_older_the_fewer() -> None:
    frames: list[tuple[int, int]] = []
    for number in range(400):
        frames.append((number, 10))
        if len(frames) > 40:
            kept = spared(frames, 200)
            assert kept[:1] + kept[-10:] == [0, *range(31, 41)]
            assert len(kept) <= 20
            frames = [frames[at] for at in kept]
    numbers = [number for number, _ in frames]
    assert numbers[0] == 0
    assert numbers[-10:] == list(range(390, 400))
    gaps = [b - a for a, b in itertools.pairwise(numbers)]
    assert gaps[0] >= gaps[len(gaps) // 2] >= gaps[-1] == 1
    assert max(gaps) < 100
    assert spared([(0, 10), (1, 10), (2, 10)], 5) == [0, 2]  # never less


# ------------------------------------------------------------------------------------------------- hostile files


def written(payload: bytes, raw: int, flags: int = BEGINS) -> bytes:
    head = HEAD.pack(0, len(payload), raw, 1, 0, flags, -1, 1)
    return HEADER + zlib.crc32(payload, zlib.crc32(head[4:])).to_bytes(4, "little") + head[4:] + payload


@pytest.mark.parametrize("claimed", [10, RAW_MAX, RAW_MAX + 1, 2**32 - 1])
def test_a_bomb_takes_no_memory(tmp_path: Path, claimed: int) -> None:
    """A GiB of zeros in 40 kB."""
    path = tmp_path / "bomb.gpumon"
    stream = zstd.ZstdCompressor()
    bomb = b"".join(stream.compress(bytes(MIB)) for _ in range(1024)) + stream.flush()
    path.write_bytes(written(bomb, claimed))
    code = """
import resource, sys
from gpumon import link
replay = link.replay(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(len(list(replay)), len(replay.index().frames), replay.cut)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("0 ")
    assert f"{path} is damaged or cut off at byte 10: the 0 messages before it were replayed" in done.stdout
    assert int(done.stderr) < 24 * 1024  # KiB


def test_a_block_that_asks_for_a_larger_window_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "wide.gpumon"
    message = wire.encode_received(wire.Received("a", 1, wire.Heartbeat(1, 1, "forward", 0)))
    raw = len(message).to_bytes(4, "little") + message
    for log, heard in ((20, 1), (21, 0)):
        stream = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
        path.write_bytes(written(stream.compress(raw, stream.FLUSH_BLOCK), len(raw)))
        replay = link.replay(path)
        assert len(list(replay)) == heard
        assert (replay.cut is None) == bool(heard)


def test_lengths_that_cannot_be_are_damage() -> None:
    """2 MiB of messages a block, 64 MiB of an index; what does not compress grows by less than a KiB."""
    for flags, most, is_most in ((0, RAW_MAX, 2 * MIB), (INDEX, INDEX_RAW_MAX, 64 * MIB)):
        assert most == is_most
        assert Head(0, most + 1024, most, 1, 0, flags, -1, 1).sound
        assert not Head(0, 0, most + 1, 1, 0, flags, -1, 1).sound
        assert not Head(0, most + 1025, most, 1, 0, flags, -1, 1).sound


def test_an_index_that_lies_only_leads_to_damage(tmp_path: Path, long: Path) -> None:
    from gpumon.link.recording_index import Frame, Index, encode

    path = tmp_path / "lies.gpumon"
    shutil.copy(long, path)
    lies = tuple(Frame(17 + at, at, 1, at) for at in range(9))
    raw = encode(Index(lies, 1, 2, 0, 100))
    stream = compressor()
    begin = path.stat().st_size
    with path.open("ab") as file:
        file.write(written(stream.compress(raw, stream.FLUSH_FRAME), len(raw), INDEX)[len(HEADER) :])
        file.write(FOOT.pack(begin, b"gpumon.\n"))
    replay = link.replay(path)
    assert replay.index().frames == lies
    assert list(replay.near(50)) == []
    assert replay.cut is not None


def test_the_first_64_marks_of_a_kind_are_kept_and_every_out_of_memory() -> None:
    marks = Marks()
    for step in range(200):
        marks.take(wire.Received("a", step, wire.Step(step, 1, 1, input_shapes=((8, step),))))
        marks.take(wire.Received("a", step, wire.Oom(step, "forward", 0, 1, 1)))
        marks.take(wire.Received("a", step, wire.Checkpoint(step // 2, 0, step, 1, "torch.load")))
        marks.take(wire.Received("a", step, wire.Census(step, 1, step // 2, "growth")))
        marks.take(wire.Received("a", step, wire.Census(step, 1, step // 2, "asked")))
    kinds = [mark.kind for mark in marks.index(()).marks]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "out of memory": 200,
        "checkpoint": 64,
        "growth": 64,
        "new shape": 64,
    }


# ------------------------------------------------------------------------------------------------- what is known


def test_everything_that_is_known_is_said_again() -> None:
    """A store that hears only that has the same as one that heard everything."""
    from watched import Run as Watched

    from gpumon.link.recording_state import State

    run = Watched().usual().layers(12_431).leaking().census(12_431).checkpoint(12_400).segments(12_431)
    run = run.notice("a notice").host().goodbye("finished", 12_431, "between")
    run.say(wire.Outlook(12_432, 0, 1, MIB, MIB, MIB, "backward", "fits"), numbered=True)
    state, whole, again = State(), SessionStore(replaying=True), SessionStore(replaying=True)
    for received in run.events:
        state.take(received)
        whole.apply(received)
    for received in list(state.messages(0)):
        assert wire.decode_received(wire.encode_received(received)) == received
        assert len(wire.encode_received(received)) < MIB
        again.apply(received)
    (one,), (same,) = whole.frame(0).ranks, again.frame(0).ranks
    for name in (
        "hello", "models", "heartbeat", "heartbeats", "heard_unix_ns", "status", "synced", "lost_events", "oom",
        "notices", "goodbye", "host", "layers", "outlooks", "censuses", "checkpoints", "segments", "snapshot",
    ):  # fmt: skip
        assert getattr(same, name) == getattr(one, name), name
        assert name in ("heartbeats", "oom", "snapshot", "lost_events") or getattr(one, name), name
    known = {step.step: step for step in (*one.older, *one.steps)}
    kept = {step.step: step for step in same.older}
    assert max(kept) == max(known)
    assert all(step.closed == known[number].closed for number, step in kept.items())
    assert all(step.phases == known[number].phases for number, step in kept.items())


def test_of_many_ranks_as_many_steps_are_said_as_of_one() -> None:
    from gpumon.link.recording_state import State

    state = State()
    for rank in range(32):
        for received in Run(rank=rank, world_size=32, nonce=f"ab{rank:02d}", pid=4000 + rank).stream(60):
            state.take(received)
    said = [r for r in state.messages(0) if isinstance(r.event, wire.PastStep)]
    assert len({received.source for received in said}) == 32
    assert len(said) < 256 + 32 * 24  # and the beginning of each
