"""What the screen costs while following a job: CPU time, memory and terminal output, through a pty of 120×40.

    python benchmarks/viewer.py [--ranks 8] [--rate 20] [--seconds 20] [--after 2] [--keys 2]

The ranks are real publishers with their own sockets, sixteen per process, `--rate` steps per second, five phases and,
on every tenth step, two ledgers each. `--keys 2` measures the Ranks screen. Pictures are bursts of output: the screen's
rate. Then the keys of six screens are pressed in turn: the time until output ends that a key began, without the wait
that shows its end. At the end, the Log screen shows whether events were lost, and the ranks report their steps per
second: on a machine too busy for them the viewer has less to do.
CPU time is the viewer's own, then that of its child, which queries NVML. An empty Textual app in the same pty is
measured first. Memory is PSS, of the viewer and its child. Budgets: 2 % of a core, 55 MB and 4 kB/s for one job of 5
steps/s; 5 % and 64 MB at 8 ranks; 15 % at 64; 100 ms for a key.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from statistics import median

from common import EMPTY_APP, STEPS_A_SECOND, cpu_s, drained, on_terminal, options, proportional_bytes, sending

WARM_S = 8.0
BURST_S = 0.04  # silence that ends a picture
KEY_S = 0.03  # and one that a key began: the next one must not join it
SCREENS = "345671"
LOG_S, LOG_BYTES = 2.0, 1 << 16


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:  # noqa: PTH123
        return [int(child) for child in file.read().split()]


def pressed(fd: int, key: str, newest_s: list[float]) -> float:
    """Seconds from a key until the last output of its picture."""
    time.sleep(0.7)
    began = time.monotonic()
    os.write(fd, key.encode())
    while newest_s[0] < began and time.monotonic() - began < 5:
        time.sleep(0.002)
    while time.monotonic() - newest_s[0] < KEY_S:
        time.sleep(0.002)
    return newest_s[0] - began


def measure(name: str, command: list[str], seconds: float, keys: str = "", *, keys_too: bool = False) -> None:
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
    memory = [proportional_bytes(each) for each in (pid, *helpers)]
    waits = [pressed(fd, key, before_s) for key in SCREENS * 2] if keys_too else []
    os.write(fd, b"7")
    time.sleep(LOG_S)
    lost = "LOST EVENTS" if b"did not reach" in newest else "nothing lost"
    print(
        f"{name:<22} {own:7.2%} of a core, {memory[0] / 1e6:5.1f} MB, {output:6.1f} kB/s to the terminal"
        f" in {pictures[0] / took:.1f} pictures/s"
        f"; its {len(helpers)} children {theirs:.2%}, {sum(memory[1:]) / 1e6:.1f} MB"
        f"; {lost}; load {os.getloadavg()[0]:.1f}"
    )
    if waits:
        print(f"{'  a key':<22} {median(waits) * 1e3:4.0f} ms, {max(waits) * 1e3:.0f} at most")
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate", type=int, default=STEPS_A_SECOND, help="steps per second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--after", type=float, default=2.0, help="seconds that the job has run before (2)")
    parser.add_argument("--keys", default="", help="pressed before it is measured")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        with sending(asked.ranks, asked.rate) as rates:
            time.sleep(asked.after)
            measure("empty Textual app", EMPTY_APP, asked.seconds / 2)
            attach = [sys.executable, "-m", "gpumon", "attach", "bench"]
            measure(f"attach, {asked.ranks} ranks", attach, asked.seconds, asked.keys, keys_too=True)
    print(f"{'the ranks sent':<22} {min(rates):7.1f} to {max(rates):.1f} steps/s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
