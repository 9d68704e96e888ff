"""How often a tracker is written: the clock is the test's, the tracker is TensorBoard."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import Run, apply

from gpumon.cli import tracking
from gpumon_agent import wire

pytestmark = pytest.mark.integration


def test_at_most_every_ten_seconds_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seconds = 100.0
    monkeypatch.setattr(tracking.time, "monotonic", lambda: seconds)
    run = Run()
    told = wire.Trackers(str(tmp_path), (wire.Tracker("tensorboard", where="runs"),))
    beside = tracking._Beside(1, ("tensorboard", "mlflow"))
    apply(run.stream(1), [run.received(told, 0)], store=beside._store)
    for step, seconds in enumerate((100.0, 105.0, 109.9, 110.0, 119.9), 1):  # noqa: B007
        apply(run.step(step), store=beside._store)
        beside._look()
    beside._look(last=True)
    monkeypatch.undo()
    said = list(beside.finish())
    assert said == ["gpumon: --log-to mlflow: the training did not use it, so nothing was logged to it"]
    events = reading.EventAccumulator(str(tmp_path / "runs" / "gpumon"))
    events.Reload()
    assert [event.step for event in events.Scalars("gpumon/peak_bytes")] == [1, 4, 5]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own
def test_what_a_library_raises_is_one_sentence_and_ends_only_its_own_logging(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("mlflow")
    (tmp_path / "file").touch()
    run = Run()
    used = wire.Tracker("mlflow", run="gone", where="no-such-store://here"), wire.Tracker("tensorboard", where="file")
    beside = tracking._Beside(1, (tracking.AUTO,))
    apply(run.stream(2), [run.received(wire.Trackers(str(tmp_path), used), 0)], store=beside._store)
    beside._look(last=True)
    mlflow, tensorboard = beside.finish()
    assert mlflow.startswith("gpumon: --log-to mlflow: logging ended by ")
    assert "no-such-store" in mlflow
    assert tensorboard.startswith("gpumon: --log-to tensorboard: logging ended by ")
