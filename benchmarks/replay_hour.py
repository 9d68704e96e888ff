"""An hour's worth of a large job through the viewer's inside, as fast as it goes: does its memory stay where it was?

    python benchmarks/replay_hour.py [--ranks 64] [--minutes 60]

64 ranks, five phases, 20 steps a second, ledgers on every tenth step: 27 million events. They are applied to the
viewer's own store; every half second of the run a frame is taken and reported, and the Ranks page made of it; every
fifteen seconds the exporter's text. Prints resident memory as the run goes on, what a second of the run costs in
processor time, and what a scrape costs. With 64 ranks it takes about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import resource
import time
from pathlib import Path

from session import STEPS_PER_S, UNIX_NS, step_events, stream

from gpumon.analysis import Reporter
from gpumon.session.store import SessionStore, StoreLimits
from gpumon.tui.app import STEPS_AT_LEAST, STEPS_IN_ALL
from gpumon.tui.styles import UNICODE
from gpumon.tui.view import choose
from gpumon.tui.widgets.rank_lines import rank_lines
from gpumon.tui.widgets.rank_rows import Peaks, rank_page
from gpumon_agent import wire

LOOK_STEPS = STEPS_PER_S // 2
SCRAPE_STEPS = 15 * STEPS_PER_S


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60.0)
    asked = parser.parse_args()
    ranks, steps = asked.ranks, int(asked.minutes * 60 * STEPS_PER_S)
    store = SessionStore(StoreLimits(steps=max(STEPS_AT_LEAST, STEPS_IN_ALL // ranks)))
    reporter, peaks = Reporter(), Peaks()
    scrapes: list[float] = []
    size = 0
    for received in stream(ranks, 0, 0):
        store.apply(received)
    seq = 0
    began = time.process_time()
    marks = {max(1, steps * tenth // 10) for tenth in range(1, 11)}
    for step in range(steps):
        events = step_events(step, varying=True)
        unix_ns = UNIX_NS + step * 50_000_000
        for rank in range(ranks):
            source = f"r{rank}"
            for offset, event in enumerate(events):
                store.apply(wire.Received(source, unix_ns, event, seq + offset))
        seq += len(events)
        if step % LOOK_STEPS == 0:
            frame = store.frame(unix_ns)
            reports = reporter.report(frame)
            page = rank_page(choose(frame, reports, None, None), peaks)
            rank_lines(page, 0, 120, 36, UNICODE)
            if step % SCRAPE_STEPS == 0:
                spent = time.process_time()
                size = scrape(frame, reports)
                scrapes.append(time.process_time() - spent)
        if step + 1 in marks:
            run_s = (step + 1) / STEPS_PER_S
            share = (time.process_time() - began) / run_s
            print(f"{run_s / 60:6.1f} min  {resident_mib():7.1f} MiB  {share:.1%} of a core", flush=True)
    scrapes.sort()
    print(f"a scrape: {scrapes[len(scrapes) // 2] * 1e3:.0f} ms, {size / 1024:.0f} KiB; lost: {lost(store)}")


def scrape(frame: object, reports: object) -> int:
    from prometheus_client import CollectorRegistry, generate_latest

    from gpumon.export.prometheus import Jobs, Watched

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Jobs(lambda: (Watched("bench", "0", frame, reports),)))  # type: ignore[arg-type]
    return len(generate_latest(registry))


def lost(store: SessionStore) -> int:
    return sum(rank.lost_events for rank in store.frame(UNIX_NS).ranks)


if __name__ == "__main__":
    main()
