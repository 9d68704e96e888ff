"""What the wire costs: encoding, keeping the past, answering a late viewer, and following many ranks at once.

    python benchmarks/link.py [--ranks 64] [--seconds 10]

Prints one line a figure. The ranks are real publishers with sockets of their own, spread over a few processes; events
are made up, their rate is that of the budget: 64 ranks, 5 phases, 20 steps a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import tempfile
import time
import tracemalloc

from common import GIB, options, sending

from gpumon import link
from gpumon_agent import wire
from gpumon_agent.transport.history import History

PHASES = 5


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
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    encoding()
    past()
    with tempfile.TemporaryDirectory(prefix="gm") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        with sending(arguments.ranks):
            asyncio.run(follow(arguments.ranks, arguments.seconds))


if __name__ == "__main__":
    main()
