"""Viewers that are killed, stopped, or lack what they need: the training does not notice."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faults.training import Begin

pytestmark = pytest.mark.torch
TRAINS = """
watch()
print("pid=%d" % os.getpid(), flush=True)
slowest = 0
while not Path("enough").exists():
    began = time.monotonic()
    model(torch.zeros(8, 16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    slowest = max(slowest, time.monotonic() - began)
    time.sleep(0.005)
print("slowest", slowest)
assert transport().running and transport()._restarts == 0
train(1)
"""
VIEWS = """
import asyncio, sys
from gpumon import link
async def view():
    async for _ in link.subscribe(link.resolve(sys.argv[1])):
        print("hears", flush=True)
asyncio.run(view())
"""


@contextmanager
def training(begin: Begin) -> Iterator[int]:
    """Trains until the end of the block; fails where it did not end well, or said anything."""
    made = begin(TRAINS)
    pid = made.asked("pid")
    try:
        yield pid
        assert Path(f"/proc/{pid}").exists()
    finally:
        (made.folder / "enough").touch()
        ran = made.result()
    assert (ran.code, ran.err) == (0, ""), ran


def viewer(pid: int, **more: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", VIEWS, str(pid)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **more
    )  # type: ignore[call-overload, no-any-return]


def test_killed_five_hundred_times(begin: Begin) -> None:
    """Most of them are killed before they have said a word, some amid the picture: what a connection is, is over."""
    import zmq

    from gpumon import link
    from gpumon_agent import wire

    with training(begin) as pid:
        (descriptor,) = link.resolve(str(pid))
        for turn in range(500):
            child = os.fork()
            if child == 0:
                socket = zmq.Context().socket(zmq.SUB)
                socket.connect(descriptor.endpoint)
                socket.subscribe(wire.SNAPSHOT + os.urandom(wire.NONCE_BYTES))
                socket.subscribe(wire.LIVE)
                socket.poll(5 * (turn % 20))
                os.kill(os.getpid(), signal.SIGKILL)
            os.waitpid(child, 0)
        late = viewer(pid)
        assert late.stdout is not None
        assert late.stdout.readline() == b"hears\n"  # it answers others
        late.kill()
        late.communicate()


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.long)])
def test_stopped_for_long(begin: Begin, seconds: int) -> None:
    """What is sent to it is dropped; the helper's memory does not grow with it."""
    with training(begin) as pid:
        stopped = [viewer(pid) for _ in range(3)]
        for each in stopped:
            assert each.stdout is not None
            each.stdout.readline()
            os.kill(each.pid, signal.SIGSTOP)
        time.sleep(seconds)
        for each in stopped:
            each.kill()
            each.communicate()


def test_junk_at_the_sockets(begin: Begin) -> None:
    import socket

    from gpumon import link

    with training(begin) as pid:
        (descriptor,) = link.resolve(str(pid))
        for address in (descriptor.endpoint, descriptor.control):
            for junk in (b"", b"\0" * 100, b"\xff" * 70_000, os.urandom(5_000), b"GET / HTTP/1.0\r\n\r\n"):
                with socket.socket(socket.AF_UNIX) as talks:
                    talks.connect(address.removeprefix("ipc://"))
                    try:
                        talks.sendall(junk)
                    except (BrokenPipeError, ConnectionResetError):
                        continue


def test_many_connections_that_say_nothing(begin: Begin) -> None:
    """The helper runs out of descriptors; libzmq's abort() would be its own."""
    import socket

    from gpumon import link

    with training(begin) as pid:
        (descriptor,) = link.resolve(str(pid))
        low, high = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (high, high))
        open_ones = []
        try:
            for _ in range(2_000):
                talks = socket.socket(socket.AF_UNIX)
                talks.settimeout(0.2)
                open_ones.append(talks)
                try:
                    talks.connect(descriptor.endpoint.removeprefix("ipc://"))
                except OSError:
                    break
        finally:
            for each in open_ones:
                each.close()
            resource.setrlimit(resource.RLIMIT_NOFILE, (low, high))


def test_requests_come_all_the_time(begin: Begin) -> None:
    import asyncio

    from gpumon import link
    from gpumon_agent import wire

    with training(begin) as pid:
        (descriptor,) = link.resolve(str(pid))
        ask = link.Asker([descriptor])

        async def asks() -> None:
            for turn in range(60):
                what = (wire.CENSUS, wire.BLOCKS, wire.SNAPSHOT_FILE, "reboot", "x" * 64)[turn % 5]
                try:
                    await ask(descriptor.nonce, what)
                except link.LinkError:
                    continue

        asyncio.run(asks())


def test_files_that_a_viewer_reads_are_removed(begin: Begin) -> None:
    from gpumon import link

    with training(begin) as pid:
        (descriptor,) = link.resolve(str(pid))
        for turn in range(5):
            path = descriptor.endpoint.removeprefix("ipc://")
            for each in (path, path.replace(".sock", ".json")):
                Path(each).unlink(missing_ok=True)
            time.sleep(0.3 * turn)
        time.sleep(2)  # they are looked for each second
        late = viewer(pid)
        assert late.stdout is not None
        assert late.stdout.readline() == b"hears\n"
        late.kill()
        late.communicate()
