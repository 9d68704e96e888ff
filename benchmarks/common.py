"""Shared code of the benchmarks: paired rounds with intervals, a terminal, synthetic ranks, output files."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import pty
import random
import shlex
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import TypeVar

from gpumon_agent import endpoint, wire

T = TypeVar("T")

RESAMPLES = 2000
STEPS_A_SECOND = 20
SAMPLED_EVERY = 10
RANKS_A_PROCESS = 16
GIB, MIB = 1 << 30, 1 << 20
EMPTY_APP = [sys.executable, "-c", "from textual.app import App; App().run()"]


def options(doc: str | None, *, write: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if write:
        parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, with this command")
    return parser


def write(title: str, text: str, file: Path | None, machine: str = "") -> None:
    """Prints the text with machine and command; also writes it to `file` as a page."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    load = f"load {os.getloadavg()[0]:.1f} at the end"
    where = machine or f"Python {sys.version.split()[0]}, {os.cpu_count()} CPUs, {load}"
    page = f"{where}, by\n\n    {command}\n\n{text}"
    print(page)
    if file:
        file.write_text(f"# {title}\n\n{page}")


# --------------------------------------------------------------------------------------------------------- paired times


def rounds(ways: Mapping[str, Callable[[], T]], count: int) -> Iterator[dict[str, T]]:
    """Each round runs every way once, in random order, so that machine noise affects all of them."""
    order = random.Random(0)
    for _ in range(count):
        yield {name: ways[name]() for name in order.sample(list(ways), k=len(ways))}


def interval(
    values: Sequence[float], middle: Callable[[Sequence[float]], float] = mean, resamples: int = RESAMPLES
) -> tuple[float, float, float]:
    """The middle, and its 95 % bootstrap interval."""
    chance = random.Random(0)
    found = sorted(middle(chance.choices(values, k=len(values))) for _ in range(resamples))
    return middle(values), found[resamples * 25 // 1000], found[resamples * 975 // 1000]


def percent(before: Sequence[float], after: Sequence[float]) -> list[float]:
    return [100 * (b / a - 1) for a, b in zip(before, after, strict=True)]


def trimmed(values: list[float]) -> float:
    """The mean without the largest tenth."""
    return mean(sorted(values)[: max(1, len(values) * 9 // 10)])


# ------------------------------------------------------------------------------------------------ terminals, processes


def on_terminal(command: list[str]) -> tuple[int, int]:
    """(pid, descriptor of its terminal of 120×40)"""
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.execv(command[0], command)
    return pid, fd


def drained(fd: int, take: Callable[[bytes], object] = len) -> None:
    """Reads the terminal in a thread, so that the program never blocks."""

    def drain() -> None:
        with contextlib.suppress(OSError):
            while True:
                take(os.read(fd, 65536))

    threading.Thread(target=drain, daemon=True).start()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def proportional_bytes(pid: int | str = "self") -> int:
    """PSS: memory shared with other processes counts in part."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return 1024 * int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1])


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------------------------------- ranks that send


def step_of(step: int) -> list[wire.NumberedEvent]:
    """One training step as an agent would send it; its figures vary a little."""
    now = time.monotonic_ns()
    move = step * 7919 % 13 * 8 * MIB
    flags = wire.SAMPLED if step % SAMPLED_EVERY == 0 else 0
    made: list[wire.NumberedEvent] = []
    for phase, end, peak in (("between", 36, 48), ("forward", 48, 49), ("backward", 48, 60),
                                ("clipping", 48, 48), ("optimizer", 48, 53)):  # fmt: skip
        allocated, highest = end * GIB, peak * GIB + move
        figures = (allocated, highest, 62 * GIB, 62 * GIB, allocated, 10 * MIB, allocated - MIB, 1200, 0, 0)
        made.append(wire.Phase(step, phase, 0, 0, now, 12_000_000, *figures, flags=flags))
    if flags:
        owners = {"weights": 12 * GIB, "gradients": 12 * GIB, "optimizer": 24 * GIB - MIB, "activations": 0}
        made.append(wire.Ledger(step, "optimizer", 0, 0, 48 * GIB, 48 * GIB - MIB, 62 * GIB, **owners))
        made.append(wire.Ledger(step, "backward", 0, 0, 60 * GIB, 60 * GIB - MIB, None, **owners, peak=True))
    return [*made, wire.Step(step, now, 50_000_000, 2 * MIB, ((8, 1024),), phases=5)]


def serve(first: int, count: int, ranks: int, rate: int) -> None:
    """Runs `count` of `ranks` publishers in this process, `rate` steps a second, until stdin is closed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "_shared"))
    from threaded import Threaded

    from gpumon_agent.hooks.recorder import Recorder

    publishers = []
    clock = wire.Clock(time.monotonic_ns(), time.time_ns())
    state = [0]
    for rank in range(first, first + count):
        descriptor = endpoint.describe("bench", rank=rank, world_size=ranks, run_id="bench", unix_ns=time.time_ns())
        device = wire.Device(0, f"GPU-{rank}", "NVIDIA H200", 140 * GIB)
        hello = wire.Hello(
            (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR), "0", descriptor.nonce, "bench", descriptor.host, os.getpid(),
            descriptor.start_time, descriptor.boot_id, (), "3", clock, "cuda", "2.15.0", (device,), rank, rank, ranks,
            "bench",
        )  # fmt: skip
        recorder = Recorder()

        def beat() -> wire.Heartbeat:
            return wire.Heartbeat(time.monotonic_ns(), state[0], "backward", 10_000_000, rss=3 * GIB)

        publisher = Threaded(recorder, lambda hello=hello: [hello], beat, descriptor)
        publisher.start()
        publishers.append((publisher, recorder))
    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    due = began = time.monotonic()
    while not ended.is_set():
        for event in step_of(state[0]):
            for _, recorder in publishers:
                recorder.append(event)
        state[0] += 1
        due += 1 / rate
        time.sleep(max(0.0, due - time.monotonic()))
    print(state[0] / (time.monotonic() - began))


@contextlib.contextmanager
def sending(ranks: int, rate: int = STEPS_A_SECOND) -> Iterator[list[float]]:
    """Real publishers with their own sockets, sixteen per process. Yields a list of each one's steps/s."""
    servers = []
    for first in range(0, ranks, RANKS_A_PROCESS):
        mine = [str(first), str(min(RANKS_A_PROCESS, ranks - first)), str(ranks), str(rate)]
        servers.append(
            subprocess.Popen([sys.executable, __file__, *mine], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
    for server in servers:
        assert server.stdout is not None
        server.stdout.readline()
    rates: list[float] = []
    try:
        yield rates
    finally:
        rates += [float(server.communicate(b"")[0]) for server in servers]


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]))
