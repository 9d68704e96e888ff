"""Trackio: a run of its own in the project and group of the training's run."""

from __future__ import annotations

import inspect

import trackio

from gpumon.analysis.types import Finding
from gpumon.export.run_figures import Figures
from gpumon.export.trackers import about, texts
from gpumon_agent import wire

_LEVELS = {"info": "info", "warning": "warn", "critical": "error"}


def open_run(used: wire.Tracker, folder: str, name: str) -> _Run:
    newer = {"auto_log_gpu": False} if "auto_log_gpu" in inspect.signature(trackio.init).parameters else {}
    return _Run(
        trackio.init(
            used.project,
            name=f"{used.name} gpumon",
            space_id=used.where or None,
            group=used.group or used.name,
            embed=False,
            **newer,
        )
    )


class _Run:
    def __init__(self, run: trackio.Run) -> None:
        self._run = run
        self._step = 0

    def log(self, figures: Figures) -> None:
        self._step = figures.step
        self._run.log({**figures.numbers, **texts(figures.answer, ())}, step=figures.step)
        for found in figures.opened if hasattr(self._run, "alert") else ():  # in 0.5 the last row has them
            level = trackio.AlertLevel(_LEVELS[found.severity])
            self._run.alert(f"gpumon: {found.code}", about(found), level=level, step=figures.step)

    def finish(self, summary: dict[str, int | str], findings: tuple[Finding, ...]) -> None:
        self._run.log({**summary, **texts(None, findings)}, step=self._step)
        self._run.finish()
