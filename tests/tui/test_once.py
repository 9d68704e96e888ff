"""`gpumon attach --once` prints a picture of all that a job has sent, however long that takes to arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
from synthetic import GIB, Run

from gpumon.session.store import SessionStore
from gpumon.tui import once
from gpumon_agent import wire


def gathered(*, pause_s: float, steps: int = 8) -> tuple[bool, int]:
    """Whether all of the past was heard, and its newest step, from a job that rests after each step of its past."""
    run, store = Run(total=40 * GIB), SessionStore()

    async def events() -> AsyncIterator[wire.Received]:
        for received in run.picture():
            yield received
        for step in range(steps):
            for received in run.step(step, replayed=True):
                yield received
            await asyncio.sleep(pause_s)
        yield run.received(wire.Synced(-1), steps)
        yield run.received(wire.Heartbeat(run.time_ns(steps), steps, "forward", 0), steps)
        await asyncio.sleep(60)

    async def host(_: object) -> AsyncIterator[wire.Received]:
        yield run.host(0)
        await asyncio.sleep(60)

    whole = asyncio.run(once._gather(events(), store, host))  # type: ignore[arg-type]
    return whole, store.frame(run.unix_ns(steps)).ranks[0].steps[-1].step


def test_a_past_that_still_arrives_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "PATIENCE_S", 0.4)
    assert gathered(pause_s=0.1) == (True, 7)


def test_a_past_that_stops_arriving_for_three_seconds_is_said_to_be_cut() -> None:
    assert gathered(pause_s=4.5) == (False, 0)


def test_one_that_arrives_for_a_minute_is_cut_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that goes twenty times as fast."""
    began = time.monotonic()
    fast = SimpleNamespace(monotonic=lambda: 20 * (time.monotonic() - began), time_ns=time.time_ns)
    monkeypatch.setattr(once, "time", fast)
    whole, newest = gathered(pause_s=0.1, steps=50)
    assert not whole
    assert newest < 35
    assert 55 < fast.monotonic() < 80
