"""Recordings: what was written is what is replayed, wherever the file was cut."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from gpumon import link
from gpumon.link.recording_blocks import HEAD, HEADER, Head
from gpumon_agent import wire
from gpumon_agent.wire import Received
from gpumon_agent.wire import recording as plain

Start = Callable[..., Any]


def messages(count: int, gap_ns: int = 1000) -> list[Received]:
    beats = (wire.Heartbeat(i, i, "forward", 0) for i in range(count))
    return [Received("ab", 10**18 + i * gap_ns, beat, i) for i, beat in enumerate(beats)]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "a.gpumon"
    with link.Recording(path) as recording:
        for at, message in enumerate(messages(12)):
            if at % 3 == 0:
                recording.flush()
            recording.write(message)
    return path


def heads_of(whole: bytes) -> list[Head]:
    heads, at = [], len(HEADER)
    while at + HEAD.size <= len(whole):
        heads.append(Head(*HEAD.unpack_from(whole, at)))
        at += HEAD.size + heads[-1].length
    return heads


def blocks_of(whole: bytes) -> list[int]:
    """Where each block ends."""
    return list(accumulate((HEAD.size + head.length for head in heads_of(whole)), initial=len(HEADER)))[1:]


def test_every_message_comes_back_in_order(recorded: Path) -> None:
    replay = link.replay(recorded)
    assert list(replay) == messages(12)
    assert replay.cut is None
    assert list(replay) == messages(12)


def test_a_message_of_more_than_a_mib_is_damage(tmp_path: Path) -> None:
    """Its length is read before its checksum, and so much memory is taken for it."""
    path = tmp_path / "long.gpumon"
    for length, heard in ((1 << 20, 2), ((1 << 20) + 1, 1)):
        beat = wire.encode_received(messages(1)[0])
        later = b"\xc6" + (length - len(beat) - 5).to_bytes(4, "big")  # of a newer agent: one more field, of bytes
        long = (bytes([beat[0] + 1]) + beat[1:] + later).ljust(length, b"x")
        path.write_bytes(plain.HEADER + plain.framed(beat) + plain.framed(long))
        replay = link.replay(path)
        assert len(list(replay)) == heard
        assert (replay.cut is None) == (heard == 2)


def test_cut_at_any_byte_everything_before_is_replayed_and_the_rest_told(recorded: Path, tmp_path: Path) -> None:
    whole = recorded.read_bytes()
    cut = tmp_path / "cut.gpumon"
    before = 0
    ends = [10, *blocks_of(whole)]
    assert len(ends) == 6  # four blocks of three messages, and the index
    for length in range(1, ends.pop()):
        cut.write_bytes(whole[:length])
        replay = link.replay(cut)
        heard = list(replay)
        assert heard == messages(12)[: len(heard)]
        assert len(heard) >= before
        before = len(heard)
        if length in ends:
            assert replay.cut is None
            assert len(heard) == ends.index(length) * 3
        else:
            assert replay.cut is not None
            assert "\n" not in replay.cut
    assert before == 12


def test_damaged_at_any_byte_nothing_wrong_is_replayed(recorded: Path, tmp_path: Path) -> None:
    whole = recorded.read_bytes()
    damaged = tmp_path / "damaged.gpumon"
    for index in range(10, blocks_of(whole)[3]):
        damaged.write_bytes(whole[:index] + bytes([whole[index] ^ 0x55]) + whole[index + 1 :])
        replay = link.replay(damaged)
        heard = list(replay)
        assert heard == messages(12)[: len(heard)]
        assert replay.cut is not None
        assert f"the {len(heard)} messages before it were replayed" in replay.cut


async def test_replayed_at_its_own_pace_and_faster(tmp_path: Path) -> None:
    path = tmp_path / "a.gpumon"
    with link.Recording(path) as recording:
        for message in messages(5, gap_ns=50_000_000):
            recording.write(message)
    for speed, seconds in ((1.0, 0.2), (4.0, 0.05), (None, 0.0)):
        began = time.monotonic()
        assert [received async for received in link.replay(path, speed)] == messages(5, gap_ns=50_000_000)
        assert seconds <= time.monotonic() - began < seconds + 0.15


@pytest.mark.parametrize("content", [b"", b"not a recording", b"\x89PNG\r\n\x1a\n"])
def test_a_file_that_is_no_recording_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(link.BadRecording, match="is not a recording of gpumon; give a file made by `gpumon record`"):
        link.replay(path)


def test_a_newer_format_is_refused(recorded: Path) -> None:
    raw = bytearray(recorded.read_bytes())
    raw[8] = 3
    recorded.write_bytes(raw)
    with pytest.raises(link.BadRecording, match="has recording format 3, this gpumon reads 1 and 2; upgrade gpumon"):
        link.replay(recorded)


def test_a_missing_recording_is_told(tmp_path: Path) -> None:
    with pytest.raises(link.BadRecording, match="No such file"):
        link.replay(tmp_path / "x")


def test_an_existing_file_is_not_overwritten_unless_forced(recorded: Path) -> None:
    with pytest.raises(link.RecordingFailed, match="exists; choose another name, or overwrite it with --force"):
        link.Recording(recorded)
    with link.Recording(recorded, force=True) as recording:
        recording.write(messages(1)[0])
    assert len(list(link.replay(recorded))) == 1


def test_at_most_256_kib_wait_to_be_written(tmp_path: Path) -> None:
    ends = [0]
    with link.Recording(tmp_path / "a.gpumon") as recording:
        for message in messages(20_000):
            recording.write(message)
            ends.append(ends[-1] + 4 + len(wire.encode_received(message)))
            assert ends[-1] - ends[recording.messages] < 256 * 1024
    assert ends[-1] > 512 * 1024
    heads = heads_of((tmp_path / "a.gpumon").read_bytes())
    assert [256 * 1024 <= head.raw < 257 * 1024 for head in heads[:2]] == [True, True]


def test_nothing_recorded_nothing_overwritten(recorded: Path, tmp_path: Path) -> None:
    link.Recording(recorded, force=True).close()
    link.Recording(tmp_path / "new").close()
    assert len(list(link.replay(recorded))) == 12
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("batch", [7, 900])
def test_a_full_disk_is_one_sentence_and_what_was_written_stays_valid(tmp_path: Path, batch: int) -> None:
    """The kernel's limit on a file's size stands in for the disk: the write that meets it is cut in its middle."""
    path = tmp_path / "a.gpumon"
    code = """
import resource, sys
from pathlib import Path
from gpumon import link
from gpumon_agent import wire
recording = link.Recording(Path(sys.argv[1])) # imported now: the limit would cut its bytecode off too
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    for i in range(3000):
        recording.write(wire.Received("ab", i, wire.Heartbeat(i * 7919 % 100_003, i, "forward", 0)))
        if i % int(sys.argv[2]) == 0: recording.flush()
except link.LinkError as error:
    print(recording.messages, error)
recording.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(batch)], capture_output=True, text=True, check=True
    )
    count, _, sentence = done.stdout.strip().partition(" ")
    kept = f"{path} holds {count} messages and can be replayed"
    assert sentence == f"recording stopped: File too large; {kept}"
    replay = link.replay(path)
    assert len(list(replay)) == int(count)
    assert path.stat().st_size <= 5000
    assert batch != 7 or path.stat().st_size > 4900
    assert replay.cut is None


def test_a_device_that_is_full_says_so() -> None:
    recording = link.Recording(Path("/dev/full"), force=True)
    recording.write(messages(1)[0])
    with pytest.raises(
        link.RecordingFailed, match="No space left on device; /dev/full holds nothing: free some space there"
    ):
        recording.flush()
    recording.close()


# ------------------------------------------------------------------------------------------------- the commands


def gpumon(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gpumon", *arguments], capture_output=True, text=True, timeout=300)


def test_record_until_the_job_ends(start: Start, tmp_path: Path) -> None:
    agent = start()
    agent.ask("steps 20")
    path = tmp_path / "a.gpumon"
    command = [sys.executable, "-m", "gpumon", "record", str(path), str(agent.pid)]
    recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: path.exists())
    agent.ask("steps 5")
    time.sleep(0.3)
    agent.ask("goodbye")
    assert recorder.wait(120) == 0
    assert recorder.stderr is not None
    assert str(path) in recorder.stderr.read()
    recorder.stderr.close()
    heard = list(link.replay(path))
    assert [r.seq for r in heard if r.seq >= 0] == list(range(100))
    assert [r for r in heard if r.source.startswith("host:") and isinstance(r.event, wire.Host)]
    assert heard[-1].event.reason == "finished" or isinstance(heard[-1].event, wire.Host)


def test_a_killed_recorder_leaves_a_valid_recording(start: Start, tmp_path: Path) -> None:
    agent = start()
    path = tmp_path / "a.gpumon"
    recorder = subprocess.Popen([sys.executable, "-m", "gpumon", "record", str(path)], stderr=subprocess.DEVNULL)
    agent.ask("background 2000")
    wait_for(lambda: path.exists() and path.stat().st_size > 200_000)
    recorder.kill()
    recorder.wait()
    heard = [r.seq for r in link.replay(path) if r.seq >= 0]
    assert heard == list(range(heard[0], heard[0] + len(heard)))
    assert len(heard) > 1000


def test_the_killed_process_is_lost_in_the_recording_too(start: Start, tmp_path: Path) -> None:
    agent = start()
    path = tmp_path / "a.gpumon"
    recorder = subprocess.Popen([sys.executable, "-m", "gpumon", "record", str(path)], stderr=subprocess.DEVNULL)
    wait_for(lambda: path.exists())
    agent.kill()
    assert recorder.wait(120) == 0
    goodbyes = [r.event for r in link.replay(path) if isinstance(r.event, wire.Goodbye)]
    assert [goodbye.reason for goodbye in goodbyes] == ["lost"]


def test_what_cannot_be_recorded_is_one_sentence_and_exit_code_1(start: Start, recorded: Path, tmp_path: Path) -> None:
    start()
    for arguments, sentence in (
        ([str(recorded)], "exists; choose another name, or overwrite it with --force"),
        ([str(tmp_path / "no" / "x")], "cannot be written; choose another place"),
        ([str(tmp_path / "x"), "999999999"], "no process has pid 999999999"),
    ):
        done = gpumon("record", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1
    assert gpumon("record").returncode == 2


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


async def test_a_replay_lets_the_event_loop_have_its_turn(tmp_path: Path) -> None:
    path = tmp_path / "a.gpumon"
    with link.Recording(path) as recording:
        for message in messages(20_000):
            recording.write(message)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    assert len([received async for received in link.replay(path)]) == 20_000
    beside.cancel()
    assert turns > 20


def test_ls_lists_live_and_stopped_processes(start: Start) -> None:
    import json
    import signal

    live = start(name="live.py", rank=0, world_size=2)
    live.ask("steps 1234")
    halted = start(name="halted.py")
    os.kill(halted.pid, signal.SIGSTOP)
    table = gpumon("ls")
    assert table.returncode == 0
    header, first, second = table.stdout.splitlines()
    assert header.split() == ["PID", "NAME", "RANK", "DEVICE", "STEP", "AGE", "STATUS"]
    assert first.split()[:5] == [str(live.pid), "live.py", "0/2", "cpu", "1,234"]
    assert second.endswith("stopped (SIGSTOP)")
    objects = [json.loads(line) for line in gpumon("ls", "--json").stdout.splitlines()]
    assert [o["status"] for o in objects] == ["live", "stopped (SIGSTOP)"]
    assert objects[0]["step"] == 1234
    assert objects[0]["age_s"] < 60
    assert objects[1]["step"] is None


def test_ls_of_nothing_says_how_to_start_something(runtime: Path) -> None:
    done = gpumon("ls")
    assert (done.returncode, done.stdout) == (0, "")
    assert "gpumon run" in done.stderr
    assert gpumon("ls", "--json").stdout == ""
