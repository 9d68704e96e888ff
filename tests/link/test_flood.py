"""A process of this user's own that subscribes without end: the training neither grows nor waits, viewers see on."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from gpumon import link
from gpumon_agent import wire
from gpumon_agent.transport import auth
from gpumon_agent.transport.auth import Turnstile

MIB = 1 << 20
FLOOD = """
import os, sys, time, zmq
context, end, sent = zmq.Context(), time.monotonic() + 1.5, 0
while time.monotonic() < end:
    socket = context.socket(zmq.SUB)
    socket.linger, socket.reconnect_ivl, socket.sndhwm = 0, 1, 0
    socket.connect(sys.argv[1])
    for _ in range(20_000):
        socket.subscribe(os.urandom(8))
        sent += 1
    time.sleep(0.1)
    socket.close()
print(sent)
"""


async def steps(agent: Any, count: int, until: Callable[[], bool]) -> list[int]:
    """The live steps that a viewer sees: `count` before the flood is let loose, and as many when `until` is true."""
    seen: list[int] = []
    left = count
    async for received in link.subscribe(link.resolve(agent.endpoint)):
        if isinstance(received.event, wire.Step) and not received.replayed:
            seen.append(received.event.step)
            left -= until()
            if not left:
                return seen
        elif isinstance(received.event, wire.Goodbye):
            raise AssertionError(received.event)
    raise AssertionError("the agent has gone")


async def test_a_flood_of_own_subscriptions_costs_no_memory_and_no_viewer(start: Callable[..., Any]) -> None:
    agent = start()
    agent.ask("steps 100")
    agent.ask("background 50")
    before = agent.ask("memory")
    flood = subprocess.Popen([sys.executable, "-c", FLOOD, agent.endpoint], stdout=subprocess.PIPE, text=True)
    viewer = asyncio.create_task(steps(agent, 10, lambda: flood.poll() is not None))
    largest = 0
    while flood.poll() is None:
        largest = max(largest, await asyncio.to_thread(agent.ask, "memory"))
        await asyncio.sleep(0.02)
    assert int(flood.communicate()[0]) > 20_000
    assert largest - before < 8 * MIB
    seen = await asyncio.wait_for(viewer, 20)
    assert seen == sorted(set(seen))
    assert agent.ask("memory") - before < 8 * MIB
    assert agent.socket.exists()


def test_who_subscribes_more_than_128_times_a_second_is_shut_out_for_a_minute() -> None:
    turnstile = Turnstile()
    assert all(turnstile.passes(pid, 0.5) for pid in ("7", "8") for _ in range(128))
    assert not turnstile.passes("7", 0.5)
    assert turnstile.admits("8", 1.0)
    assert not turnstile.admits("7", 1.0)
    assert not turnstile.admits("7", 60.4)
    assert turnstile.admits("7", 60.5)
    assert all(turnstile.passes("8", 1.25 * second) for second in range(2, 10) for _ in range(128))


def test_who_subscribes_to_64_bytes_is_disconnected(tmp_path: Path) -> None:
    """libzmq stores a node for each byte, and sends ten bytes with each subscription. A viewer's have nine."""
    with zmq.Context() as context, auth.open_publisher(context) as publisher, context.socket(zmq.SUB) as viewer:
        publisher.rcvtimeo = 30_000
        publisher.bind(f"ipc://{tmp_path}/socket")
        viewer.connect(f"ipc://{tmp_path}/socket")
        viewer.subscribe(b"x" * 9)
        assert publisher.recv() == b"\x01" + b"x" * 9
        viewer.subscribe(b"x" * 64)
        assert publisher.recv() == b"\x00" + b"x" * 9
        viewer.linger = 0
