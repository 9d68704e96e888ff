"""What the wire costs: encoding, keeping the past, answering a late viewer, and following many ranks at once.

    python benchmarks/link.py [--ranks 64] [--seconds 10]

Prints one line a figure. The ranks are real publishers with sockets of their own, spread over a few processes; events
are made up, their rate is that of the budget: 64 ranks, 5 phases, 20 steps a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc

from gpumon import link
from gpumon_agent import endpoint, wire
from gpumon_agent.hooks.recorder import Recorder
from gpumon_agent.transport.history import History
from gpumon_agent.transport.publisher import Publisher

PHASES = 5
STEPS_A_SECOND = 20
RANKS_A_PROCESS = 16
GIB = 1 << 30


def events(step: int) -> list[wire.NumberedEvent]:
    """One step as a training process would tell it."""
    now = time.monotonic_ns()
    phases = []
    for i in range(PHASES):  # ints of its own for each phase, as a reading of the allocator makes them
        own = 512 * (step + i)
        figures = (41 * GIB + own, 42 * GIB + own, 43 * GIB + own, 44 * GIB + own, 41 * GIB + own, 10**8 + own)
        phases.append(wire.Phase(step, "forward", i, 0, now + i, 10**7 + i, *figures, 40 * GIB + own, 1200 + i, 0, 0))
    return [*phases, wire.Step(step, now, 5 * 10**7, 10**8, ((8, 1024),), phases=PHASES)]


def encoding() -> None:
    made = [event for step in range(2000) for event in events(step)]
    times = []
    for _ in range(7):
        began = time.perf_counter()
        encoded = [wire.encode_event(event) for event in made]
        times.append((time.perf_counter() - began) / len(made))
    raw = [wire.encode_event(event) for event in made]
    print(f"encode               {min(times) * 1e6:.2f} µs an event, {sum(map(len, raw)) / len(raw):.0f} bytes")
    times = []
    for _ in range(7):
        began = time.perf_counter()
        packets = list(wire.pack(enumerate(encoded), replayed=True))
        times.append(time.perf_counter() - began)
    print(f"pack                 {min(times) / len(made) * 1e6:.2f} µs an event")
    times = []
    for _ in range(7):
        began = time.perf_counter()
        for packet in packets:
            wire.decode_frame(wire.frame(packet))
        times.append(time.perf_counter() - began)
    print(f"decode               {min(times) / len(made) * 1e6:.2f} µs an event")


def past() -> None:
    """2,000 steps kept: as encoded pages (what the agent does) and as Structs (what it would be otherwise)."""
    tracemalloc.start()
    history = History()
    for step in range(2000):
        for event in events(step):
            history.extend([(history.newest + 1, wire.encode_event(event))])
    kept, _ = tracemalloc.get_traced_memory()
    structs = [(i, event) for step in range(2000) for i, event in enumerate(events(step))]
    both, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(
        f"past of 2,000 steps  {kept / 2**20:.1f} MiB encoded ({history.nbytes / 2**20:.1f} MiB of it bytes), "
        f"{(both - kept) / 2**20:.1f} MiB as {len(structs):,} Structs"
    )


def publishing(seconds: float) -> None:
    """What one agent's thread takes of a core, nobody watching, at the budget's rate."""
    recorder = Recorder()
    beat = wire.Heartbeat(0, 0, "forward", 0)
    publisher = Publisher(recorder, list, lambda: beat, endpoint.describe("bench"))
    publisher.start()
    publisher.wait_ready(5)
    thread = next(one for one in threading.enumerate() if one.name == "gpumon-publisher")
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    before, began = time.clock_gettime(clock), time.monotonic()
    for step in range(int(seconds * STEPS_A_SECOND)):
        for event in events(step):
            recorder.append(event)
        time.sleep(max(0.0, began + (step + 1) / STEPS_A_SECOND - time.monotonic()))
    share = (time.clock_gettime(clock) - before) / (time.monotonic() - began)
    publisher.close()
    print(f"publisher's thread   {share:.2%} of a core, unwatched, {STEPS_A_SECOND} steps/s")


def serve(first: int, ranks: int) -> None:
    """`ranks` publishers in this process; ends when its standard input does."""
    publishers = []
    for rank in range(first, first + ranks):
        descriptor = endpoint.describe("bench", rank=rank, world_size=1024, run_id="bench", unix_ns=time.time_ns())
        recorder = Recorder()
        hello = wire.Hello(
            (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR), "0", descriptor.nonce, "bench", descriptor.host, os.getpid(),
            descriptor.start_time, descriptor.boot_id, (), "3", wire.Clock(0, 0), rank=rank,
        )  # fmt: skip
        beat = wire.Heartbeat(0, 0, "forward", 0)
        publisher = Publisher(recorder, lambda hello=hello: [hello], lambda beat=beat: beat, descriptor)  # type: ignore[misc]
        publisher.start()
        publishers.append((publisher, recorder))
    for publisher, _ in publishers:
        publisher.wait_ready(5)
    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    step = 0
    while not ended.is_set():
        due = time.monotonic() + 1 / STEPS_A_SECOND
        for event in events(step):
            for _, recorder in publishers:
                recorder.append(event)
        step += 1
        time.sleep(max(0.0, due - time.monotonic()))


async def follow(ranks: int, seconds: float) -> None:
    last: dict[str, int] = {}
    messages = lost = 0
    synced = 0
    began_cpu = began = 0.0
    lags = []
    async with contextlib.aclosing(link.subscribe(link.resolve("bench"))) as stream:
        opened = time.monotonic()
        async for received in stream:
            if isinstance(received.event, wire.Synced):
                synced += 1
                if synced == ranks:
                    print(f"all ranks synced     {(time.monotonic() - opened) * 1e3:.0f} ms")
                    began, began_cpu = time.monotonic(), time.process_time()
            if received.seq >= 0:
                before = last.get(received.source)
                lost += 0 if before is None else received.seq - before - 1
                last[received.source] = received.seq
                if began:
                    messages += 1
                    if isinstance(received.event, wire.Step):
                        lags.append(time.monotonic_ns() - received.event.t_ns)
            if began and time.monotonic() - began > seconds:
                break
    took = time.monotonic() - began
    share = (time.process_time() - began_cpu) / took
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{ranks} ranks followed    {messages / took:,.0f} messages/s, {lost} lost, {share:.1%} of a core")
    quantiles = [value / 1e6 for value in statistics.quantiles(lags, n=20)]
    print(f"append to viewer     p50 {quantiles[9]:.0f} ms, p95 {quantiles[18]:.0f} ms;  peak RSS {peak:.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--serve", type=int, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    encoding()
    past()
    with tempfile.TemporaryDirectory(prefix="gm") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        publishing(min(5.0, arguments.seconds))
        servers = []
        for first in range(0, arguments.ranks, RANKS_A_PROCESS):
            count = min(RANKS_A_PROCESS, arguments.ranks - first)
            command = [sys.executable, __file__, "--serve", str(first), str(count)]
            servers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        for server in servers:
            assert server.stdout is not None
            server.stdout.readline()
        try:
            asyncio.run(follow(arguments.ranks, arguments.seconds))
        finally:
            for server in servers:
                server.communicate(b"")


if __name__ == "__main__":
    main()
