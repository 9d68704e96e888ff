"""What `gpumon record` says while it records: what, how much, how fast."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpumon import link
from gpumon.cli.record import LeakMarks, Status
from gpumon_agent import wire
from gpumon_agent.endpoint import Descriptor

Start = Callable[..., Any]


class Written:
    """A recording of so many bytes."""

    path = Path("run.gpumon")
    nbytes = 0


def status(count: int = 1) -> tuple[Status, Written]:
    ranks = tuple(Descriptor(7 + i, 0, "", "", f"{i}", "train.py", "here", ()) for i in range(count))
    written = Written()
    return Status(ranks, written), written  # type: ignore[arg-type]


def test_the_line_has_name_size_step_and_the_rate_of_the_last_ten_seconds() -> None:
    line, written = status()
    assert line.line(0.0) == "recording train.py (pid 7): 0 B, no step yet"
    line.take(wire.Received("a", 0, wire.Step(1233, 1, 1)))
    written.nbytes = 1024 * 1024
    for second in range(1, 11):
        said = line.line(float(second))
    assert said == "recording train.py (pid 7): 1.00 MiB, 102.4 KiB/s, step 1,233"
    assert line.line(11.0) == "recording train.py (pid 7): 1.00 MiB, 0 B/s, step 1,233"


def test_ranks_are_counted() -> None:
    assert status(4)[0].line(0.0).startswith("recording train.py (pid 7 and 3 more): ")


def test_a_pipe_gets_a_line_at_the_start_and_one_at_the_end(tmp_path: Path, start: Start) -> None:
    agent = start(name="train.py")
    agent.ask("steps 20")
    path = tmp_path / "a.gpumon"
    command = [sys.executable, "-m", "gpumon", "record", str(path), str(agent.pid)]
    recorder = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(1.3)  # a line a second would be seen
    recorder.send_signal(signal.SIGINT)
    said = recorder.communicate(timeout=60)[1].splitlines()
    assert said[0] == f"recording train.py (pid {agent.pid}) to {path}; ctrl-c stops it"
    assert re.fullmatch(rf"{path}: to step 19, [\d.]+ KiB in [\d.]+ s", said[1])
    assert len(said) == 2
    assert len([r for r in link.replay(path) if isinstance(r.event, wire.Step)]) == 20


def test_a_terminal_gets_a_line_that_is_written_over_and_cleared(tmp_path: Path, start: Start) -> None:
    agent = start(name="train.py")
    agent.ask("steps 20")
    path = tmp_path / "a.gpumon"
    master, slave = os.openpty()
    command = [sys.executable, "-m", "gpumon", "record", str(path), str(agent.pid)]
    recorder = subprocess.Popen(command, stderr=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)

    def read(pattern: str) -> str:
        said, end = "", time.monotonic() + 60
        while not re.search(pattern, said):
            assert time.monotonic() < end, said
            if select.select([master], [], [], 0.1)[0]:
                said += os.read(master, 65536).decode()
        return said

    said = read(r"step 19.*step 19")  # twice: it is refreshed
    assert re.search(rf"\r\x1b\[2Krecording train\.py \(pid {agent.pid}\): [\d.]+ KiB, [\d.]+ K?i?B/s, step 19", said)
    assert said.count("\n") == 1
    recorder.send_signal(signal.SIGINT)
    assert re.search(r"\r\x1b\[2K[^\r]*a\.gpumon: to step 19", read(r"to step 19, .* s"))
    assert recorder.wait(60) == 0
    os.close(master)


def test_the_step_of_a_found_leak_is_marked_once(tmp_path: Path) -> None:
    from watched import MIB, Run

    run = Run().hello().model()
    for step in range(400):
        run.step(step, leak=max(0, step - 100) * 8 * MIB)
        if step in (300, 350):
            run.census(step, 1 + step // 350, kept=step - 100)
        if step == 200:
            run.census(step, 0, kept=step - 100)  # that somebody asked for
    path = tmp_path / "a.gpumon"
    with link.Recording(path) as recording:
        leaks = LeakMarks(recording)
        for received in run.events:
            recording.write(received)
            leaks.take(received)
    marks = [(mark.kind, mark.step) for mark in link.replay(path).index().marks]
    assert marks == [("growth", 300), ("leak found", 300), ("growth", 350)]
    cut = tmp_path / "cut.gpumon"
    cut.write_bytes(path.read_bytes()[:-1])
    assert {mark.kind for mark in link.replay(cut).index().marks} == {"growth", "leak found"}


def test_a_size_is_read_and_refused_in_words(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from gpumon.cli.record import command

    def said(size: str) -> str:
        return CliRunner().invoke(command, ["--max-size", size, str(tmp_path / "no" / "x"), "999999999"]).output

    for size in ("1GB", "16MiB", "16777216", "2.5 tib", "0"):
        assert "no process has pid 999999999" in said(size)
    assert "16777215 is too little; the least is 16.0 MiB" in said("16777215")
    assert "'much' is no size; write it as 500MB, 2GiB, or 0 for no limit" in said("much")
