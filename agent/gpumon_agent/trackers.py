"""Which experiment trackers this process logs to, for `gpumon run --log-to`. Nothing is imported: only sys.modules.

W&B and MLflow have their active run in a variable, Trackio in a context variable. TensorBoard's writers are in no list,
but each has a thread, which holds its file. MLflow's and Trackio's are those of the thread that trains.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpumon_agent import wire

EVERY_NS = 2_000_000_000
_WRITERS = {"_AsyncWriterThread": "tensorboard.summary.writer.event_file_writer",
            "_EventLoggerThread": "tensorboardX.event_file_writer"}  # fmt: skip
"""Classes of threads that write event files, and their modules."""


class TrackersUsed:
    """All that were found so far: a run that has ended may still be logged to."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], wire.Tracker] = {}
        self._looked_ns = 0
        self.told: wire.Trackers | None = None

    def changed(self, now_ns: int) -> wire.Trackers | None:
        """What was found, if that is new; looks once in `EVERY_NS`."""
        if now_ns - self._looked_ns < EVERY_NS:
            return None
        self._looked_ns = now_ns
        for tracker in _now():
            key = (tracker.kind, tracker.run or tracker.name, tracker.where)
            if key in self._found or len(self._found) < wire.TRACKERS_MAX:
                self._found[key] = tracker
        told = wire.Trackers(str(Path.cwd()), tuple(self._found.values())) if self._found else None
        if told == self.told:
            return None
        self.told = told
        return told


def _now() -> Iterator[wire.Tracker]:
    yield from _wandb()
    yield from _mlflow()
    yield from _tensorboard()
    yield from _trackio()
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if endpoint:
        yield wire.Tracker("otlp", where=endpoint)


def _wandb() -> Iterator[wire.Tracker]:
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or getattr(run, "disabled", False):
        return
    yield wire.Tracker(
        "wandb",
        run=_text(run.id),
        name=_text(run.name),
        where=_text(getattr(getattr(run, "settings", None), "root_dir", "")),
        project=_text(run.project),
        group=_text(run.group),
        entity=_text(run.entity),
        mode="offline" if run.offline else "online",
    )


def _mlflow() -> Iterator[wire.Tracker]:
    active = getattr(sys.modules.get("mlflow"), "active_run", None)
    store = getattr(sys.modules.get("mlflow.tracking._tracking_service.utils"), "get_tracking_uri", None)
    run = active() if active is not None and store is not None else None
    if run is not None and store is not None:
        info = run.info
        yield wire.Tracker("mlflow", run=_text(info.run_id), name=_text(info.run_name), where=_text(store()))


def _tensorboard() -> Iterator[wire.Tracker]:
    if not any(module in sys.modules for module in _WRITERS.values()):
        return
    for thread in list(getattr(threading, "_active", {}).values()):  # as enumerate(), which waits for a lock
        kind = type(thread)
        if _WRITERS.get(kind.__name__) == kind.__module__:
            written: Any = getattr(thread, "_record_writer", None)
            file = getattr(written, "_file_name", None)  # tensorboardX
            if file is None:
                opened = getattr(written, "_writer", None)
                file = getattr(opened, "filename", None) or getattr(opened, "name", None)  # TensorFlow's: name
            if file is not None:
                yield wire.Tracker("tensorboard", where=os.path.dirname(os.fsdecode(file)))  # noqa: PTH120 — a URL too


def _trackio() -> Iterator[wire.Tracker]:
    current = getattr(sys.modules.get("trackio.context_vars"), "current_run", None)
    run = current.get() if current is not None else None
    if run is not None:
        group, space = _text(getattr(run, "group", None)), _text(getattr(run, "_space_id", None))
        yield wire.Tracker("trackio", name=_text(run.name), where=space, project=_text(run.project), group=group)


def _text(value: object) -> str:
    return "" if value is None else str(value)
