"""`gpumon attach PID --inject` and `gpumon detach PID`, again and again: `python benchmarks/joining.py [--times 50]`.

Each kind of process is joined and left that often, with pauses of up to 0.2 s. Of trainings the losses are compared
with those of one that was left alone, bit by bit. Needs gdb. Some six minutes.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from common import options, write

from gpumon.cli import joining

IDLE = "import time, torch\nprint(1, flush=True)\nwhile True: time.sleep(0.01)"
TRAINING = """
import sys, time, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(16, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item().hex(), flush=True)
    time.sleep(float(sys.argv[2]))
"""
KINDS = {"idle, without a model": None, "a step, then 50 ms": 0.05, "steps without a pause": 0.0}
ENDLESS = 10**9


def tried(pause_s: float | None, times: int) -> tuple[list[float], str]:
    """Seconds of each call, and what became of the process."""
    command = [sys.executable, "-c", IDLE if pause_s is None else TRAINING]
    rest = [] if pause_s is None else [str(ENDLESS), str(pause_s)]
    took, refused = [], 0
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with (
            output.open("w") as out,
            errors.open("w") as err,
            subprocess.Popen([*command, *rest], stdout=out, stderr=err) as process,
        ):
            while not output.read_text():
                time.sleep(0.1)
            for _ in range(times):
                for function in ("join", "leave"):
                    began = time.monotonic()
                    refused += bool(joining.call(process.pid, function))
                    took.append(time.monotonic() - began)
                    time.sleep(random.random() * 0.2)
            ended = process.poll()
            process.kill()
        printed = output.read_text().splitlines()[:-1]  # the last line may be half
        said = errors.read_text()
    if ended is not None:
        return took, f"ended with code {ended}"
    if pause_s is None:
        return took, "runs on" + (f", and printed {said!r}" if said else "")
    alone = subprocess.run([*command, str(len(printed)), "0"], stdout=subprocess.PIPE, text=True, check=True)
    same = "losses the same bits as alone" if alone.stdout.splitlines() == printed else "other losses"
    if refused:
        return took, f"{refused} calls refused"
    return took, f"{len(printed):,} {same}" + (f", and printed {said!r}" if said else "")


def lines(times: int) -> Iterator[str]:
    yield "| process | joined and left | seconds of a call, median and most | afterwards |"
    yield "|---|--:|---|---|"
    for name, pause_s in KINDS.items():
        took, afterwards = tried(pause_s, times)
        yield f"| {name} | {times} | {median(took):.1f}, {max(took):.1f} | {afterwards} |"


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--times", type=int, default=50)
    args = parser.parse_args()
    write("Joining a running process", "\n".join(lines(args.times)) + "\n", args.write)


if __name__ == "__main__":
    main()
