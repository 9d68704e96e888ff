"""What it costs to read memory snapshots and to move through their events: `python benchmarks/snapshots.py`.

Trains on the virtual GPU with recorded events, and reads the files, 50 to 400 MB each: time, and the memory of
gpumon and its reader together. Then moves the cursor of `gpumon snapshot FILE --screen` through 1,000,000 events that
are made up, with 20,000 blocks in use. Two minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import psutil
from common import options, write

from gpumon import virtual_gpu
from gpumon.snapshots.model import Device, Snapshot
from gpumon.snapshots.reading import read
from gpumon.snapshots.summary import summarize
from gpumon.snapshots.trace import ALLOC, FREE_COMPLETED, Trace
from gpumon.tui.snapshot_app import SnapshotApp
from gpumon.tui.themed_app import Options

TRAINING = """
import sys
import torch
path, stacks, steps, layers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kept = {"stacks": stacks, "context": "all"} if stacks != "none" else {"context": None}
torch.cuda.memory._record_memory_history(max_entries=10**7, **kept)
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 4, 512, batch_first=True), layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for _ in range(steps):
    model(torch.randn(4, 64, 256, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.memory._dump_snapshot(path)
"""
FILES = (("all", 30), ("all", 250), ("none", 150))  # stacks, steps
LARGE = ("all", 800)
LAYERS = 24
LOOK_S = 0.02
EVENTS, IN_USE, LINES, MOVES = 1_000_000, 20_000, 200, 60


class Resident:
    """The largest sum of resident bytes of this process and its children, less what it had at first."""

    def __init__(self) -> None:
        self._process, self._over = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most = 0

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            now = 0
            for each in (self._process, *self._process.children()):
                try:
                    now += each.memory_info().rss
                except psutil.Error:
                    continue
            self.most = max(self.most, now)

    def __enter__(self) -> Resident:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def readings(files: Sequence[tuple[str, int]]) -> Iterator[str]:
    yield "| stacks | file | events | time | memory of gpumon and its reader, in sizes of the file |"
    yield "|---|--:|--:|--:|--:|"
    for stacks, steps in files:
        environment = virtual_gpu.environment(profile="a100-80")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "snapshot.pickle")
            command = [sys.executable, "-c", TRAINING, str(path), stacks, str(steps), str(LAYERS)]
            try:
                subprocess.run(command, env=environment, check=True)
            finally:
                virtual_gpu.remove_session(environment["VGPU_SESSION"])
            # in a process of its own: this one has read others before
            code = "import sys; from snapshots import one; one(sys.argv[1])"
            done = subprocess.run(
                [sys.executable, "-c", code, str(path)], cwd=Path(__file__).parent, check=True, stdout=subprocess.PIPE,
                text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
            yield f"| {'C++ and Python' if stacks == 'all' else 'none'} | {done.stdout.strip()} |"


def one(path: str) -> None:
    size = Path(path).stat().st_size
    with Resident() as resident:
        began = time.monotonic()
        snapshot = read(Path(path))
        took = time.monotonic() - began
    events = sum(len(device.trace.codes) for device in snapshot.devices if device.trace is not None)
    print(f"{size / 1e6:,.0f} MB | {events:,} | {took:.1f} s | {resident.most / size:.2f}")


def made_up() -> Snapshot:
    rng = random.Random(1)
    codes, ids, sizes = array("B"), array("q"), array("q")
    alive: list[int] = []
    of: list[int] = []
    while len(codes) < EVENTS:
        if len(alive) < IN_USE or rng.random() < 0.5:
            alive.append(len(of))
            of.append(rng.randrange(512, 1 << 20))
            codes.append(ALLOC)
            ids.append(alive[-1])
        else:
            at = rng.randrange(len(alive))
            alive[at], alive[-1] = alive[-1], alive[at]
            codes.append(FREE_COMPLETED)
            ids.append(alive.pop())
        sizes.append(of[ids[-1]])
    trace = Trace((), codes, ids, sizes, array("q", bytes(8 * EVENTS)), {}, None)
    lines = array("q", (rng.randrange(LINES) for _ in of))
    device = Device(0, (), trace, lines, array("q", [-1]) * len(of), {}, 0)
    return Snapshot((device,), tuple(f"/train/file{n}.py:{n} forward" for n in range(LINES)), (), {})


async def moves() -> str:
    snapshot = made_up()
    app = SnapshotApp(Path("made up"), snapshot, summarize(snapshot), Options())
    rng, rows = random.Random(2), []
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        for key, name in (("1", "by source line"), ("2", "blocks")):
            await pilot.press(key)
            await pilot.pause()
            took = []
            for _ in range(MOVES):
                began = time.perf_counter()
                app.go_to_step(rng.randrange(EVENTS))
                took.append(1000 * (time.perf_counter() - began))
            rows.append(f"| {name} | {median(took):.0f} ms | {max(took):.0f} ms |")
    return "\n".join([f"| {EVENTS:,} events, table | a move, median | most |", "|---|--:|--:|", *rows])


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--large", action="store_true", help="also a file of 1.2 GB, which takes 3 minutes more")
    args = parser.parse_args()
    files = (*FILES, LARGE) if args.large else FILES
    write("Reading snapshots", "\n".join(readings(files)) + f"\n\n{asyncio.run(moves())}\n", args.write)


if __name__ == "__main__":
    main()
