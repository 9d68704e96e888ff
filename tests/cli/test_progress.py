"""What takes longer than half a second is named on a terminal, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from pty_of import in_pty

XTERM = {**os.environ, "TERM": "xterm"}
SHOWN = "\r\x1b[2K{} …"
CLEARED = "\r\x1b[2K"


def works(seconds: float, **environment: str) -> str:
    """What comes to the terminal of a process that works so long, and tells of a second part in the middle."""
    code = (
        "import time\nfrom gpumon.cli.progress import working\n"
        f"with working('one') as tell:\n    time.sleep({seconds})\n    tell('two')\n    time.sleep({seconds})\n"
    )
    return in_pty([sys.executable, "-c", code], {**XTERM, **environment})[2]


def test_long_work_is_named_and_its_line_cleared() -> None:
    assert works(2.0) == SHOWN.format("one") + SHOWN.format("two") + CLEARED


def test_short_work_is_not_named() -> None:
    assert works(0.0) == ""


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_cannot_clear_a_line_gets_none(term: str) -> None:
    assert works(2.0, TERM=term) == ""


def test_what_is_named_cannot_act_on_the_terminal() -> None:
    code = "import time\nfrom gpumon.cli.progress import working\nwith working('a\\x1b]2;b'): time.sleep(2)\n"
    assert in_pty([sys.executable, "-c", code], XTERM)[2] == SHOWN.format("a\N{REPLACEMENT CHARACTER}]2;b") + CLEARED


MESSAGE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.69 GiB.\n"


def explained(log: Path, stderr: int | None = None) -> tuple[int, str, str]:
    """`gpumon explain` of a log that comes through a pipe, and takes two seconds to come."""
    os.mkfifo(log)

    def write() -> None:
        with log.open("w") as pipe:
            pipe.write(MESSAGE)
            pipe.flush()
            time.sleep(2)

    writer = threading.Thread(target=write)
    writer.start()
    pipes = {"stdout": subprocess.PIPE} | ({} if stderr is None else {"stderr": stderr})
    try:
        return in_pty([sys.executable, "-m", "gpumon", "explain", "--log", str(log)], XTERM, **pipes)
    finally:
        writer.join()


def test_the_log_that_is_read_is_named(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    code, out, shown = explained(log)
    assert (code, "2.69 GiB" in out) == (0, True), out
    assert shown == SHOWN.format(f"reading {log}") + CLEARED


def test_no_progress_is_written_to_a_pipe(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    os.mkfifo(log)
    process = subprocess.Popen(
        [sys.executable, "-m", "gpumon", "explain", "--log", str(log)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=XTERM,
    )  # fmt: skip
    with log.open("w") as pipe:
        pipe.write(MESSAGE)
        pipe.flush()
        time.sleep(2)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, "2.69 GiB" in out, err) == (0, True, "")


@pytest.mark.torch
def test_an_estimate_names_the_building_and_each_trace(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    shape = {"n_embd": 64, "n_layer": 24, "n_head": 4, "vocab_size": 100, "n_positions": 64}
    config.write_text(json.dumps({"model_type": "gpt2", **shape}))
    command = [sys.executable, "-m", "gpumon", "estimate", "--config", str(config), "--device", "t4"]
    code, out, shown = in_pty(command, XTERM, stdout=subprocess.PIPE)
    assert (code, out.startswith("OK: ")) == (0, True), out
    assert SHOWN.format("building the model, without its memory") in shown
    assert SHOWN.format("tracing on the meta device: trace 2, batch ").removesuffix(" …") in shown
    assert shown.endswith(CLEARED)
