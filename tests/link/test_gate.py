"""Who may come in: this user, and nobody else. Another user is a real one, uid 65534."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]
NOBODY = 65534

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(code: str, *arguments: str) -> str:
    """What `code` prints, run as uid 65534 in a process that imports first: the interpreter may be root's alone."""
    preamble = (
        "import asyncio, json, os, sys, tempfile, time, zmq\nfrom gpumon import link\n"
        "from gpumon_agent import wire\nfrom gpumon_agent import endpoint\n"
    )
    preamble += "link.subscribe, link.discover\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    command = [sys.executable, "-c", preamble + textwrap.dedent(code), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout.strip()


def open_wide(socket: Path) -> None:
    """Every wall but the gate itself is taken down."""
    for path in (socket.parent.parent, socket.parent, socket):
        path.chmod(0o777)


SUBSCRIBE = """
async def main():
    try:
        async for received in link.subscribe(link.resolve(sys.argv[1]), answer_s=2):
            print("heard", received.event)
            return
    except link.LinkError as error:
        print(type(error).__name__, error)
asyncio.run(main())
"""


def test_another_user_is_refused_at_the_gate_and_told_so(start: Start) -> None:
    agent = start()
    open_wide(agent.socket)
    answer = as_nobody(SUBSCRIBE, agent.endpoint)
    assert answer.startswith("ForeignUser the agent at ipc://")
    assert answer.endswith("refused this user; gpumon attaches only to your own processes")


def test_another_user_cannot_even_reach_the_socket(start: Start) -> None:
    agent = start()
    assert (
        as_nobody("try: link.resolve(sys.argv[1])\nexcept link.LinkError as e: print(type(e).__name__)", agent.endpoint)
        == "ForeignUser"
    )


def test_another_users_process_is_refused_by_pid(start: Start) -> None:
    agent = start()
    answer = as_nobody("try: link.resolve(sys.argv[1])\nexcept link.LinkError as e: print(e)", str(agent.pid))
    assert answer == f"process {agent.pid} belongs to another user (uid 0); gpumon attaches only to your own processes"


def test_a_flood_of_subscriptions_from_another_user_costs_the_training_no_memory(start: Start) -> None:
    agent = start()
    open_wide(agent.socket)
    agent.ask("steps 100")
    before = agent.ask("memory")
    flood = """
    context = zmq.Context()
    end, sent = time.monotonic() + 3, 0
    while time.monotonic() < end or sent <= 50_000:  # on a busy machine it takes longer
        socket = context.socket(zmq.SUB)
        socket.linger = 0
        socket.reconnect_ivl = 1
        socket.sndhwm = 0
        socket.connect(sys.argv[1])
        for _ in range(20_000):
            socket.subscribe(os.urandom(200))
            sent += 1
        socket.close()
    print(sent)
    """
    sent = int(as_nobody(flood, agent.endpoint))
    assert sent > 50_000
    assert agent.ask("memory") - before < 8 * 1024 * 1024
    agent.ask("steps 1")


def test_a_directory_of_another_user_is_not_used(runtime: Path, start: Start) -> None:
    runtime.mkdir(0o700)
    os.chown(runtime, NOBODY, NOBODY)
    agent = start()
    assert agent.socket.parent == runtime.parent / "gpumon-0"


def test_without_a_writable_directory_training_goes_on_unwatched_with_one_line(runtime: Path) -> None:
    code = """
    sys.argv[1:] = ["{}"]
    os.environ["XDG_RUNTIME_DIR"] = os.environ["TMPDIR"] = "/proc"
    import tempfile; tempfile.tempdir = "/proc"
    from gpumon_agent.transport.publisher import Publisher
    class Ends:
        def drain(self):
            publisher.leave(None)
            return []
    publisher = Publisher(Ends(), list, lambda: None, endpoint.describe("x"))
    publisher.serve()
    print(json.dumps([publisher.ready, publisher.descriptor.endpoint]))
    """
    preamble = "import asyncio, json, os, sys, time\nfrom gpumon_agent import endpoint\n"
    command = [sys.executable, "-c", preamble + textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)[1] == ""
    assert done.stderr.startswith("gpumon: no viewer can attach to this process: /proc")
    assert done.stderr.count("\n") == 1
