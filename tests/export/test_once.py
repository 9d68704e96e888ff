"""`gpumon export prometheus --once` prints what every job has sent, and says so if one has not sent all."""

from __future__ import annotations

import asyncio
import time

import pytest

pytest.importorskip("prometheus_client", reason="the extra `prometheus` is not installed")

from gpumon.cli import exporting
from gpumon.session.store import SessionStore


def waited(monkeypatch: pytest.MonkeyPatch, *, sends_s: float, syncs: bool) -> float:
    """Seconds for a job that sends its past for so long."""
    monkeypatch.setattr(exporting, "ONCE_PATIENCE_S", 0.4)
    monkeypatch.setattr(exporting, "ONCE_PATIENCE_MAX_S", 3.0)
    exporter = exporting.Exporter()
    job = exporter._followed["job",] = exporting._Followed("train", "0", SessionStore(), time.monotonic(), {1})

    async def sends() -> None:
        until = time.monotonic() + sends_s
        while time.monotonic() < until:
            job.heard = time.monotonic()
            await asyncio.sleep(0.01)
        if syncs:
            job.synced.add("a")

    async def both() -> float:
        began = time.monotonic()
        sending = asyncio.create_task(sends())
        await exporter.pasts()
        took = time.monotonic() - began
        sending.cancel()
        return took

    return asyncio.run(both())


def test_a_past_that_still_arrives_is_waited_for(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert waited(monkeypatch, sends_s=1.2, syncs=True) >= 1.2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("sends_s", "at_most"), [(0.0, 2.5), (60.0, 30.0)], ids=["silent", "without an end"])
def test_who_does_not_send_it_all_is_named(monkeypatch: pytest.MonkeyPatch, capsys, sends_s, at_most) -> None:
    assert 0.3 < waited(monkeypatch, sends_s=sends_s, syncs=False) < at_most
    assert capsys.readouterr().err == "gpumon: train has not sent its whole past: its figures may be old\n"
