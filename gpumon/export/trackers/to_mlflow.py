"""MLflow: metrics and tags of the training's own run, by its id."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mlflow.entities import Metric, RunTag
from mlflow.tracking import MlflowClient

from gpumon.analysis.types import Finding
from gpumon.export.run_figures import Figures
from gpumon.export.trackers import Unusable, texts
from gpumon_agent import wire
from gpumon_agent.wire.masking import MASK, masked

_SQLITE = "sqlite:///"


def open_run(used: wire.Tracker, folder: str, name: str) -> _Run:
    return _Run(MlflowClient(tracking_uri=_store(used.where, folder)), used.run)


def _store(where: str, folder: str) -> str:
    """The tracking URI. Passwords are not sent: one with a password must be in this process's environment too."""
    own = os.environ.get("MLFLOW_TRACKING_URI", "")
    if next(masked((own,))) == where:
        where = own
    elif MASK in where:
        raise Unusable(
            "its tracking URI has a password, which gpumon does not send: set MLFLOW_TRACKING_URI for gpumon run"
        )
    if where.startswith(_SQLITE):
        return _SQLITE + str(Path(folder, where.removeprefix(_SQLITE)))
    return where if "://" in where or where.startswith(("file:", "databricks")) else str(Path(folder, where))


class _Run:
    def __init__(self, client: MlflowClient, run: str) -> None:
        self._client, self._run = client, run
        self._step = 0
        self._tags: dict[str, str] = {}

    def log(self, figures: Figures) -> None:
        self._step = figures.step
        self._write(figures.numbers, texts(figures.answer, figures.opened))

    def finish(self, summary: dict[str, int | str], findings: tuple[Finding, ...]) -> None:
        numbers = {name: value for name, value in summary.items() if isinstance(value, int)}
        words = {name: value for name, value in summary.items() if isinstance(value, str)}
        self._write(numbers, words | texts(None, findings))

    def _write(self, named: dict[str, int], tags: dict[str, str]) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(name, value, now, self._step) for name, value in named.items()]
        new = {name: text for name, text in tags.items() if self._tags.get(name) != text}
        self._client.log_batch(self._run, metrics=metrics, tags=[RunTag(*each) for each in new.items()])
        self._tags |= new
