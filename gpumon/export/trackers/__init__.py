"""Experiment trackers: each module writes a run's figures into one, with the tracker's own library.

They run in the process that `gpumon run --log-to` starts beside the training, never in the training.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from typing import Any, Protocol

from gpumon.analysis.answer import Answer, line
from gpumon.analysis.types import Finding
from gpumon.export.run_figures import PREFIX, Figures
from gpumon_agent import wire

NEEDS = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "otlp": ("opentelemetry.sdk", "opentelemetry.exporter.otlp"),
}
"""Kind of `wire.Tracker` → the modules without which it cannot be written."""


class Unusable(Exception):
    """This run cannot be logged to. The text is a sentence for a person, without the tracker's name."""


class Sink(Protocol):
    """One open run of a tracker. Any method may raise whatever the library raises, and may wait for a network."""

    def log(self, figures: Figures) -> None: ...

    def finish(self, summary: dict[str, int | str], findings: tuple[Finding, ...]) -> None:
        """Writes the summary and returns when everything is written. The training's own run is not ended."""


def installed(kind: str) -> bool:
    try:
        return all(importlib.util.find_spec(module) is not None for module in NEEDS[kind])
    except (ModuleNotFoundError, ValueError):  # the package around it is missing; sys.modules says that it is
        return False


def open_run(used: wire.Tracker, folder: str, name: str) -> Sink:
    """`folder`: the training's, for relative paths. `name`: the job's. Raises Unusable."""
    module = importlib.import_module(f"{__name__}.to_{used.kind}")
    opened: Any = module.open_run(used, folder, name)
    sink: Sink = opened
    return sink


def about(found: Finding) -> str:
    """A finding as one line of text."""
    where = f" ({found.where})" if found.where and found.where not in found.title else ""
    return f"{found.code}: {found.title}{where}." + (f" To do: {found.remedy}." if found.remedy else "")


def texts(said: Answer | None, findings: Iterable[Finding]) -> dict[str, str]:
    """For trackers that keep a text under a name. A later finding of the same code replaces the earlier one."""
    found = {f"{PREFIX}finding/{each.code}": about(each) for each in findings}
    return found if said is None else {**found, f"{PREFIX}answer": line(said)}
