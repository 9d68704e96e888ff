"""Weights & Biases: a run of its own in the project and group of the training's run.

Not the training's run: a second process may write into it only on a server, and only if the training has opened it in
the mode "shared".
"""

from __future__ import annotations

import os
from pathlib import Path

import wandb

from gpumon.analysis.types import Finding
from gpumon.export.run_figures import Figures
from gpumon.export.trackers import about, texts
from gpumon_agent import wire

_OF_THE_TRAININGS_RUN = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME", "WANDB_SWEEP_ID", "WANDB_RUN_GROUP")
_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
_TITLE_CHARS_MAX = 63


def open_run(used: wire.Tracker, folder: str, name: str) -> _Run:
    for variable in _OF_THE_TRAININGS_RUN:
        os.environ.pop(variable, None)
    return _Run(
        wandb.init(
            project=used.project or None,
            entity=used.entity or None,
            group=used.group or used.name or used.run,
            name=f"{used.name or used.run} gpumon",
            job_type="gpumon",
            config={"run": used.run, "run_name": used.name, "job": name},
            dir=str(Path(folder, used.where)),
            mode="offline" if used.mode == "offline" else "online",
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True),
        )
    )


class _Run:
    def __init__(self, run: wandb.Run) -> None:
        self._run = run

    def log(self, figures: Figures) -> None:
        self._run.log(figures.numbers, step=figures.step)
        self._run.summary.update(texts(figures.answer, figures.opened))
        for found in figures.opened:
            self._run.alert(f"gpumon: {found.code}"[:_TITLE_CHARS_MAX], about(found), level=_LEVELS[found.severity])

    def finish(self, summary: dict[str, int | str], findings: tuple[Finding, ...]) -> None:
        self._run.summary.update({**summary, **texts(None, findings)})
        self._run.finish()
