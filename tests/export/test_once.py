"""`gpumon export prometheus --once` prints what every job has sent, and says so if one has not sent all."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")

from gpumon.cli import exporting
from gpumon.session.store import SessionStore


def waited(monkeypatch: pytest.MonkeyPatch, *, times: int, sends_s: float, syncs: bool) -> float:
    """Seconds for a job that sends its past for so long, of a clock that goes `times` as fast."""
    clock = SimpleNamespace(monotonic=lambda: times * time.monotonic(), time_ns=time.time_ns)
    monkeypatch.setattr(exporting, "time", clock)
    exporter = exporting.Exporter()
    job = exporter._followed["job",] = exporting._Followed(
        "train", "0", SessionStore(), clock.monotonic(), {1}, heard=clock.monotonic()
    )

    async def sends() -> None:
        until = clock.monotonic() + sends_s
        while clock.monotonic() < until:
            job.heard = clock.monotonic()
            await asyncio.sleep(0.01)
        if syncs:
            job.synced.add("a")

    async def both() -> float:
        began = clock.monotonic()
        sending = asyncio.create_task(sends())
        await exporter.pasts()
        took = clock.monotonic() - began
        sending.cancel()
        return took

    return asyncio.run(both())


def test_a_past_that_still_arrives_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert waited(monkeypatch, times=10, sends_s=12.0, syncs=True) >= 12.0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("times", "sends_s", "least", "most"), [(5, 0.0, 5, 9), (60, 1e9, 120, 200)], ids=["silent", "without an end"]
)
def test_who_does_not_send_it_all_is_named(monkeypatch, capsys, times, sends_s, least, most) -> None:
    assert least <= waited(monkeypatch, times=times, sends_s=sends_s, syncs=False) < most
    assert capsys.readouterr().err == "gpumon: train has not sent its whole past: its figures may be old\n"
