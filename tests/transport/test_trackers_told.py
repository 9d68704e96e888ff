"""What the agent finds out about experiment trackers, and how a late viewer gets it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import Run, apply

from gpumon_agent import trackers, wire
from gpumon_agent.trackers import TrackersUsed
from gpumon_agent.transport.picture import Picture


def test_without_a_tracker_nothing_is_told_and_nothing_is_imported() -> None:
    looks = """
import sys
from gpumon_agent.trackers import TrackersUsed
before = set(sys.modules)
print(TrackersUsed().changed(10**18), set(sys.modules) - before)
"""
    environment = {"PYTHONPATH": str(Path(trackers.__file__).parents[1])}
    shown = subprocess.run(
        [sys.executable, "-c", looks], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout == "None set()\n"


def test_an_endpoint_is_told_once_and_without_its_password(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:secret@collector:4318")
    used = TrackersUsed()
    told = used.changed(trackers.EVERY_NS)
    assert told is not None
    assert told.folder == str(tmp_path)
    assert [(each.kind, each.where) for each in told.used] == [("otlp", "http://***@collector:4318")]
    assert used.changed(3 * trackers.EVERY_NS) is None


def test_it_looks_at_most_every_two_seconds_and_forgets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    used, at = TrackersUsed(), 10 * trackers.EVERY_NS
    assert used.changed(at) is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://one:4318")
    assert used.changed(at + 1_999_999_999) is None
    assert used.changed(at + 2_000_000_000) is not None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://two:4318")
    both = used.changed(at + 4_000_000_000)
    assert both is not None
    assert [each.where for each in both.used] == ["http://one:4318", "http://two:4318"]
    for number in range(20):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://{number}:4318")
        used.changed(at + (number + 3) * 2_000_000_000)
    assert used.told is not None
    assert len(used.told.used) == 16


def test_a_late_viewer_gets_the_newest() -> None:
    picture, run = Picture(), Run()
    for name in ("one", "two"):
        event = wire.Trackers("/home", (wire.Tracker("mlflow", name=name),))
        picture.add(event, wire.encode_event(event))
    (raw,) = picture.events()
    rank = apply(run.stream(1), [run.received(wire.decode_event(raw), 1)]).frame(run.unix_ns(2)).ranks[0]
    assert rank.trackers is not None
    assert [each.name for each in rank.trackers.used] == ["two"]
