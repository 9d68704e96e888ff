"""Two ranks with real recorders and publishers whose memory grows each step by so many bytes, until stdin closes."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "_shared"))

from threaded import Threaded

from gpumon_agent import endpoint, wire
from gpumon_agent.hooks.recorder import Recorder

STEPS_A_SECOND = 10
MIB = 1 << 20
BASE = 512 * MIB
DDP = wire.Parallel("ddp", 2, (40 * MIB, 24 * MIB), True, gradient_as_bucket_view=False)


def events(step: int, growth: int) -> list[wire.NumberedEvent]:
    now = time.monotonic_ns()
    made: list[wire.NumberedEvent] = []
    kept = BASE + step * growth
    for phase, end, peak in (("between", 0, 0), ("forward", 64, 64), ("backward", 16, 80), ("optimizer", 16, 24)):
        allocated, highest = kept + end * MIB, kept + peak * MIB
        reserved = highest + 8 * MIB
        made.append(
            wire.Phase(
                step, phase, 0, 0, now, 10**7, allocated, highest, reserved, reserved, allocated, 0,
                allocated - 1024, 100, 3, 0, wire.SAMPLED,
            )
        )  # fmt: skip
        owners = {"weights": 64 * MIB, "gradients": 64 * MIB, "optimizer": 128 * MIB, "buckets": 64 * MIB}
        made.append(
            wire.Ledger(step, phase, 0, 0, allocated, allocated - 1024, reserved, **owners, buffers=0, activations=0)
        )
    return [*made, wire.Step(step, now, 10**8, MIB, ((8, 1024),), phases=4)]


def main() -> None:
    growth = int(sys.argv[1])
    clock = wire.Clock(time.monotonic_ns(), time.time_ns())
    speaking = []
    for rank in (0, 1):
        told = endpoint.describe("grow.py", rank=rank, world_size=3, local_rank=rank, run_id="night")
        hello = wire.Hello(
            (wire.PROTOCOL_MAJOR, wire.PROTOCOL_MINOR), "0", told.nonce, told.name, told.host, os.getpid(),
            told.start_time, told.boot_id, (), "3", clock, "cpu", "2.15.0", (wire.Device(0, None, "CPU", None, "cpu"),),
            rank, rank, 3, "night", node="0", local_world_size=3, restarts=1,
        )  # fmt: skip
        size = 64 * MIB
        model = wire.Model(0, 0, "net", "Net", size // 4, size // 4, size, size, 0, 0, (0,), parallel=DDP)
        recorder = Recorder()
        beat = wire.Heartbeat(time.monotonic_ns(), 0, "forward", 0, rss=BASE, devices=(0,), pinned=8 << 20)
        publisher = Threaded(recorder, lambda said=(hello, model): list(said), lambda beat=beat: beat, told)
        publisher.start()
        speaking.append((publisher, recorder))
    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    step = 0
    while not ended.wait(1 / STEPS_A_SECOND):
        for event in events(step, growth):
            for _, recorder in speaking:
                recorder.append(event)
        step += 1
    for publisher, _ in speaking:
        publisher.close(wire.Goodbye("finished", time.monotonic_ns(), step))


if __name__ == "__main__":
    main()
