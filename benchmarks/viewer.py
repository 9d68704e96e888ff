"""What the screen costs: processor time, memory and terminal output while it follows a job, through a pty of 120×40.

    python benchmarks/viewer.py [--ranks 8] [--seconds 20] [--keys 2]

The ranks are real publishers with sockets of their own, sixteen a process, 20 steps a second, five phases and, on every
tenth step, two ledgers each. `--keys 2` measures the Ranks screen. Pictures are bursts of output: the screen's rate.
At the end the Log screen is asked whether events were lost, and the ranks how many steps a second they could send:
on a machine that is too busy for them the viewer has less to do.
Processor time is the viewer's own, then that of its child, which asks NVML. Beside it an empty Textual app in the same
pty. Budgets: 5 % of a core and 64 MB at 8 ranks; 15 % at 64, with four pictures a second.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time

from gpumon_agent import endpoint, wire
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.transport.publisher import Publisher

STEPS_A_SECOND = 20
SAMPLED_EVERY = 10
WARM_S = 8.0
GIB = 1 << 30
MIB = 1 << 20
RANKS_A_PROCESS = 16
BURST_S = 0.04  # silence that ends a picture
LOG_S, LOG_BYTES = 2.0, 1 << 16
EMPTY = "from textual.app import App; App().run()"


def events(step: int) -> list[wire.NumberedEvent]:
    """One step of a training process as its agent would tell it; its figures move a little."""
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


def serve(first: int, count: int, ranks: int) -> None:
    """`count` of `ranks` publishers in this process; ends when its standard input does."""
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

        publisher = Publisher(recorder, lambda hello=hello: [hello], beat, descriptor)  # type: ignore[misc]
        publisher.start()
        publishers.append((publisher, recorder))
    for publisher, _ in publishers:
        publisher.wait_ready(5)
    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    due = began = time.monotonic()
    while not ended.is_set():
        for event in events(state[0]):
            for _, recorder in publishers:
                recorder.append(event)
        state[0] += 1
        due += 1 / STEPS_A_SECOND
        time.sleep(max(0.0, due - time.monotonic()))
    print(state[0] / (time.monotonic() - began))


def cpu_s(pid: int) -> float:
    fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()  # noqa: SIM115, PTH123
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return [int(child) for child in file.read().split()]


def measure(name: str, command: list[str], seconds: float, keys: str = "") -> None:
    """Prints what a command takes in a pty, after it has settled."""
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor")
        os.execv(command[0], command)
    written, pictures = [0], [0]
    newest = bytearray()

    def drain() -> None:
        before = 0.0
        while True:
            try:
                output = os.read(fd, 65536)
            except OSError:
                return
            written[0] += len(output)
            newest.extend(output)
            del newest[:-LOG_BYTES]
            pictures[0] += time.monotonic() - before > BURST_S
            before = time.monotonic()

    threading.Thread(target=drain, daemon=True).start()
    time.sleep(WARM_S)
    if keys:
        os.write(fd, keys.encode())
        time.sleep(2)
    helpers = children(pid)
    before, helped, bytes_before = cpu_s(pid), sum(map(cpu_s, helpers)), written[0]
    pictures[0] = 0
    began = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    own, theirs = (cpu_s(pid) - before) / took, (sum(map(cpu_s, helpers)) - helped) / took
    output = (written[0] - bytes_before) / took / 1000
    os.write(fd, b"7")
    time.sleep(LOG_S)
    lost = "LOST EVENTS" if b"did not reach" in newest else "nothing lost"
    print(
        f"{name:<22} {own:7.2%} of a core, {rss_mb(pid):5.1f} MB, {output:6.1f} kB/s to the terminal"
        f" in {pictures[0] / took:.1f} pictures/s"
        f"; its {len(helpers)} children {theirs:.2%}, {sum(map(rss_mb, helpers)):.1f} MB"
        f"; {lost}; load {os.getloadavg()[0]:.1f}"
    )
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keys", default="", help="pressed before it is measured")
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(*asked.serve, asked.ranks)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        servers = []
        for first in range(0, asked.ranks, RANKS_A_PROCESS):
            mine = [str(first), str(min(RANKS_A_PROCESS, asked.ranks - first)), "--ranks", str(asked.ranks)]
            command = [sys.executable, __file__, "--serve", *mine]
            servers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        try:
            for server in servers:
                assert server.stdout is not None
                server.stdout.readline()
            time.sleep(2)
            measure("empty Textual app", [sys.executable, "-c", EMPTY], asked.seconds / 2)
            attach = [sys.executable, "-m", "gpumon", "attach", "bench"]
            measure(f"attach, {asked.ranks} ranks", attach, asked.seconds, asked.keys)
        finally:
            rates = [float(server.communicate(b"")[0]) for server in servers]
    print(f"{'the ranks sent':<22} {min(rates):7.1f} to {max(rates):.1f} steps/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
