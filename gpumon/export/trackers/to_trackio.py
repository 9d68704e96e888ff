"""Trackio: a run of its own in the project and group of the training's run."""

from __future__ import annotations

import trackio

from gpumon.analysis.types import Finding
from gpumon.export.run_figures import Figures
from gpumon.export.trackers import about, texts
from gpumon_agent import wire

_LEVELS = {"info": "info", "warning": "warn", "critical": "error"}


def open_run(used: wire.Tracker, folder: str, name: str) -> _Run:
    return _Run(
        trackio.init(
            used.project,
            name=f"{used.name} gpumon",
            group=used.group or used.name,
            space_id=used.where or None,
            embed=False,
            auto_log_gpu=False,
        )
    )


class _Run:
    def __init__(self, run: trackio.Run) -> None:
        self._run = run
        self._step = 0

    def log(self, figures: Figures) -> None:
        self._step = figures.step
        self._run.log({**figures.numbers, **texts(figures.answer, ())}, step=figures.step)
        for found in figures.opened:
            level = trackio.AlertLevel(_LEVELS[found.severity])
            self._run.alert(f"gpumon: {found.code}", about(found), level=level, step=figures.step)

    def finish(self, summary: dict[str, int | str], findings: tuple[Finding, ...]) -> None:
        self._run.log({**summary, **texts(None, findings)}, step=self._step)
        self._run.finish()
