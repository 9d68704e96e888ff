"""TensorBoard's writers are found by their threads: torch's, and tensorboardX's."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from gpumon_agent import trackers
from gpumon_agent.trackers import TrackersUsed

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("name", ["torch.utils.tensorboard", "tensorboardX"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboardX's own
def test_a_writer_is_found_while_it_is_open(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    pytest.importorskip("tensorboard" if name == "torch.utils.tensorboard" else name)
    library = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    assert TrackersUsed().changed(trackers.EVERY_NS) is None
    with library.SummaryWriter("runs/mine") as writer:
        writer.add_scalar("loss", 1.0, 0)
        told = TrackersUsed().changed(trackers.EVERY_NS)
    assert told is not None
    assert [(each.kind, each.where, told.folder) for each in told.used] == [("tensorboard", "runs/mine", str(tmp_path))]
    assert TrackersUsed().changed(trackers.EVERY_NS) is None
