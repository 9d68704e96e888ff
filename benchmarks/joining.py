"""`gpumon attach PID --inject` and `gpumon detach PID`, again and again: `python benchmarks/joining.py [--times 50]`.

Each kind of process is joined and left that often, with pauses of up to 0.2 s. Of trainings the losses are compared
with those of one that was left alone, bit by bit. Needs gdb. Some six minutes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import psutil
from common import options, write

from gpumon import virtual_gpu
from gpumon.cli import joining

IDLE = "import time, torch\nprint(1, flush=True)\nwhile True: time.sleep(0.01)"
TRAINING = """
import ctypes, os, sys, time, torch

class Slow(torch.utils.data.IterableDataset):
    def __iter__(self):
        while True:
            time.sleep(pause_s)
            yield torch.ones(16, 32)

steps, pause_s, how = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "sleeps"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
batches = None
if how == "loads":
    loader = torch.utils.data.DataLoader(Slow(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(steps):
    batch = torch.randn(16, 32)
    loss = model(batch if batches is None else batch + next(batches)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if os.environ.get("RANK", "0") == "0":
        print(step, loss.item().hex(), flush=True)
    if how == "sleeps":
        time.sleep(pause_s)
    elif how == "blocks":
        ctypes.PyDLL(None).usleep(int(pause_s * 1e6))
"""
"""`loads` waits for a DataLoader's worker, `blocks` waits in C code and holds the interpreter's lock."""
KINDS = {
    "idle, without a model": None,
    "a step, then 50 ms": (0.05, "sleeps"),
    "steps without a pause": (0.0, "sleeps"),
    "0.3 s of each step in C code, with the GIL": (0.3, "blocks"),
    "waits 0.3 s for each batch of a DataLoader": (0.3, "loads"),
    "torchrun, two ranks with DDP (gloo)": (0.0, "ranks"),
}
ENDLESS = 10**9
LEAKING = """
import time, torch

def main():
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(6)]).cuda()
    optimizer, losses = torch.optim.Adam(model.parameters()), []
    while True:
        loss = model(torch.ones(256, 512, device="cuda")).sum()
        losses.append(loss)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
        print(len(losses), flush=True)

main()
"""


def tried(kind: tuple[float, str] | None, times: int) -> tuple[list[float], str]:
    """Seconds of each call in a process, and what became of it."""
    took, refused = [], 0
    with tempfile.TemporaryDirectory() as folder:
        output, errors, script = Path(folder, "output"), Path(folder, "errors"), Path(folder, "joined.py")
        script.write_text(IDLE if kind is None else TRAINING)
        command = [sys.executable]
        if kind is not None and kind[1] == "ranks":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command.append(str(script))
        rest = [] if kind is None else [str(ENDLESS), *map(str, kind)]
        with (
            output.open("w") as out,
            errors.open("w") as err,
            subprocess.Popen([*command, *rest], stdout=out, stderr=err) as process,
        ):
            while not output.read_text():
                time.sleep(0.1)
            ranks = [process.pid]
            if kind is not None and kind[1] == "ranks":
                ranks = [each.pid for each in psutil.Process(process.pid).children()]
            for _ in range(times):
                for function in ("join", "leave"):
                    for rank in ranks:
                        began = time.monotonic()
                        try:
                            refused += bool(joining.call(rank, function))
                        except joining.Failed as error:
                            return took, f"{error}, with {process.wait()}: {errors.read_text()!r}"
                        took.append(time.monotonic() - began)
                    time.sleep(random.random() * 0.2)
            ended = process.poll()
            for rank in ranks:
                os.kill(rank, signal.SIGKILL)
        printed = output.read_text().splitlines()[:-1]  # the last line may be half
        said = "" if len(ranks) > 1 else errors.read_text()  # the launcher tells of the kill
        if ended is not None:
            return took, f"ended with code {ended}"
        if kind is None:
            return took, "runs on" + (f", and printed {said!r}" if said else "")
        again = [*command, str(len(printed)), "0", kind[1]]
        alone = subprocess.run(again, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    same = "losses the same bits as alone" if alone.stdout.splitlines() == printed else "other losses"
    if refused:
        return took, f"{refused} calls refused"
    return took, f"{len(printed):,} {same}" + (f", and printed {said!r}" if said else "")


def lines(times: int) -> Iterator[str]:
    yield "| process | joined and left | seconds of a call, median and most | afterwards |"
    yield "|---|--:|---|---|"
    for name, kind in KINDS.items():
        took, afterwards = tried(kind, times)
        print(name, afterwards, file=sys.stderr)
        yield f"| {name} | {times} | {median(took):.1f}, {max(took):.1f} | {afterwards} |"


def named(times: int) -> Iterator[str]:
    """Of trainings that keep a loss each step, on the virtual GPU: from the command to what holds them."""
    found = Counter()
    took = []
    environment = virtual_gpu.environment()
    for _ in range(times):
        training = [sys.executable, "-c", LEAKING]
        with subprocess.Popen(training, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while int(process.stdout.readline()) < 100:
                pass
            threading.Thread(target=process.stdout.read, daemon=True).start()
            began = time.monotonic()
            command = [sys.executable, "-m", "gpumon", "attach", str(process.pid), "--inject", "--json", "--for", "60"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attached:
                assert attached.stdout is not None
                for line in attached.stdout:
                    holder = json.loads(line).get("holder")
                    if holder is not None:
                        took.append(time.monotonic() - began)
                        found[holder] += 1
                        break
                attached.terminate()
            process.kill()
    virtual_gpu.remove_session(environment["VGPU_SESSION"])
    yield ""
    yield f"A loss kept in each step: {len(took)} of {times} named in {median(took):.1f} s, at most {max(took):.1f} s:"
    yield ", ".join(f"`{holder}` {count} times" for holder, count in found.items()) + "."


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--times", type=int, default=50)
    args = parser.parse_args()
    write("Joining a running process", "\n".join([*lines(args.times), *named(min(args.times, 10))]) + "\n", args.write)


if __name__ == "__main__":
    main()
