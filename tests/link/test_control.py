"""Asking an agent for something, over a real socket: heard by its own user, one request at a time, whatever comes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec.structs import replace
from synthetic import Run, frame_of

from gpumon import link
from gpumon.cli.budget_sender import BudgetSender
from gpumon_agent import endpoint, wire
from gpumon_agent.transport.control import Control

from .test_gate import as_nobody, open_wide

Start = Callable[..., Any]
MIB = 1 << 20


def found(agent: Any) -> endpoint.Descriptor:
    return link.resolve(agent.endpoint)[0]


def ask(agent: Any, what: str, **more: Any) -> wire.Reply:
    return asyncio.run(link.ask(found(agent), wire.Request(what, **more)))


@pytest.fixture
def raw() -> Iterator[Callable[[str], Any]]:
    """Sockets that say what they like."""
    context = zmq.Context()
    made: list[Any] = []

    def connect(address: str, kind: int = zmq.DEALER) -> Any:
        socket = context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = 3000
        socket.connect(address)
        made.append(socket)
        return socket

    yield connect
    for socket in made:
        socket.close(linger=0)
    context.term()


def test_a_budget_is_told_when_it_changes_by_a_mebibyte_and_every_ten_seconds(start: Start) -> None:
    """A busy agent may have missed it. More often would only cost the training's process."""
    agent = start()
    target = found(agent)
    told: list[float] = []

    async def watch() -> None:
        nonlocal told
        budgets, run = BudgetSender([target]), Run(nonce=target.nonce)
        for second, others in ((0, 0), (1, 0.9), (2, 1.1), (11, 1.1), (12.5, 1.1), (22, 1.1)):
            run.others = round(others * MIB)
            frame = frame_of(run, 4, host_every=1)
            now = frame.unix_ns + round(second * 1e9)
            budgets.seen(replace(frame, unix_ns=now, ranks=(replace(frame.ranks[0], host_unix_ns=now),)))
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0.01)
            told += [second for _ in agent.ask("requests")]

    asyncio.run(watch())
    assert told == [0, 2, 12.5]


def test_a_request_is_heard_as_it_was_sent_and_answered(start: Start) -> None:
    agent = start()
    assert ask(agent, wire.ROOM, device=3, available=7 << 30) == wire.Reply(True, "room")
    assert ask(agent, "refuse") == wire.Reply(False, "refuse")
    assert ask(agent, "fail").accepted is False
    assert agent.ask("requests") == [["room", 3, 7 << 30], ["refuse", 0, None], ["fail", 0, None]]
    asker = link.Asker()
    assert asyncio.run(asker(found(agent).nonce, wire.BLOCKS, 1)).accepted
    with pytest.raises(link.NoJob, match="has ended"):
        asyncio.run(asker("ffff", wire.BLOCKS, 1))


def test_another_process_at_the_same_place_is_not_asked(start: Start) -> None:
    agent = start()
    other = msgspec.structs.replace(found(agent), nonce="0" * 16)
    reply = asyncio.run(link.ask(other, wire.Request(wire.CENSUS)))
    assert (reply.accepted, reply.why) == (
        False,
        "another process than the requested one answers here: attach again",
    )
    assert agent.ask("requests") == []


def test_what_is_no_request_is_refused_and_the_next_one_heard(start: Start, raw: Any) -> None:
    agent = start()
    control = found(agent).control
    sound = wire.encode_asked(wire.Request(wire.CENSUS, found(agent).nonce))
    for frames in ([b"\xff" * 40], [b""], [sound, b"more"], [os.urandom(512)]):
        socket = raw(control, zmq.REQ)
        socket.send_multipart(frames)
        assert wire.decode_reply(socket.recv()).accepted is False
    raw(control).send_multipart([b"no delimiter"])
    assert ask(agent, wire.CENSUS).accepted
    assert agent.ask("requests") == [["census", 0, None]]


def test_a_request_of_more_than_512_bytes_is_not_even_read(start: Start, raw: Any) -> None:
    agent = start()
    socket = raw(found(agent).control, zmq.REQ)
    with socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        socket.send(b"x" * 513)
        poller = zmq.Poller()
        poller.register(monitor, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        ready = [each for each, _ in poller.poll(30_000)]
        assert ready == [monitor]
        socket.disable_monitor()


def test_twenty_requests_a_second_are_answered_and_eight_of_a_viewer_wait() -> None:
    """Within one process there are no buffers of the kernel's: a viewer's own queue takes one more."""
    heard: list[wire.Request] = []

    def accept(request: wire.Request) -> wire.Reply:
        heard.append(request)
        return wire.Reply(True)

    with zmq.Context() as context:
        control = Control("ab", accept)
        control.open(context, zmq.Poller())
        control.bind("inproc://control")
        viewers = [context.socket(zmq.DEALER) for _ in range(3)]
        for viewer in viewers:
            viewer.linger, viewer.sndhwm = 0, 1
            viewer.connect("inproc://control")
            for _ in range(1 + 8):
                viewer.send_multipart([b"", wire.encode_asked(wire.Request(wire.CENSUS, "ab"))], zmq.NOBLOCK)
            with pytest.raises(zmq.Again):
                viewer.send(b"", zmq.NOBLOCK)
        answered = []
        for second in (100.0, 100.9, 101.0):
            control.hear(second, {})
            answered.append(len(heard))
        assert answered == [20, 20, 27]
        control.close()
        for viewer in viewers:
            viewer.close()


def test_a_flood_of_requests_neither_stops_the_stream_nor_takes_memory(start: Start, raw: Any) -> None:
    agent = start()
    descriptor = found(agent)
    before = agent.ask("memory")
    message = wire.encode_asked(wire.Request(wire.CENSUS, descriptor.nonce))
    floods = [raw(descriptor.control) for _ in range(20)]
    sent, end = 0, time.monotonic() + 2
    while time.monotonic() < end:
        for socket in floods:
            try:
                socket.send_multipart([b"", message], zmq.NOBLOCK)
                sent += 1
            except zmq.Again:
                pass
    assert sent > 2_000
    agent.ask("steps 50")  # until the publisher has them

    async def newest() -> int:
        async for received in link.subscribe([descriptor]):
            if isinstance(received.event, wire.Step) and received.event.step == 49:
                return received.event.step
        return -1

    assert asyncio.run(asyncio.wait_for(newest(), 5)) == 49
    assert len(agent.ask("requests")) <= 8 * 20
    assert agent.ask("memory") - before < 8 * MIB
    for socket in floods:
        socket.close(linger=0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_refused_at_the_gate_and_told_so(start: Start) -> None:
    agent = start()
    descriptor = found(agent)
    open_wide(agent.socket)
    Path(descriptor.control.removeprefix("ipc://")).chmod(0o777)
    code = """
    import msgspec
    descriptor = msgspec.json.decode(sys.argv[1], type=endpoint.Descriptor)
    try:
        print(asyncio.run(link.ask(descriptor, wire.Request("census"))))
    except link.LinkError as error:
        print(type(error).__name__, error)
    """
    code = "link.ask\n" + "\n".join(line.removeprefix("    ") for line in code.splitlines())
    answer = as_nobody(code, msgspec.json.encode(descriptor).decode())
    assert (
        answer == f"ForeignUser the agent of process {agent.pid} refused this user; "
        "gpumon sends requests only to your own processes"
    )
    assert agent.ask("requests") == []


def test_who_cannot_answer_is_told_in_a_sentence(start: Start) -> None:
    agent = start()
    descriptor = found(agent)
    old = msgspec.structs.replace(descriptor, control="")
    with pytest.raises(link.NotAnswering, match=r"has no control socket; it is older than this gpumon: upgrade"):
        asyncio.run(link.ask(old, wire.Request(wire.CENSUS)))
    agent.process.send_signal(signal.SIGSTOP)
    with pytest.raises(link.NotAnswering, match=f"process {agent.pid} is stopped; continue it with `kill -CONT"):
        asyncio.run(link.ask(descriptor, wire.Request(wire.CENSUS), 0.3))
    agent.process.send_signal(signal.SIGCONT)
    assert ask(agent, wire.CENSUS).accepted
    agent.tell("mute")  # its agent leaves, the process goes on
    deadline = time.monotonic() + 60
    while agent.socket.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(link.NotAnswering, match="does not answer"):
        asyncio.run(link.ask(descriptor, wire.Request(wire.CENSUS), 0.3))
    agent.kill()
    with pytest.raises(link.NoJob, match="has ended; it takes no more requests"):
        asyncio.run(link.ask(descriptor, wire.Request(wire.CENSUS)))


def test_the_socket_comes_back_and_goes_with_its_agent(start: Start) -> None:
    agent, killed = start(), start(name="killed.py")
    control = Path(found(agent).control.removeprefix("ipc://"))
    leftover = Path(found(killed).control.removeprefix("ipc://"))
    control.unlink()
    deadline = time.monotonic() + 60
    while not control.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ask(agent, wire.CENSUS).accepted
    agent.ask("goodbye")
    assert not control.exists()
    killed.kill()
    assert leftover.exists()
    link.discover()
    assert not leftover.exists()


def test_what_stands_at_its_path_is_not_replaced(runtime: Path) -> None:
    descriptor = endpoint.describe("x")
    runtime.mkdir(0o700)
    taken = runtime / f"{descriptor.stem}{endpoint.CONTROL}"
    taken.write_text("somebody's")
    assert endpoint.claim(descriptor).socket.parent != runtime
