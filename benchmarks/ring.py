"""What the training thread pays for a record in shared memory: `python benchmarks/ring.py [--rounds 20000]`.

Rounds time one call of every row, in random order; an empty function shows the machine's own share. `in a row`: a
thousand calls timed together, as when a boundary flushes. `alone`: before each call, memory as large as the L2 cache is
overwritten, as a training step does. Medians in ns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from common import options, rounds

from gpumon_agent.transport.memory import ANSWER, Memory
from gpumon_agent.transport.pages import Pages
from gpumon_agent.transport.ring import Reader, Writer

OTHER, DIRTY = bytearray(1 << 20), bytes(1 << 20)


def spent(call: Callable[[], object], times: int) -> float:
    OTHER[:] = DIRTY
    began = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - began) / times


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=20_000, help="alone; a hundredth as many in a row (20,000)")
    count = parser.parse_args().rounds
    memory = Memory.create()
    writer, answers, lock = Writer(memory), Pages(memory, ANSWER), threading.Lock()
    writer._lap = 1 << 34  # as after days: two-digit Python ints

    def locked() -> None:
        with lock:
            pass

    calls: dict[str, Callable[[], object]] = {
        "an empty function": lambda: None,
        "a record of 128 bytes": partial(writer.put, bytes(128)),
        "a look for something new, without success": answers.read,
        "a lock, which none of these takes": locked,
    }
    for _ in range(len(memory.events) // 144 + 1):  # every page of the ring has been written once
        writer.put(bytes(128))
    Reader(memory).take()
    for name, times, number in (("alone", 1, count), ("in a row", 1000, count // 100)):
        found = list(rounds({what: partial(spent, call, times) for what, call in calls.items()}, number))
        for what in calls:
            print(f"{name:<10}{what:<44}{median(each[what] for each in found):>8.0f} ns")
    memory.close()


if __name__ == "__main__":
    main()
