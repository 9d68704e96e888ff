"""A process that becomes another program by exec keeps its pid and start time; its agent is gone all the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumon import link

BECOMES = """
import ctypes, json, os, sys, threading, time
from gpumon_agent import wire
from gpumon_agent import endpoint
from gpumon_agent.transport.publisher import Publisher

times, fixed, last = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if fixed == "fixed" and not os.environ.get("FIXED"):
    os.environ["FIXED"] = "1"
    ctypes.CDLL(None).personality(0x0040000)  # ADDR_NO_RANDOMIZE, as under gdb
    os.execv(sys.executable, [sys.executable, *sys.argv])
if times >= 0:
    told = endpoint.describe("again.py", unix_ns=time.time_ns())
    hello = wire.Hello(
        (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR), "0", told.nonce, told.name, told.host, told.pid, told.start_time,
        told.boot_id, told.argv, "3", wire.Clock(time.monotonic_ns(), time.time_ns()),
    )
    publisher = Publisher(type("R", (), {"drain": lambda self: []})(), lambda: [hello], lambda: None, told)
    threading.Thread(target=publisher.serve, daemon=True).start()
    while not publisher.ready:
        time.sleep(0.01)
    print(json.dumps(told.nonce), flush=True)
sys.stdin.readline()
if times > 0:
    argv = [sys.executable, sys.argv[0], f"{times - 1}", fixed, last]
else:
    argv = [sys.executable, "-c", "print('null', flush=True); input()"]
os.execv(argv[0], argv)
"""


class Process:
    def __init__(self, script: Path, times: int, fixed: str = "") -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script), str(times), fixed, ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.nonce = self.said()

    def said(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line
        return json.loads(line)

    def execs(self) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.said()


@pytest.fixture
def begin(tmp_path: Path, runtime: Path) -> Iterator[Callable[..., Process]]:
    script = tmp_path / "again.py"
    script.write_text(BECOMES)
    begun: list[Process] = []

    def begin(*options: Any) -> Process:
        begun.append(Process(script, *options))
        return begun[-1]

    yield begin
    for each in begun:
        each.process.kill()
        each.process.communicate()


def gpumon(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpumon", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_what_became_a_program_without_an_agent_is_listed_no_more(begin: Callable[..., Process], runtime: Path) -> None:
    process = begin(0)
    (found,) = link.discover()
    assert link.resolve(found.endpoint)[0].nonce == found.nonce
    assert process.execs() is None
    listed = gpumon("ls", "--json")
    assert (listed.returncode, listed.stdout) == (0, "")
    refused = gpumon("attach", "--json", "--once", str(process.process.pid))
    assert refused.returncode != 0
    assert f"process {process.process.pid} has no gpumon agent" in refused.stderr
    with pytest.raises(link.NoJob):
        link.resolve(found.endpoint)
    assert list(runtime.iterdir()) == []


def test_of_a_program_that_starts_itself_anew_the_newer_agent_is_listed(begin: Callable[..., Process]) -> None:
    process = begin(2)
    for _ in range(2):
        nonce = process.execs()
        assert [descriptor.nonce for descriptor in link.discover()] == [nonce]


def test_so_it_is_where_addresses_are_not_randomized(begin: Callable[..., Process]) -> None:
    """Under a debugger the new program may lie exactly where the old one did."""
    process = begin(1, "fixed")
    nonce = process.execs()
    assert [descriptor.nonce for descriptor in link.discover()] == [nonce]


async def test_a_viewer_is_told_that_the_agent_is_gone(begin: Callable[..., Process]) -> None:
    from gpumon_agent import wire

    process = begin(0)
    (found,) = link.discover()
    goodbye = None
    end = time.monotonic() + 120
    async for received in link.subscribe((found,)):
        if isinstance(received.event, wire.Synced):
            process.execs()
        elif isinstance(received.event, wire.Goodbye):
            goodbye = received.event
            break
        assert time.monotonic() < end, received
    assert goodbye is not None
    assert goodbye.reason == "lost"


def test_a_forked_child_and_a_changed_title_are_no_exec(begin: Callable[..., Process]) -> None:
    code = """
import ctypes, os, sys
from gpumon.link import discovery
from gpumon_agent import endpoint
told = endpoint.describe("x")
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
ctypes.CDLL(None).prctl(15, b"renamed", 0, 0, 0)
assert discovery.alive(told) is True
"""
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, check=False).returncode == 0
