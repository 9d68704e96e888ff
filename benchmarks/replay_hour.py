"""An hour of a large job through the viewer's store and reports, as fast as possible: does its memory stay constant?

    python benchmarks/replay_hour.py [--ranks 64] [--minutes 60]

64 ranks, five phases, 20 steps per second, ledgers on every tenth step: 30 million events, applied to the viewer's
store. Every half second of the run, a frame, its reports and the Ranks page are made; every fifteen seconds, the
exporter's text. Prints resident memory over the run, CPU time per second of the run, and the cost of a scrape. With
64 ranks it takes about a quarter of an hour.
"""

from __future__ import annotations

import time

from common import MIB, options, resident_bytes
from prometheus_client import CollectorRegistry, generate_latest

from gpumon.analysis import Reporter
from gpumon.export.prometheus import JobReports, Jobs
from gpumon.session.store import SessionStore, StoreLimits
from gpumon.tui.app import STEPS_AT_LEAST, STEPS_IN_ALL
from gpumon.tui.styles import UNICODE
from gpumon.tui.view import choose
from gpumon.tui.widgets.rank_lines import rank_lines
from gpumon.tui.widgets.rank_rows import PeakHistory, rank_page
from gpumon_agent import wire

PHASES = ("between", "forward", "backward", "clipping", "optimizer")
STEPS_PER_S = 20
STEP_NS = 1_000_000_000 // STEPS_PER_S
UNIX_NS = 1_700_000_000_000_000_000
LOOK_STEPS = STEPS_PER_S // 2
SCRAPE_STEPS = 15 * STEPS_PER_S


def described(rank: int) -> list[wire.Event]:
    hello = wire.Hello(
        protocol=(0, 1), agent="", nonce=f"r{rank}", name="train.py", host="box", pid=1000 + rank, start_time=1,
        boot_id="", argv=("train.py",), python="", clock=wire.Clock(0, UNIX_NS), backend="cuda",
        devices=(wire.Device(0, f"GPU-{rank}", "H200", 140 << 30),), rank=rank, world_size=64, run_id="job",
    )  # fmt: skip
    optimizer = wire.Optimizer("AdamW", 25 * MIB, 100 * MIB, 200 * MIB, True, False)
    model = wire.Model(0, 0, "net", "Net", 25 * MIB, 25 * MIB, 100 * MIB, 100 * MIB, 0, 1, (0,), (optimizer,))
    return [hello, model, wire.Module(0, 0, "body", "Linear", 25 * MIB, 100 * MIB, 100 * MIB, 0), wire.Synced(-1)]


def step_events(step: int) -> list[wire.Event]:
    """One step: 300 MiB kept, a peak that follows the varying batch."""
    batch = 64 + (step * 7919) % 449
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
    return [*events, wire.Step(step, step * STEP_NS + STEP_NS, STEP_NS, batch * 512, ((batch, 64),), False, 5)]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60.0)
    asked = parser.parse_args()
    ranks, steps = asked.ranks, int(asked.minutes * 60 * STEPS_PER_S)
    store = SessionStore(StoreLimits(steps_in_all=STEPS_IN_ALL, steps_at_least=STEPS_AT_LEAST))
    reporter, peaks = Reporter(), PeakHistory()
    scrapes: list[float] = []
    size = seq = 0
    for rank in range(ranks):
        for event in described(rank):
            store.apply(wire.Received(f"r{rank}", UNIX_NS, event))
    began = time.process_time()
    marks = {max(1, steps * tenth // 10) for tenth in range(1, 11)}
    for step in range(steps):
        events = step_events(step)
        unix_ns = UNIX_NS + step * STEP_NS
        for rank in range(ranks):
            for offset, event in enumerate(events):
                store.apply(wire.Received(f"r{rank}", unix_ns, event, seq + offset))
        seq += len(events)
        if step % LOOK_STEPS == 0:
            frame = store.frame(unix_ns)
            reports = reporter.report(frame)
            page = rank_page(choose(frame, reports, None, None), peaks)
            rank_lines(page, 0, 120, 36, UNICODE)
            if step % SCRAPE_STEPS == 0:
                spent = time.process_time()
                registry = CollectorRegistry(auto_describe=False)
                registry.register(Jobs(lambda f=frame, r=reports: (JobReports("bench", "0", f, r),)))  # type: ignore[misc]
                size = len(generate_latest(registry))
                scrapes.append(time.process_time() - spent)
        if step + 1 in marks:
            run_s = (step + 1) / STEPS_PER_S
            share = (time.process_time() - began) / run_s
            print(f"{run_s / 60:6.1f} min  {resident_bytes() / MIB:7.1f} MiB  {share:.1%} of a core", flush=True)
    lost = sum(rank.lost_events for rank in store.frame(UNIX_NS).ranks)
    print(f"a scrape: {sorted(scrapes)[len(scrapes) // 2] * 1e3:.0f} ms, {size / 1024:.0f} KiB; lost: {lost}")


if __name__ == "__main__":
    main()
