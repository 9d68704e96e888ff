"""How soon a recording of 10,000,000 steps is open, at its end and at a step: python benchmarks/long_recording.py

Its first and last 20,000 steps are written as `gpumon record` writes them; the frames between are copies of real ones
with other numbers, for writing them all takes half an hour. Times are of processes of their own, the file in the page
cache: importing, finding the frames, reading to the step, and analysing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "_shared"))

from synthetic import Run

from gpumon import link
from gpumon.link.recording_blocks import HEAD, Head
from gpumon.link.recording_index import Frame

STEPS = 10_000_000
REAL = 20_000

OPEN = """
import sys, time
began = time.perf_counter()
from gpumon import link
from gpumon.session.store import SessionStore
from gpumon.analysis import report
from gpumon_agent import wire
replay = link.replay(sys.argv[1])
index = replay.index()
step = index.last_step if sys.argv[2] == "end" else int(sys.argv[2])
store = SessionStore(replaying=True)
for received in replay.near(step):
    store.apply(received)
    if isinstance(received.event, wire.Step) and received.event.step >= step:
        break
reports = report(store.frame(0))
ended = time.perf_counter()
print(f"{len(index.frames):,} frames, step {store.frame(0).ranks[0].steps[-1].step:,}: {ended - began:.2f} s,"
      f" {time.process_time():.2f} s of a core, {replay.messages:,} messages read")
"""


def build(path: Path) -> None:
    run = Run(kept=lambda step: step * 64)
    recording = link.Recording(path, force=True)
    for received in run.picture():
        recording.write(received)
    for step in range(REAL):
        for received in run.step(step):
            recording.write(received)
    recording.flush()
    frames = recording._frames
    whole = path.read_bytes()
    begin, end = frames[1].offset, frames[2].offset
    each = (frames[2].step - frames[1].step) or 1
    recording._next_frame()
    started = frames.pop()
    fd = recording._fd
    assert fd is not None
    recording.nbytes = started.offset
    number, step = started.number, REAL - 1
    os.ftruncate(fd, started.offset)
    os.lseek(fd, started.offset, os.SEEK_SET)
    copied = [(at, Head(*HEAD.unpack_from(whole, at))) for at in offsets(whole, begin, end)]
    while step + each < STEPS - REAL:
        frames.append(Frame(recording.nbytes, number, run.unix_ns(step), step))
        out = bytearray()
        for at, head in copied:
            moved = HEAD.pack(0, *head[1:4], number, head.flags, step + head.step - frames[1].step, run.unix_ns(step))
            payload = whole[at + HEAD.size : at + HEAD.size + head.length]
            out += zlib.crc32(payload, zlib.crc32(moved[4:])).to_bytes(4, "little") + moved[4:] + payload
        recording._put(bytes(out))
        number, step = number + 1, step + each
    recording._next_frame()
    run._seq = 8 * step
    for late in range(STEPS - REAL, STEPS):
        for received in run.step(late):
            recording.write(received)
    recording.close()


def offsets(whole: bytes, at: int, end: int) -> list[int]:
    found = []
    while at < end:
        found.append(at)
        at += HEAD.size + Head(*HEAD.unpack_from(whole, at)).length
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(sys.argv[1] if len(sys.argv) > 1 else scratch) / "long.gpumon"
        began = time.perf_counter()
        build(path)
        print(f"{path.stat().st_size / 1e6:,.0f} MB, made in {time.perf_counter() - began:.0f} s")
        for cut in (0, 20):
            if cut:
                with path.open("r+b") as file:
                    file.truncate(path.stat().st_size - cut)
                print("without its index, as after kill -9:")
            for step in ("end", str(STEPS - 5_000), "5000"):
                done = subprocess.run([sys.executable, "-c", OPEN, str(path), step], capture_output=True, text=True)
                print(f"  {step}: {done.stdout.strip() or done.stderr}")


if __name__ == "__main__":
    main()
