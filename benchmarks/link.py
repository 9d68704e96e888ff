"""What following many ranks at once costs a viewer's process, and whether events are lost.

    python benchmarks/link.py [--ranks 64] [--seconds 10]

The ranks are real publishers with their own sockets, sixteen per process, 5 phases, 20 steps per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import tempfile
import time

from common import options, sending

from gpumon import link
from gpumon_agent import wire


async def follow(ranks: int, seconds: float) -> None:
    last: dict[str, int] = {}
    messages = lost = synced = 0
    began_cpu = began = 0.0
    lags = []
    async with contextlib.aclosing(link.subscribe(link.resolve("bench"))) as stream:
        opened = time.monotonic()
        async for received in stream:
            if isinstance(received.event, wire.Synced):
                synced += 1
                if synced == ranks:
                    print(f"all pasts complete   {(time.monotonic() - opened) * 1e3:.0f} ms")
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
    print(f"{ranks} ranks followed    {messages / took:,.0f} messages/s, {lost} lost, {share:.1%} of a core")
    cuts = [value / 1e6 for value in statistics.quantiles(lags, n=20)]
    print(f"append to viewer     p50 {cuts[9]:.0f} ms, p95 {cuts[18]:.0f} ms; load {os.getloadavg()[0]:.1f}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gm") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime
        with sending(asked.ranks):
            asyncio.run(follow(asked.ranks, asked.seconds))


if __name__ == "__main__":
    main()
