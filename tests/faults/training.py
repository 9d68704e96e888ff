"""A training process that faults are done to, and how it ended."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forks import Forked, Forks

PRELUDE = """
import atexit, ctypes, os, resource, signal, sys, threading, time
import torch
torch.set_num_threads(1)
os.chdir(os.path.dirname(os.path.abspath(__file__)))
from pathlib import Path

WATCHED = os.environ["WATCHED"] == "1"
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
torch.manual_seed(0)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

if WATCHED:
    import gpumon_agent.agent

def transport():
    "None where nothing is watched."
    return gpumon_agent.agent.REGISTRY.agent and gpumon_agent.agent.REGISTRY.agent.transport

def watch(awaited=True):
    "Begins to watch; returns as soon as viewers can attach, if asked to wait."
    if WATCHED:
        gpumon_agent.watch(model, optimizer)
        if transport() and transport().running:
            Path(os.environ["HELPERS"], str(transport()._helper)).mkdir(exist_ok=True)
            assert not awaited or transport().wait_ready(60)

def helper():
    "Its process id; None in a run without gpumon, or unwatched."
    return transport()._helper if WATCHED and transport() and transport().running else None

def train(steps=3):
    for _ in range(steps):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained", steps, loss.item().hex(), flush=True)

def opened():
    return [int(each) for each in os.listdir("/proc/self/fd")]

def eventually(done, seconds=30):
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.005)
    return bool(done())

"""
HANGS_S = 120.0
TORCH_LOGS = r"^[A-Z]\d{4} \d\d:\d\d:\d\d\.\d+ \d+ "  # W1123 08:42:12.412000 27401 torch/autograd/profiler.py:858]
ENDS_WITHIN_S = 20.0  # of a helper, after its training: 2 s are promised, this is a busy machine's


@dataclass
class Ran:
    code: int  # negative: the signal that ended it
    out: str
    err: str

    @property
    def own(self) -> list[str]:
        """Lines of gpumon's on the standard error."""
        return [line for line in self.err.splitlines() if line.startswith("gpumon: ")]

    @property
    def its(self) -> tuple[int, str, list[str]]:
        """What the training did: without addresses, times and process ids, which differ from run to run."""
        err = re.sub("0x[0-9a-f]+", "0x", re.sub(TORCH_LOGS, "", self.err, flags=re.MULTILINE))
        return self.code, self.out, [line for line in err.splitlines() if not line.startswith("gpumon: ")]


class Training:
    """One that runs. `result` waits for its end."""

    def __init__(self, forks: Forks, folder: Path, text: str, environment: dict[str, str], *, whole: bool) -> None:
        folder.mkdir()
        self.folder = folder
        self._out = folder / "0.out"
        self._ended: Forked | BaseException | None = None
        script = folder / "train.py"
        script.write_text(PRELUDE + text)

        def run() -> None:
            try:
                self._ended = forks.run([str(script)], environment, folder, timeout=HANGS_S, whole=whole)
            except BaseException as error:  # noqa: BLE001  # raised again by `result`
                self._ended = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def said(self) -> str:
        return self._out.read_text() if self._out.exists() else ""

    def until(self, said: str) -> None:
        """Waits for words of its output."""
        until = time.monotonic() + HANGS_S
        while said not in self.said and self._thread.is_alive():
            assert time.monotonic() < until, self.said
            time.sleep(0.005)

    def asked(self, key: str) -> int:
        """The number that it printed after `key=`."""
        self.until(f"{key}=")
        return int(self.said.split(f"{key}=")[1].split()[0])

    def result(self) -> Ran:
        self._thread.join()
        if isinstance(self._ended, BaseException):
            raise self._ended
        assert self._ended is not None
        ran = Ran(self._ended.codes[0], self._ended.out[0], self._ended.err[0].replace(str(self._out.parent), ""))
        assert ran.code != -signal.SIGALRM, ("it hangs", ran)
        return ran


def is_helper(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() in ("gpumon", "python", "python3") and (
            Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        )
    except OSError:
        return False


Begin = Callable[..., Training]
Same = Callable[..., Ran]
