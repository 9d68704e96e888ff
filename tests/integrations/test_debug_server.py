"""gpumon's page of torch's debug server: a real server, real ranks on virtual devices, the page read over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from library_examples import EXAMPLES, changed_lines
from packaging.version import Version

from gpumon_agent.units import torch_size

pytestmark = pytest.mark.integration
for library in ("torch", "jinja2", "tabulate", "aiohttp"):
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed", allow_module_level=True)
if Version(metadata.version("torch")) < Version("2.12"):
    pytest.skip("torch has no debug server that takes handlers", allow_module_level=True)

HANG_S = 300
HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J"
NO_AGENT = ["no agent in this process: not begun, or stopped"]
FIGURES = ("forward_peak", "backward_peak", "optimizer_peak", "peak", "reserved", "next_peak", "headroom")

RANK = f"""
import contextlib, json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _register_handler
from torch.distributed import debug
import gpumon_agent, gpumon_agent.debug_server
from gpumon_agent.guard import protect

folder, port = Path(sys.argv[1]), int(sys.argv[2])
rank = int(os.environ["RANK"])

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

def hostile(request, response):
    device = {{"device": {HOSTILE!r}, "peak": 1}}
    response.set_content(json.dumps({{"agent": "1", "devices": [device], "notes": [{HOSTILE!r}]}}), "text/plain")
    response.set_status(200)

def make(device):
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Linear(512, 8)).to(device)
    return model, torch.optim.AdamW(model.parameters())

def train(model, optimizer, device, steps, batch):
    for _ in range(steps):
        model(torch.randn(batch, 64, device=device)).sum().backward()
        optimizer.step()
        allocated = torch.cuda.memory_allocated(device)  # as this phase ended
        optimizer.zero_grad()
    return allocated

def main():
    device = torch.device("cuda", rank % 2)
    if rank == 1:  # its agent has figures before the page begins
        model = make(device)
        gpumon_agent.watch(*model)
        train(*model, device, 1, 1024)
    dist.init_process_group("gloo")
    handlers = gpumon_agent.debug_server.handlers() if rank < 2 else None
    debug.start_debug_server(
        port, start_method="fork", handlers=handlers, dump_dir=str(folder / "dumps"), dump_interval=0.5,
        enabled_dumps={{"gpumon"}}, fetch_timeout=20.0,
    )
    if rank < 2:
        gpumon_agent.debug_server.handlers()  # once more: the page of a server that is started again
        (folder / f"begun{{rank}}").touch()
        wait_for("train")
        if rank == 0:
            model = make(device)
            train(*model, device, 1, 64)
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(4 << 30, dtype=torch.uint8, device=device)
        else:
            for _ in range(5):
                protect("cost", lambda: {{}}["x" * 9999])()  # too often: the part is switched off
        allocated = train(*model, device, 12, 64)
        figures = gpumon_agent.figures()
        (folder / f"figures{{rank}}.tmp").write_text(json.dumps([debug._WORKER_SERVER.port, figures, allocated]))
        (folder / f"figures{{rank}}.tmp").rename(folder / f"figures{{rank}}")
        wait_for("change")
        if rank == 1:
            gpumon_agent.stop()
    else:
        wait_for("change")
        _register_handler("gpumon", hostile)
    (folder / f"changed{{rank}}").touch()
    if rank == 2:
        wait_for("die")
        os.kill(os.getpid(), 9)
    wait_for("end")
    if rank == 0:
        debug.stop_debug_server()

if __name__ == "__main__":
    main()
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def wait_for(found: Callable[[], Any]) -> Any:
    ends = time.monotonic() + HANG_S
    while not (value := found()):
        assert time.monotonic() < ends
        time.sleep(0.05)
    return value


class Table(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1] and not data.isspace():
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        if tag == "table":
            self.handle_data = lambda data: None  # type: ignore[method-assign]

    def by_name(self, rank: int) -> dict[str, str]:
        return dict(zip(self.rows[0], self.rows[1 + rank], strict=True))


def fetched(port: int) -> str:
    """The page; empty while the server's process does not listen yet."""
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/gpumon", timeout=HANG_S) as answer:
            text: str = answer.read().decode("ascii")
            return text
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError:
        return ""


def environment(virtual_gpu: Callable[..., Any], runtime: Path) -> dict[str, str]:
    kept = {**virtual_gpu(devices=2, memory="2GiB").environment, "XDG_RUNTIME_DIR": str(runtime)}
    return {**kept, "OMP_NUM_THREADS": "1", "GPUMON_GOVERNOR": "off", "PYTHONWARNINGS": "ignore"}


@contextlib.contextmanager
def ranks(environment: dict[str, str], folder: Path, port: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    (folder / "rank.py").write_text(RANK)
    job = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with contextlib.ExitStack() as stack:
        running = []
        for rank in range(3):
            printed = stack.enter_context((folder / f"printed{rank}").open("w"))
            started = subprocess.Popen(
                [sys.executable, "rank.py", str(folder), str(port)], cwd=folder, stdout=printed, stderr=printed,
                env={**environment, **job, "RANK": str(rank)},
            )  # fmt: skip
            running.append(stack.enter_context(started))
            stack.callback(started.kill)
        yield running


def test_the_page_has_each_ranks_own_figures_or_says_why_not(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    port = free_port()
    with ranks(environment(virtual_gpu, tmp_path), tmp_path, port) as running:

        def all_wrote(name: str, numbers: range) -> None:
            def attempt() -> bool:
                for rank, process in enumerate(running):
                    assert process.poll() is None, (tmp_path / f"printed{rank}").read_text()
                return all((tmp_path / f"{name}{rank}").exists() for rank in numbers)

            wait_for(attempt)

        all_wrote("begun", range(2))
        begun = Table(wait_for(lambda: fetched(port)))
        assert begun.rows[1][2:] == NO_AGENT
        assert begun.by_name(1)["highest"].endswith(" MiB")

        (tmp_path / "train").touch()
        all_wrote("figures", range(2))
        text = fetched(port)
        table = Table(text)
        assert [row[0] for row in table.rows] == ["rank", "0", "1", "2"]
        for rank in (0, 1):
            worker, figures, allocated = json.loads((tmp_path / f"figures{rank}").read_text())
            request = urllib.request.Request(f"http://localhost:{worker}/handler/gpumon", method="POST")
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:
                told = json.loads(answer.read())
            (device,) = told["devices"]
            assert {f"gpumon/{name}_bytes": device[name] for name in FIGURES if device[name] is not None} == figures
            assert device["allocated"] == allocated
            assert told["step"] == 13
            row = table.by_name(rank)
            shown = [
                row[name]
                for name in ("forward", "backward", "optimizer", "highest", "reserved", "next peak", "headroom")
            ]
            names = [f"gpumon/{name}_bytes" for name in FIGURES]
            assert shown == [torch_size(figures[name]) if name in figures else "-" for name in names]
            assert row["allocated"] == torch_size(allocated)
            assert (row["device"].split()[0], row["step"]) == (f"cuda:{rank}", "13")
            assert device["limit"] > 1 << 30
            assert row["limit"] == torch_size(device["limit"])
            assert ("headroom" in str(figures)) == (rank == 0)  # its out-of-memory told what the process can have
            out_of_memory = "out of memory at step 0 in between, device 0: 4.00 GiB requested"
            switched_off = "cost is switched off: KeyError: 'xxx"
            assert row["state"].startswith(f"fits; {switched_off if rank else out_of_memory}")
        room = device["limit"] - device["peak"]  # of rank 1, which began with a larger batch
        assert f"Rank 1 (cuda:1) is closest to its limit: {torch_size(room)} between" in text
        assert text.count('class="nearest"') == 1
        assert table.rows[3][2:] == ["gpumon_agent.debug_server.handlers() was not called in this rank"]
        with urllib.request.urlopen(f"http://localhost:{port}/", timeout=HANG_S) as home:
            assert b'<a href="/gpumon">gpumon</a>' in home.read()

        def dumped() -> bool:
            dumps = [path.read_text() for path in (tmp_path / "dumps").glob("gpumon_*.txt")]
            return any(re.search(rf"^ *1 .* cuda:1 .* {shown[3]} .* fits", dump, re.MULTILINE) for dump in dumps)

        wait_for(dumped)

        (tmp_path / "change").touch()
        all_wrote("changed", range(3))
        text = fetched(port)
        table = Table(text)
        assert table.rows[2][2:] == NO_AGENT
        row, shown_as = table.by_name(2), HOSTILE.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
        assert row["device"] == row["state"] == shown_as
        assert "img" not in table.tags

        (tmp_path / "die").touch()
        running[2].wait(HANG_S)
        (problem,) = Table(fetched(port)).rows[3][2:]
        assert problem.startswith("did not answer (503): ")
        (tmp_path / "end").touch()
        assert [process.wait(HANG_S) for process in running[:2]] == [0, 0], (tmp_path / "printed0").read_text()


def test_the_example_whose_server_is_spawned(virtual_gpu: Callable[..., Any], tmp_path: Path) -> None:
    assert changed_lines("debug_server") == 1
    port = free_port()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(EXAMPLES / "debug_server.py"), "--backend", "nccl", "--port", str(port)]
    printed = tmp_path / "printed"
    with (
        printed.open("w") as out,
        subprocess.Popen(command, env=environment(virtual_gpu, tmp_path), stdout=out, stderr=out) as job,
    ):
        try:

            def trained() -> bool:
                assert job.poll() is None, printed.read_text()
                rows = Table(fetched(port)).rows[1:]
                return len(rows) == 2 and all(len(row) > 3 and row[3] not in ("-", "0") for row in rows)

            wait_for(trained)
        finally:
            job.terminate()


UNUSABLE = """
import sys, types
import gpumon_agent.debug_server as ours

def attempt():
    try:
        ours.handlers()
    except ImportError as error:
        print(type(error).__name__, error)

for name in ("torch.distributed.debug", "jinja2"):
    sys.modules[name] = None
    attempt()
    del sys.modules[name]
from torch.distributed.debug import _frontend
current = _frontend.fetch_all
def fetch_all(endpoint, args=""): ...  # torch 2.11's
_frontend.fetch_all = fetch_all
attempt()
_frontend.fetch_all = current
print(len(ours.handlers()))
"""


def test_a_torch_that_does_not_fit_gives_one_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", UNUSABLE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    old, library, changed, handlers = done.stdout.splitlines()
    needs = "ImportError gpumon's page needs torch 2.12 or newer, whose debug server takes handlers: torch "
    assert old.startswith(needs)
    assert library == "ModuleNotFoundError torch's debug server needs jinja2: pip install jinja2 tabulate aiohttp"
    assert changed.startswith(needs)
    assert changed.endswith("does not fit (fetch_all: got an unexpected keyword argument 'timeout')")
    assert int(handlers) > 5


PURE = """
import json
from gpumon_agent.debug_server.figures import DeviceFigures, RankFigures
from gpumon_agent.debug_server.page import nearest, read, rows

GiB = 1 << 30

def rank(number, **figures):
    device = {"device": "cuda:0", "limit": 40 * GiB, **figures}
    return read(number, "http://node7:1/handler/gpumon?", 200, json.dumps({"agent": "1", "devices": [device]}))

several = [rank(0, peak=38 * GiB, headroom=3 * GiB), rank(1, peak=20 * GiB, headroom=-2 * GiB, verdict="oom-ahead")]
print(nearest(several).sentence)
print(rows(several, nearest(several))[1].cells[-2:], rows(several, nearest(several))[1].nearest)
print(nearest([*several, rank(2, peak=37 * GiB)]).sentence)
print(nearest([rank(0)]))
for answer in ("{", "[]", json.dumps({"agent": "1", "step": "12"}), json.dumps({"agent": "1", "phase": "x" * 9999})):
    print(read(3, "http://node7:1/handler/gpumon?", 200, answer).problem)
print(read(3, "", 408, "a\\x1bb" * 999).problem[:30])
"""


def test_the_nearest_rank_and_answers_that_cannot_be_read() -> None:
    done = subprocess.run([sys.executable, "-c", PURE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "Rank 1 (cuda:0) is closest to its limit: -2.00 GiB headroom.",
        "('-2.00 GiB', 'oom-ahead') True",
        "Rank 0 (cuda:0) is closest to its limit: 2.00 GiB between its highest peak and its limit.",
        "None",
    ]
    assert all(line.startswith("its answer cannot be read: ") for line in lines[4:8])
    assert lines[8].startswith("did not answer (408): a\N{REPLACEMENT CHARACTER}b")
