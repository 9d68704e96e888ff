"""Viewers and agents: real processes, real sockets, real kills."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq

from gpumon import link
from gpumon.link.subscription import _Subscription
from gpumon.session.incoming import Incoming, singly
from gpumon_agent import endpoint, wire
from gpumon_agent.wire import Received

Start = Callable[..., Any]

VIEWER = """
import asyncio
from gpumon import link

async def main():
    async for received in link.subscribe(link.resolve()):
        print(received.seq, flush=True)

asyncio.run(main())
"""


async def collect(until: Callable[[Received], bool], *args: Any, seconds: float = 10, **kwargs: Any) -> list[Received]:
    """What a subscription yields, up to the first message that `until` is true of, or its end."""
    heard: list[Received] = []
    async with contextlib.aclosing(link.subscribe(*args, **kwargs)) as stream:

        async def listen() -> None:
            async for received in stream:
                heard.append(received)
                if until(received):
                    return

        await asyncio.wait_for(listen(), seconds)
    return heard


def is_a(kind: type) -> Callable[[Received], bool]:
    return lambda received: isinstance(received.event, kind)


def nth(count: int, kind: type) -> Callable[[Received], bool]:
    so_far = itertools.count(1)
    return lambda received: isinstance(received.event, kind) and next(so_far) == count


def numbers(heard: list[Received]) -> list[int]:
    return [received.seq for received in heard if received.seq >= 0]


def kinds(heard: list[Received]) -> list[str]:
    return [type(received.event).__name__ for received in heard]


async def test_an_event_that_cannot_be_encoded_takes_no_other_with_it(start: Start) -> None:
    agent = start()
    agent.ask("spoil 12")  # more often than a part may fail
    heard = await collect(is_a(wire.Synced), link.resolve())
    assert kinds(heard).count("Step") == 12
    (beat,) = [each.event for each in heard if isinstance(each.event, wire.Heartbeat)]
    assert beat.off == ()
    assert agent.stderr().startswith("gpumon: encoding: OverflowError: ")


async def test_a_late_viewer_gets_the_picture_and_the_recent_past_within_a_second(start: Start) -> None:
    agent = start()
    agent.ask("steps 3000")
    await asyncio.sleep(0.2)
    began = time.monotonic()
    heard = await collect(is_a(wire.Synced), link.resolve())
    assert time.monotonic() - began < 1
    assert kinds(heard)[:5] == ["Hello", "Model", "Module", "Module", "Module"]
    steps = [received.event.step for received in heard if isinstance(received.event, wire.Step)]
    assert steps[-1536:] == list(range(3000 - 1536, 3000))
    assert all(received.replayed for received in heard)
    assert len(set(numbers(heard))) == len(numbers(heard))


async def test_live_messages_follow_the_past_without_a_gap_or_a_double(start: Start) -> None:
    agent = start()
    agent.ask("background 400")
    await asyncio.sleep(0.5)
    heard = await collect(lambda r: isinstance(r.event, wire.Step) and r.event.step == 600, link.resolve())
    seen = numbers(heard)
    assert seen == list(range(seen[-1] + 1))
    assert [r.replayed for r in heard if r.seq >= 0].index(False) > 100


async def test_batches_hold_the_same_messages_in_the_same_order(start: Start) -> None:
    agent = start()
    agent.ask("steps 300")
    agent.ask("newest")
    await asyncio.sleep(0.2)
    alone = await collect(is_a(wire.Synced), link.resolve())
    async with contextlib.aclosing(link.subscribe_batches(link.resolve())) as stream:
        batches: list[list[Received]] = []
        async for batch in stream:
            batches.append([*singly(batch)])
            if any(map(is_a(wire.Synced), batches[-1])):
                break
    together = [received for batch in batches for received in batch][: len(alone)]
    assert numbers(together) == numbers(alone) == list(range(1200))
    assert kinds(together) == kinds(alone)
    assert len(batches) < len(alone) / 20


async def test_a_long_past_comes_in_batches_of_less_than_1024_messages(start: Start) -> None:
    agent = start()
    agent.ask("steps 3000")
    sizes = []
    async with contextlib.aclosing(link.subscribe_batches(link.resolve())) as stream:
        async for batch in stream:
            heard = [*singly(batch)]
            sizes.append(len(heard))
            if any(map(is_a(wire.Synced), heard)):
                break
    assert 488 < max(sizes) < 1024


async def test_a_past_is_read_no_faster_than_it_is_taken(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the pasts of many ranks fill the viewer's memory before it has looked at the first."""
    start().ask("steps 3000")
    put, waiting = _Subscription.put, [0]

    def noted(self: _Subscription, heard: Sequence[Incoming]) -> None:
        put(self, heard)
        waiting.append(self.backlog)

    monkeypatch.setattr(_Subscription, "put", noted)
    heard: list[Received] = []
    async with contextlib.aclosing(link.subscribe_batches(link.resolve())) as stream:
        async for batch in stream:
            heard += singly(batch)
            await asyncio.sleep(0.02)
            if any(map(is_a(wire.Synced), heard[-1024:])):
                break
    assert 4096 < max(waiting) < 4096 + 1024
    steps = [received.event.step for received in heard if isinstance(received.event, wire.Step)]
    assert steps[-1536:] == list(range(3000 - 1536, 3000))


async def test_one_of_two_viewers_leaves_and_the_other_hears_on(start: Start) -> None:
    agent = start()
    staying = asyncio.create_task(collect(is_a(wire.Goodbye), link.resolve()))
    await collect(is_a(wire.Synced), link.resolve())
    agent.ask("steps 5")
    await asyncio.sleep(0.2)
    agent.ask("goodbye")
    heard = await staying
    assert numbers(heard) == list(range(20))
    assert heard[-1].event.reason == "finished"


def test_a_viewer_whose_loop_was_closed_under_its_subscription_ends(start: Start) -> None:
    start()
    viewer = """
import asyncio, gc
from gpumon import link

async def listen(heard):
    async for received in link.subscribe(link.resolve()):
        heard.set()
        await asyncio.Event().wait()

async def main():
    heard = asyncio.Event()
    listening = asyncio.create_task(listen(heard))
    await heard.wait()

loop = asyncio.new_event_loop()
loop.run_until_complete(main())
loop.close()
del loop
gc.collect()
print("ended")
"""
    done = subprocess.run([sys.executable, "-c", viewer], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "ended\n"


async def test_attach_and_leave_ten_times(start: Start) -> None:
    agent = start()
    agent.ask("steps 10")
    for _ in range(10):
        assert numbers(await collect(is_a(wire.Synced), link.resolve())) == list(range(40))


async def test_a_changed_picture_is_announced(start: Start) -> None:
    agent = start()
    watching = asyncio.create_task(collect(lambda r: not r.replayed and kinds([r]) == ["Module"], link.resolve()))
    await asyncio.sleep(0.3)
    agent.ask("announce")
    assert [r.event.modules for r in await watching if isinstance(r.event, wire.Model)] == [3, 4]


async def test_all_ranks_of_a_job_are_one_stream_and_a_late_rank_joins(start: Start) -> None:
    agents = [start(rank=rank, world_size=3, run_id="r1") for rank in range(2)]
    start(name="other.py")
    job = link.resolve("talk.py")
    assert [descriptor.rank for descriptor in job] == [0, 1]
    watching = asyncio.create_task(collect(lambda r: False, job))
    await asyncio.sleep(0.3)
    agents.append(start(rank=2, world_size=3, run_id="r1"))
    await asyncio.sleep(1)
    for agent in agents:
        agent.ask("steps 2")
        agent.ask("goodbye")
    heard = await watching
    assert {r.event.rank for r in heard if isinstance(r.event, wire.Hello)} == {0, 1, 2}
    assert len([r for r in heard if isinstance(r.event, wire.Goodbye)]) == 3
    for source in {received.source for received in heard}:
        assert numbers([r for r in heard if r.source == source]) == list(range(8))


async def test_a_killed_agent_is_told_as_lost_with_where_it_stood(start: Start) -> None:
    agent = start()
    agent.ask("steps 7")
    watching = asyncio.create_task(collect(is_a(wire.Goodbye), link.resolve()))
    await asyncio.sleep(1.3)
    agent.kill()
    began = time.monotonic()
    goodbye = (await watching)[-1].event
    assert (goodbye.reason, goodbye.step, goodbye.phase) == ("lost", 7, "forward")
    assert time.monotonic() - began < 1
    assert link.discover() == []
    assert not agent.socket.exists()


async def test_a_process_that_ended_before_its_first_word_is_an_error_not_an_empty_answer(start: Start) -> None:
    agent = start()
    found = link.resolve()
    agent.kill()
    with pytest.raises(link.LinkError, match=f"process {agent.pid} ended before it sent anything; .*"):
        await collect(is_a(wire.Goodbye), found)


async def test_a_stopped_agent_is_silent_but_not_lost(start: Start) -> None:
    agent = start()
    watching = asyncio.create_task(collect(is_a(wire.Goodbye), link.resolve(), seconds=20))
    await asyncio.sleep(0.3)
    os.kill(agent.pid, signal.SIGSTOP)
    await asyncio.sleep(4)
    assert not watching.done()
    os.kill(agent.pid, signal.SIGCONT)
    agent.ask("goodbye")
    assert (await watching)[-1].event.reason == "finished"


async def test_attaching_to_a_stopped_process_says_that_it_is_stopped(start: Start) -> None:
    agent = start()
    os.kill(agent.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, agent.pid, os.WSTOPPED | os.WNOWAIT)
    with pytest.raises(link.NotAnswering, match=rf"is stopped; continue it with `kill -CONT {agent.pid}`"):
        await collect(is_a(wire.Synced), link.resolve(), answer_s=0.3)


async def test_a_restarted_job_of_the_same_name_is_picked_up(start: Start) -> None:
    first = start(name="again.py")
    job = link.resolve()
    watching = asyncio.create_task(collect(nth(2, wire.Hello), job, follow=True))
    await asyncio.sleep(0.3)
    start(name="other.py")
    first.kill()
    second = start(name="again.py")
    heard = await watching
    assert [r.event.pid for r in heard if isinstance(r.event, wire.Hello)] == [first.pid, second.pid]


async def test_a_killed_viewer_leaves_the_agent_and_other_viewers_alone(start: Start) -> None:
    agent = start()
    viewer = subprocess.Popen([sys.executable, "-c", VIEWER], stdout=subprocess.PIPE)
    assert viewer.stdout is not None
    viewer.stdout.readline()
    staying = asyncio.create_task(collect(is_a(wire.Goodbye), link.resolve()))
    await asyncio.sleep(0.2)
    viewer.kill()
    viewer.communicate()
    agent.ask("steps 50")
    await asyncio.sleep(0.2)
    agent.ask("goodbye")
    assert numbers(await staying) == list(range(200))


async def test_a_viewer_that_stood_still_hears_the_newest_past_and_how_much_it_missed(start: Start) -> None:
    agent = start()
    agent.ask("steps 10")
    count = """
import asyncio, json
from gpumon import link
from gpumon_agent import wire

async def main():
    seen, told = [], 0
    async for received in link.subscribe(link.resolve()):
        if isinstance(received.event, wire.Synced) and not told:
            print("ready", flush=True)
        if isinstance(received.event, wire.Notice):
            told += int(received.event.text.split()[0])
        if received.seq >= 0:
            seen.append(received.seq)
    print(json.dumps([seen == sorted(set(seen)), seen[0], seen[-1], seen[-1] + 1 - len(seen), told]))

asyncio.run(main())
"""
    viewer = subprocess.Popen([sys.executable, "-c", count], stdout=subprocess.PIPE, text=True)
    assert viewer.stdout is not None
    assert viewer.stdout.readline() == "ready\n"
    os.kill(viewer.pid, signal.SIGSTOP)
    before = agent.ask("memory")
    for _ in range(50):
        await asyncio.to_thread(agent.ask, "steps 2000")
    assert agent.ask("memory") - before < 32 * 1024 * 1024
    os.kill(viewer.pid, signal.SIGCONT)
    await asyncio.sleep(1.5)
    agent.ask("steps 1")
    await asyncio.sleep(1.5)
    agent.ask("goodbye")
    answer = (await asyncio.to_thread(viewer.communicate))[0]
    ordered, first, last, missing, told = json.loads(answer.removeprefix("ready\n"))  # said again when it caught up
    assert (ordered, first, last) == (True, 0, 4 * 100_011 - 1)
    assert missing == told > 100_000


@pytest.mark.parametrize(("ranks", "together"), [(31, 1), (32, 2)])
def test_from_32_ranks_on_each_sends_two_tenths_of_a_second_at_once(start: Start, ranks: int, together: int) -> None:
    """A viewer of all of them wakes up half as often; of fewer it shows each tenth of a second as it is over."""
    agent = start(world_size=ranks, rank=0)
    with zmq.Context() as context, context.socket(zmq.SUB) as viewer:
        viewer.linger = 0
        viewer.connect(agent.endpoint)
        viewer.subscribe(wire.LIVE)
        agent.ask("flow")
        sizes: list[int] = []
        while len(sizes) < 9:
            assert viewer.poll(60_000)
            events = wire.decode_frame(viewer.recv()).events
            sizes += [len(events)] if all(isinstance(event, wire.Step) for event in events) else []
    assert statistics.mode(sizes) == together


async def test_the_last_words_arrive_though_much_was_said_just_before(start: Start) -> None:
    agent = start()
    watching = asyncio.create_task(collect(is_a(wire.Goodbye), link.resolve()))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(agent.ask, "leave 4000")
    assert numbers(await watching) == list(range(16_000))


async def test_an_agent_whose_last_word_was_not_heard_has_stopped_though_its_process_goes_on(start: Start) -> None:
    agent = start()
    watching = asyncio.create_task(collect(is_a(wire.Goodbye), link.resolve()))
    await asyncio.sleep(0.3)
    agent.ask("mute")
    assert (await watching)[-1].event.reason == "stopped"
    assert agent.process.poll() is None


async def test_another_major_protocol_is_refused_with_its_sentence(start: Start) -> None:
    start(protocol=[wire.PROTOCOL_MAJOR + 1, 4])
    with pytest.raises(link.OtherProtocol, match=r"the agent speaks protocol 2\.4.*upgrade gpumon here"):
        await collect(is_a(wire.Synced), link.resolve())


async def test_one_rank_that_cannot_be_heard_is_a_notice_beside_the_others(start: Start) -> None:
    good = start(rank=0, world_size=2, run_id="x")
    start(rank=1, world_size=2, run_id="x", protocol=[9, 0])
    watching = asyncio.create_task(collect(is_a(wire.Goodbye), link.resolve()))
    await asyncio.sleep(0.5)
    good.ask("goodbye")
    heard = await watching
    assert any("protocol 9.0" in r.event.text for r in heard if isinstance(r.event, wire.Notice))


async def test_an_endpoint_that_is_no_gpumon_is_refused(runtime: Path) -> None:
    runtime.mkdir(0o700)
    with zmq.Context() as context, context.socket(zmq.XPUB) as stranger:
        stranger.linger = 0
        stranger.bind(f"ipc://{runtime}/x.sock")
        with pytest.raises(link.NotGpumon, match="is no gpumon agent"):
            await collect(is_a(wire.Synced), link.resolve(f"ipc://{runtime}/x.sock"), answer_s=0.3)


async def test_something_that_does_not_even_speak_zeromq_is_refused(runtime: Path) -> None:
    runtime.mkdir(0o700)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(runtime / "x.sock"))
        server.listen()

        def speak_http() -> None:
            with contextlib.suppress(OSError):  # of accept: the test shut the server down
                while True:
                    client, _ = server.accept()
                    with client, contextlib.suppress(BrokenPipeError):
                        client.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        serving = asyncio.create_task(asyncio.to_thread(speak_http))
        with pytest.raises(link.NotGpumon):
            await collect(is_a(wire.Synced), link.resolve(f"ipc://{runtime}/x.sock"), answer_s=0.3)
        server.shutdown(socket.SHUT_RDWR)
        await serving


async def test_a_connection_that_breaks_is_made_again_five_times(runtime: Path) -> None:
    runtime.mkdir(0o700)
    connections = 0

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(runtime / "x.sock"))
        server.listen()

        def hang_up() -> None:
            nonlocal connections
            with contextlib.suppress(OSError):  # of accept: the test shut the server down
                while True:
                    client, _ = server.accept()
                    with client:
                        connections += client.recv(1) != b""  # empty: a look whether anything listens

        serving = asyncio.create_task(asyncio.to_thread(hang_up))
        with pytest.raises(link.NotGpumon, match="breaks repeatedly"):
            await collect(is_a(wire.Synced), link.resolve(f"ipc://{runtime}/x.sock"), answer_s=120, seconds=120)
        server.shutdown(socket.SHUT_RDWR)
        await serving
    assert connections == 1 + 5


async def test_a_frame_above_the_limit_breaks_the_connection_and_it_is_made_again(runtime: Path) -> None:
    """An agent's own frames never are; but a SUB socket stays dead for good after one."""
    runtime.mkdir(0o700)
    clock = wire.Clock(0, 0)
    hello = wire.Hello((wire.PROTOCOL_MAJOR, 0), "0", "ab", "x", "h", 0, 0, "", (), "3", clock)
    asked = 0

    def unruly_agent(context: zmq.Context[Any], publisher: zmq.Socket[Any]) -> None:
        nonlocal asked
        while asked < 2:
            message = publisher.recv()
            topic = message[1:]
            if message[:1] == b"\x01" and wire.is_request(topic):
                asked += 1
                answer = [(-1, wire.encode_event(event)) for event in (hello, wire.Synced(asked))]
                for packet in wire.pack(answer, replayed=True):
                    publisher.send(wire.frame(packet, topic))
                if asked == 1:
                    publisher.send(wire.LIVE + bytes(wire.FRAME_BYTES_MAX))

    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.linger = 0
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        publisher.bind(f"ipc://{runtime}/x.sock")
        agent = asyncio.create_task(asyncio.to_thread(unruly_agent, context, publisher))
        await collect(lambda r: r.event == wire.Synced(2), link.resolve(f"ipc://{runtime}/x.sock"))
        await agent


async def test_after_three_pasts_without_an_end_the_viewer_goes_on_live(runtime: Path) -> None:
    runtime.mkdir(0o700)
    hello = wire.Hello((wire.PROTOCOL_MAJOR, 0), "0", "ab", "x", "h", 0, 0, "", (), "3", wire.Clock(0, 0))
    asked, heard = 0, asyncio.Event()

    def forgetful_agent(publisher: zmq.Socket[Any]) -> None:
        nonlocal asked
        while not heard.is_set():
            if not publisher.poll(100):
                continue
            message = publisher.recv()
            if message[:1] == b"\x01" and wire.is_request(message[1:]):
                asked += 1
                for packet in wire.pack([(-1, wire.encode_event(hello))], replayed=True):
                    publisher.send(wire.frame(packet, message[1:]))
                for packet in wire.pack([(7, wire.encode_event(wire.Step(7, 0, 0)))], replayed=False):
                    publisher.send(wire.LIVE + packet)

    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.linger = 0
        publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        publisher.bind(f"ipc://{runtime}/x.sock")
        agent = asyncio.create_task(asyncio.to_thread(forgetful_agent, publisher))
        try:
            await collect(is_a(wire.Step), link.resolve(f"ipc://{runtime}/x.sock"), seconds=60)
        finally:
            heard.set()
            await agent
    assert asked == 3


async def test_an_agent_leaves_at_once_or_within_5_seconds_of_a_viewer_that_is_stopped(start: Start) -> None:
    agent = start()
    stopped = subprocess.Popen([sys.executable, "-c", VIEWER], stdout=subprocess.PIPE)
    assert stopped.stdout is not None
    stopped.stdout.readline()
    reading = asyncio.create_task(collect(is_a(wire.Goodbye), link.resolve()))
    await asyncio.sleep(0.2)
    os.kill(stopped.pid, signal.SIGSTOP)
    agent.ask("background 1000")
    try:
        began = time.monotonic()
        leaving = asyncio.create_task(asyncio.to_thread(agent.ask, "goodbye"))
        assert (await reading)[-1].event.reason == "finished"
        assert time.monotonic() - began < 4
        await leaving
        assert 4.5 < time.monotonic() - began < 9
    finally:
        stopped.kill()
        stopped.communicate()


async def test_an_agent_without_viewers_does_not_wait_for_any(start: Start) -> None:
    agent = start()
    began = time.monotonic()
    await asyncio.to_thread(agent.ask, "goodbye")
    assert time.monotonic() - began < 4


async def test_names_with_markup_and_escapes_arrive_harmless(start: Start) -> None:
    start(name="a[/]\x1b[2Jb\n", module="layers[/]\x1b]0;owned\x07{}")
    heard = await collect(is_a(wire.Synced), link.resolve())
    hello, module = heard[0].event, next(r.event for r in heard if isinstance(r.event, wire.Module))
    assert hello.name == "a[/]�[2Jb�"
    assert module.path == "layers[/]�]0;owned�0"
    assert endpoint.describe("\x1b").name == "�"


async def test_a_large_model_and_a_full_past_fit_one_snapshot(start: Start) -> None:
    agent = start(modules=10_000)
    agent.ask("steps 2500 12")
    await asyncio.sleep(0.5)
    heard = await collect(is_a(wire.Synced), link.resolve())
    assert kinds(heard).count("Module") == 10_000
    assert kinds(heard).count("Step") >= 1536
    assert "Notice" not in kinds(heard)


def test_long_subscriptions_of_our_own_cost_the_training_no_memory_either(start: Start) -> None:
    agent = start()
    before = agent.ask("memory")
    with zmq.Context() as context, context.socket(zmq.SUB) as flood:
        flood.linger = 0
        flood.sndhwm = 0
        flood.connect(agent.endpoint)
        for _ in range(20_000):
            flood.subscribe(os.urandom(200))
        time.sleep(0.5)
        assert agent.ask("memory") - before < 8 * 1024 * 1024
