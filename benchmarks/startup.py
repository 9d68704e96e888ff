"""Time from `gpumon attach` to the first figures of a live run, and until a late viewer has the whole history.

    python benchmarks/startup.py [--times 10] [--after 0]

Starts a training process on the CPU (`--track-cpu`: exact bytes) with 60 steps per second, and lets it run for
`--after` seconds. Then a subscription: time to the static picture and to the whole history, and the history's range.
Then, in turn, `gpumon attach` and an empty Textual app, each on a new terminal of 120×40: time from fork to the first
byte and to the screen (a phase with its figure), and CPU time until then. The empty app shows how busy the machine was:
the budget is 0.5 s if the empty app takes 0.2.
"""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from common import EMPTY_APP, on_terminal, options

from gpumon import link
from gpumon_agent import wire

SCRIPT = """
import time
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(32, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.012)
"""
ANSI = re.compile(rb"\x1b\[[0-9;?>=]*[a-zA-Z$]")
DATA = re.compile(rb"backward\s+[0-9]")
PATIENCE_S = 20.0


@dataclass
class Start:
    """Seconds from fork to the first byte and to the screen; CPU time until then."""

    first: float = float("nan")
    screen: float | None = None
    cpu: float = 0.0


def start(command: list[str], data: re.Pattern[bytes] | None) -> Start:
    """Starts the command, waits for `data` (or the whole first picture), kills it."""
    made = Start()
    began = time.perf_counter()
    pid, fd = on_terminal(command)
    seen = b""
    try:
        while time.perf_counter() - began < PATIENCE_S:
            ready, _, _ = select.select([fd], [], [], 0.5)
            if not ready:
                continue
            try:
                chunk = os.read(fd, 65536)
            except OSError:
                break
            now = time.perf_counter() - began
            made.first = now if made.first != made.first else made.first
            seen += chunk
            whole = b"\x1b[?1049h" in seen and len(seen) > 2000
            if whole if data is None else data.search(ANSI.sub(b"", seen)):
                made.screen = now
                break
    finally:
        os.kill(pid, signal.SIGKILL)
        used = os.wait4(pid, 0)[2]
        os.close(fd)
    made.cpu = used.ru_utime + used.ru_stime
    return made


async def late(pid: int) -> None:
    """Prints a subscription's time to the picture and to the end of the history."""
    began = time.perf_counter()
    picture = 0.0
    steps: list[int] = []
    async for received in link.subscribe(link.resolve(str(pid))):
        event = received.event
        if isinstance(event, wire.Hello) and not picture:
            picture = time.perf_counter() - began
        elif isinstance(event, wire.PastStep):
            steps.append(event.closed.step)
        elif isinstance(event, wire.Step) and received.replayed:
            steps.append(event.step)
        elif isinstance(event, wire.Synced):
            break
    took = time.perf_counter() - began
    print(f"static picture after {picture * 1e3:.0f} ms, the history after {took * 1e3:.0f} ms: {len(steps):,} steps")
    print(f"from {steps[0]:,} to {steps[-1]:,}; load {os.getloadavg()[0]:.1f}")


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--after", type=float, default=0.0, help="seconds of training before the viewers come")
    asked = parser.parse_args()
    times = asked.times
    gpumon = [sys.executable, "-m", "gpumon"]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        script = Path(folder) / "train.py"
        script.write_text(SCRIPT)
        train = subprocess.Popen([*gpumon, "run", "--track-cpu", str(script)], stdout=subprocess.DEVNULL)
        try:
            while str(train.pid) not in subprocess.run([*gpumon, "ls"], capture_output=True, text=True).stdout:
                time.sleep(0.5)
            time.sleep(3 + asked.after)
            asyncio.run(late(train.pid))
            attach = [*gpumon, "attach", str(train.pid)]
            rows: dict[str, list[Start]] = {"gpumon attach": [], "empty Textual app": []}
            for _ in range(times):
                rows["gpumon attach"].append(start(attach, DATA))
                rows["empty Textual app"].append(start(EMPTY_APP, None))
        finally:
            train.kill()
            train.wait()
    print(f"{'':<20}{'first byte':>12}{'screen':>10}{'least':>10}{'most':>10}{'cpu':>10}   s, median of {times}")
    for name, found in rows.items():
        screens = [made.screen for made in found if made.screen is not None]
        if not screens:
            print(f"{name:<20} never came")
            continue
        first, cpu = median(made.first for made in found), median(made.cpu for made in found)
        print(f"{name:<20}{first:>12.3f}{median(screens):>10.3f}{min(screens):>10.3f}{max(screens):>10.3f}{cpu:>10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
