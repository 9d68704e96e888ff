"""What the viewer's inside costs: applying events, taking frames, making reports, writing objects; memory over a run.

    python benchmarks/session.py [--quick]

CPU time of this process (not the wall clock), the best of three rounds; ratios are to one core. The events are those
of a real stream: five phases, a step and (on every tenth step) ledgers, 64 ranks at 20 steps a second.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gpumon.analysis import Reporter
from gpumon.export import jsonl
from gpumon.export.objects import Objects
from gpumon.session.store import SessionStore
from gpumon_agent import wire

PHASES = ("between", "forward", "backward", "clipping", "optimizer")
STEPS_PER_S = 20
STEP_NS = 1_000_000_000 // STEPS_PER_S
UNIX_NS = 1_700_000_000_000_000_000
MIB = 1 << 20


def hello(rank: int) -> wire.Hello:
    return wire.Hello(
        protocol=(0, 1), agent="", nonce=f"r{rank}", name="train.py", host="box", pid=1000 + rank, start_time=1,
        boot_id="", argv=("train.py",), python="", clock=wire.Clock(0, UNIX_NS), backend="cuda",
        devices=(wire.Device(0, f"GPU-{rank}", "H200", 140 << 30),), rank=rank, world_size=64, run_id="job",
    )  # fmt: skip


def model() -> list[wire.Event]:
    optimizer = wire.Optimizer("AdamW", 25 * MIB, 100 * MIB, 200 * MIB, True, False)
    described = wire.Model(
        0, 0, "net", "Net", 25 * MIB, 25 * MIB, 100 * MIB, 100 * MIB, 0, 1, (0,), (optimizer,)
    )  # fmt: skip
    return [described, wire.Module(0, 0, "body", "Linear", 25 * MIB, 100 * MIB, 100 * MIB, 0)]


def step_events(step: int, varying: bool) -> list[wire.Event]:
    """One step: 300 MiB standing, a peak that varies with the batch if asked for."""
    batch = 64 + (step * 7919) % 449 if varying else 256
    events: list[wire.Event] = []
    for index, name in enumerate(PHASES):
        t_ns = step * STEP_NS + index * STEP_NS // 6
        peak = 400 * MIB + batch * MIB * (name in ("forward", "backward"))
        events.append(
            wire.Phase(
                step, name, 0, 0, t_ns, STEP_NS // 6, 300 * MIB, peak, 1024 * MIB, 1024 * MIB, 300 * MIB, 0,
                299 * MIB, 700, 0, 0, wire.SAMPLED if step % 10 == 0 else 0,
            )
        )  # fmt: skip
        if step % 10 == 0:
            events.append(
                wire.Ledger(step, name, 0, 0, 300 * MIB, 299 * MIB, 1024 * MIB, 100 * MIB, 0, 0, 199 * MIB, 0, 0)
            )
    events.append(wire.Step(step, step * STEP_NS + STEP_NS, STEP_NS, batch * 512, ((batch, 64),), False, len(PHASES)))
    return events


def stream(ranks: int, begin: int, steps: int, varying: bool = False) -> Iterator[wire.Received]:
    seq = begin * 100
    if begin == 0:
        for rank in range(ranks):
            for event in (hello(rank), *model(), wire.Synced(-1)):
                yield wire.Received(f"r{rank}", UNIX_NS, event)
    for step in range(begin, begin + steps):
        events = step_events(step, varying)
        unix_ns = UNIX_NS + step * STEP_NS
        for rank in range(ranks):
            for offset, event in enumerate(events):
                yield wire.Received(f"r{rank}", unix_ns, event, seq + offset)
        seq += len(events)


def cpu_s(work: Callable[[], object], rounds: int = 3) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def applying(ranks: int, steps: int) -> tuple[float, int]:
    """Seconds and events, building of the messages not counted."""
    events = list(stream(ranks, 0, steps))

    def work() -> None:
        store = SessionStore()
        apply = store.apply
        for received in events:
            apply(received)

    return cpu_s(work), len(events)


def filled(ranks: int, steps: int, varying: bool = False) -> SessionStore:
    store = SessionStore()
    for received in stream(ranks, 0, steps, varying):
        store.apply(received)
    return store


def framing(ranks: int, steps: int) -> float:
    """Seconds a frame, with a new step of every rank between two frames, as at 4 Hz."""
    store = filled(ranks, steps)
    spent, frames = 0.0, 50
    for index in range(frames):
        for received in stream(ranks, steps + index, 1):
            store.apply(received)
        began = time.process_time()
        store.frame(UNIX_NS)
        spent += time.process_time() - began
    return spent / frames


def reporting(ranks: int, steps: int, varying: bool, a_frame: int = 1) -> tuple[float, float]:
    """Seconds a rank to learn a run that is joined late, and a step and rank afterwards, so many steps a frame."""
    store, reporter = filled(ranks, steps, varying), Reporter()
    began = time.process_time()
    reporter.report(store.frame(UNIX_NS))
    joined = (time.process_time() - began) / ranks
    spent, more = 0.0, 100
    for index in range(more):
        for received in stream(ranks, steps + index * a_frame, a_frame, varying):
            store.apply(received)
        frame = store.frame(UNIX_NS)
        began = time.process_time()
        reporter.report(frame)
        spent += time.process_time() - began
    return joined, spent / more / a_frame / ranks


def writing(ranks: int, steps: int) -> float:
    """Seconds a step and rank of `--json`: apply, report and encode."""
    events = list(stream(ranks, 0, steps, True))

    def work() -> None:
        made = Objects()
        for received in events:
            for stated in made.take(received):
                jsonl.line(stated.object)

    return cpu_s(work, 1) / (steps * ranks)


def growth(steps: int) -> tuple[int, int]:
    """Resident KiB after the rings are full, and `steps` steps later."""
    store, reporter = filled(1, 3_000, True), Reporter()
    reporter.report(store.frame(UNIX_NS))
    before = _rss_kib()
    for begin in range(3_000, 3_000 + steps, 500):
        for received in stream(1, begin, 500, True):
            store.apply(received)
        reporter.report(store.frame(UNIX_NS))
    return before, _rss_kib()


def _rss_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps: to see that it runs")
    quick = parser.parse_args().quick
    seconds, count = applying(64, 20 if quick else 100)
    events_per_s = 64 * STEPS_PER_S * (len(PHASES) + 1)
    rows = [
        ("apply, an event", f"{seconds / count * 1e6:.2f} µs", ""),
        ("apply, 64 ranks × 5 phases × 20 steps/s", f"{events_per_s:,} events/s",
         f"{seconds / count * events_per_s:.1%} of a core"),
    ]  # fmt: skip
    for ranks, steps in ((1, 2_000), (8, 2_000), (64, 2_000)):
        each = framing(ranks, 200 if quick else steps)
        rows.append((f"frame, {ranks} ranks × {steps:,} steps", f"{each * 1e6:.0f} µs", f"{4 * each:.2%} at 4 Hz"))
    for varying in (False, True):
        joined, each = reporting(8, 300 if quick else 2_000, varying)
        kind = "batches that vary" if varying else "same shapes"
        rows.append((f"report, joining late, a rank ({kind})", f"{joined * 1e3:.1f} ms", ""))
        rows.append((f"report, a step and rank, one a step ({kind})", f"{each * 1e6:.0f} µs", ""))
        _, each = reporting(8, 300 if quick else 2_000, varying, STEPS_PER_S // 4)
        rows.append((f"report, a step and rank, 4 frames/s ({kind})", f"{each * 1e6:.0f} µs", ""))
    each = writing(8, 50 if quick else 400)
    rows.append(("--json, a step and rank", f"{each * 1e6:.0f} µs", f"{8 * STEPS_PER_S * each:.1%}, 8 ranks × 20/s"))
    steps = 2_000 if quick else 100_000
    before, after = growth(steps)
    rows.append((f"memory, {steps:,} steps later", f"{before / 1024:.1f} → {after / 1024:.1f} MiB", ""))
    width = max(len(name) for name, _, _ in rows)
    for name, figure, share in rows:
        print(f"{name:<{width}}  {figure:>20}  {share}")


if __name__ == "__main__":
    main()
