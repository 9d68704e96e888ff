"""What the screen costs while following a job: CPU time, memory and terminal output, through a pty of 120×40.

    python benchmarks/viewer.py [--ranks 8] [--seconds 20] [--keys 2]

The ranks are real publishers with their own sockets, sixteen per process, 20 steps per second, five phases and, on
every tenth step, two ledgers each. `--keys 2` measures the Ranks screen. Pictures are bursts of output: the screen's
rate. At the end, the Log screen shows whether events were lost, and the ranks report their steps per second: on a
machine too busy for them the viewer has less to do.
CPU time is the viewer's own, then that of its child, which queries NVML. An empty Textual app in the same pty is
measured first. Budgets: 5 % of a core and 64 MB at 8 ranks; 15 % at 64, with four pictures per second.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time

from common import EMPTY_APP, cpu_s, drained, on_terminal, options, resident_bytes, sending

WARM_S = 8.0
BURST_S = 0.04  # silence that ends a picture
LOG_S, LOG_BYTES = 2.0, 1 << 16


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return [int(child) for child in file.read().split()]


def measure(name: str, command: list[str], seconds: float, keys: str = "") -> None:
    """Prints what a command takes in a pty, after warm-up."""
    pid, fd = on_terminal(command)
    written, pictures = [0], [0]
    newest = bytearray()

    before_s = [0.0]

    def take(output: bytes) -> None:
        written[0] += len(output)
        newest.extend(output)
        del newest[:-LOG_BYTES]
        pictures[0] += time.monotonic() - before_s[0] > BURST_S
        before_s[0] = time.monotonic()

    drained(fd, take)
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
        f"{name:<22} {own:7.2%} of a core, {resident_bytes(pid) / 1e6:5.1f} MB, {output:6.1f} kB/s to the terminal"
        f" in {pictures[0] / took:.1f} pictures/s"
        f"; its {len(helpers)} children {theirs:.2%}, {sum(map(resident_bytes, helpers)) / 1e6:.1f} MB"
        f"; {lost}; load {os.getloadavg()[0]:.1f}"
    )
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keys", default="", help="pressed before it is measured")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        with sending(asked.ranks) as rates:
            time.sleep(2)
            measure("empty Textual app", EMPTY_APP, asked.seconds / 2)
            attach = [sys.executable, "-m", "gpumon", "attach", "bench"]
            measure(f"attach, {asked.ranks} ranks", attach, asked.seconds, asked.keys)
    print(f"{'the ranks sent':<22} {min(rates):7.1f} to {max(rates):.1f} steps/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
