"""What the training thread pays for its end of the shared memory.

python benchmarks/ring.py [--rounds N] [--write FILE]

Each call is timed alone. A round takes one of every row, in random order: an empty function, the same again (A/A: what
that row shows is the machine's noise), and the calls themselves. Told are the medians and 99th percentiles, in ns, and
the median of the differences to the empty function of the same round, with its 95 % interval (bootstrap of rounds).
`warm`: one round after another. `cold`: before each call other memory is written, as much as the second-level cache
holds, as a training step does. `in a row`: a thousand of a kind, timed together, as a boundary writes what waits.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from statistics import median, quantiles

from common import interval, options, write

from gpumon_agent.transport.memory import ANSWER, Memory
from gpumon_agent.transport.pages import Pages, Status
from gpumon_agent.transport.ring import CHUNK_BYTES, LongReader, LongWriter, Reader, Writer

ROW = "| {:<44} | {:>8} | {:>8} | {:>10} | {:>21} |"
OTHER_BYTES = 1024 * 1024
READ_EVERY = 64  # rounds


def main() -> None:
    parser = options(__doc__, write=True)
    parser.add_argument("--rounds", type=int, default=20_000, help="warm ones; a tenth as many cold ones (20,000)")
    args = parser.parse_args()
    parts = measure(args.rounds, cold=False), measure(args.rounds // 10, cold=True), in_a_row(args.rounds // 100)
    text = "\n\n".join("\n".join(part) for part in parts) + "\n"
    write("What the shared memory costs", text, args.write)


def measure(rounds: int, *, cold: bool) -> list[str]:
    memory = Memory.create()
    writer, status, learned = Writer(memory), Status(memory), Pages(memory, ANSWER)
    long, reader, long_reader = LongWriter(memory), Reader(memory), LongReader(memory)
    lock = threading.Lock()
    payloads = {length: bytes(range(256)) * 2 for length in (64, 128, 512)}
    payloads = {length: payload[:length] for length, payload in payloads.items()}
    chunk = bytes(CHUNK_BYTES)

    def empty() -> None:
        pass

    def locked() -> None:
        with lock:
            pass

    calls: dict[str, Callable[[], object]] = {
        "an empty function": empty,
        "the same again": lambda: empty(),
        "an event of 64 bytes": lambda: writer.put(payloads[64]),
        "an event of 128 bytes": lambda: writer.put(payloads[128]),
        "an event of 512 bytes": lambda: writer.put(payloads[512]),
        "the status": lambda: status.write(1000, "forward", 10**15, 1, 2, 3, 4),
        "a look for something new, without success": lambda: learned.read(),
        "one chunk of a long message": lambda: long.pump(1),
        "a lock, which none of these takes": locked,
    }
    calls["an empty function"] = lambda: empty()
    writer._lap = 1 << 34  # as after days: numbers of two digits, in Python's arithmetic
    for _ in range(len(memory.events) // 144 + 1):  # every page of the ring was written before
        writer.put(payloads[128])
    took: dict[str, list[int]] = {name: [] for name in calls}
    order, clock = random.Random(0), time.perf_counter_ns
    other, dirty = bytearray(OTHER_BYTES), bytes(OTHER_BYTES)
    for number in range(rounds):
        if number % READ_EVERY == 0:
            reader.take()
            long_reader.take()
        for name in order.sample(list(calls), k=len(calls)):
            if name.startswith("one chunk"):
                long.put(1, chunk)
            if cold:
                other[:] = dirty
            call = calls[name]
            began = clock()
            call()
            took[name].append(clock() - began)
        if number % READ_EVERY == 30:
            long_reader.take()
    assert long.waiting_bytes <= 2 * CHUNK_BYTES, "chunks had to wait: nothing was measured"
    memory.close()
    return table(f"{'cold' if cold else 'warm'}, {rounds:,} rounds, ns", took)


def table(title: str, took: dict[str, list[int]]) -> list[str]:
    rows = [ROW.format(title, "p50", "p99", "more, p50", "95 % interval"), ROW.format(*["-" * 7 + ":"] * 5)]
    base = took["an empty function"]
    for name, times in took.items():
        more = [a - b for a, b in zip(times, base, strict=True)]
        _, low, high = interval(more, median, 200)
        cuts = quantiles(times, n=100)
        between = f"{low:+.0f} to {high:+.0f}"
        rows.append(ROW.format(name, f"{median(times):.0f}", f"{cuts[98]:.0f}", f"{median(more):+.0f}", between))
    return rows


def in_a_row(rounds: int) -> list[str]:
    memory = Memory.create()
    put = Writer(memory).put

    def empty(payload: bytes) -> None:
        pass

    calls: dict[str, tuple[Callable[[bytes], object], bytes]] = {
        "an empty function": (empty, b""),
        "the same again": (empty, b""),
        **{f"an event of {length} bytes": (put, bytes(length)) for length in (64, 128, 512)},
    }
    took: dict[str, list[int]] = {name: [] for name in calls}
    order, clock = random.Random(0), time.perf_counter_ns
    for _ in range(rounds):
        for name in order.sample(list(calls), k=len(calls)):
            call, payload = calls[name]
            began = clock()
            for _ in range(1000):
                call(payload)
            took[name].append((clock() - began) // 1000)
    memory.close()
    return table(f"in a row, {rounds:,} rounds of 1,000, ns each", took)


if __name__ == "__main__":
    main()
